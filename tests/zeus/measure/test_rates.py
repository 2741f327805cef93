"""Emissions and cost of windows, against a service that answers as was recorded."""

from __future__ import annotations

import math
import pickle
import time
import types
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.support import free_port
from tests.zeus.measure.service import RecordedService, recorded_service
from tests.zeus.node import VirtualNode
from zeus.monitor import Measurement, carbon, price, rates
from zeus.monitor.carbon import (
    CarbonEmissionMonitor,
    CarbonIntensityProvider,
    ElectrictyMapsClient,
    ZeusCarbonIntensityHTTPError,
    ZeusCarbonIntensityNotFoundError,
)
from zeus.monitor.price import (
    ElectricityPriceProvider,
    EnergyCostMonitor,
    OpenEIClient,
    ZeusElectricityPriceHTTPError,
    ZeusElectricityPriceNotFoundError,
)

NOON = datetime(2026, 3, 4, 12, tzinfo=timezone.utc)  # a Wednesday
PLACE = (42.28, -83.74)
KWH = 3.6e6

LATEST = {
    "zone": "US-MIDW-MISO",
    "carbonIntensity": 491,
    "datetime": "2026-03-04T12:00:00.000Z",
    "updatedAt": "2026-03-04T12:38:05.461Z",
    "emissionFactorType": "lifecycle",
    "isEstimated": True,
}
HISTORY = {
    "zone": "US-MIDW-MISO",
    "history": [
        {"datetime": "2026-03-04T11:00:00.000Z", "carbonIntensity": 400},
        {"datetime": "2026-03-04T12:00:00.000Z", "carbonIntensity": 500},
        {"datetime": "2026-03-04T13:00:00.000Z", "carbonIntensity": None},
    ],
}
RATES = {
    "items": [
        {"label": "another", "name": "Industrial"},
        {
            "label": "539fb6f4ec4f024bc1dc0abf",
            "energyratestructure": [[{"rate": 0.10, "unit": "kWh"}], [{"rate": 0.2, "adj": 0.05}]],
            "energyweekdayschedule": [[0] * 24] * 2 + [[0] * 12 + [1] * 12] + [[0] * 24] * 9,
            "energyweekendschedule": [[0] * 24] * 12,
        },
    ]
}


@pytest.fixture
def maps() -> Iterator[RecordedService]:
    with recorded_service(
        {"/carbon-intensity/latest": (200, LATEST), "/carbon-intensity/history": (200, HISTORY)}
    ) as service:
        yield service


@pytest.fixture
def openei() -> Iterator[RecordedService]:
    with recorded_service({"/utility_rates": (200, RATES)}) as service:
        yield service


@pytest.fixture(autouse=True)
def waits_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may take more than the second that a training waits."""
    monkeypatch.setattr("zeus.monitor.rates.FIRST_WAIT_S", 60.0)


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at_noon(
    monitor: CarbonEmissionMonitor | EnergyCostMonitor, node: VirtualNode, before_s: float = 0
) -> Any:
    """The monitor in the node's time, in which it is noon now, or shortly before."""
    node.use_clock(monitor.zeus_monitor)
    shift_ns = int((NOON.timestamp() - before_s) * 1e9) - node.clock()
    monitor.offset_ns = lambda: shift_ns
    return monitor


def test_electricity_maps_is_asked_with_the_users_key(
    maps: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ElectrictyMapsClient(
        PLACE, estimate=True, emission_factor_type="lifecycle", token="mine", url=maps.url
    )
    assert client.get_current_carbon_intensity() == 491
    assert client.get_recent_carbon_intensity() == {
        NOON - timedelta(hours=1): 400,
        NOON: 500,
    }
    path, query, headers = maps.asked[0]
    assert path == "/carbon-intensity/latest"
    assert query == {
        "lat": "42.28",
        "lon": "-83.74",
        "disableEstimations": "false",
        "emissionFactorType": "lifecycle",
    }
    assert headers["auth-token"] == "mine"
    assert (client.update_period, client.history_length) == (timedelta(hours=1), 24)
    monkeypatch.setenv(carbon.TOKEN_ENV, "from-env")
    ElectrictyMapsClient(PLACE, url=maps.url).get_current_carbon_intensity()
    _, query, headers = maps.asked[-1]
    assert headers["auth-token"] == "from-env"
    assert query["disableEstimations"] == "true"


def test_refusals_and_unknown_values_of_electricity_maps_are_reported(
    maps: RecordedService,
) -> None:
    client = ElectrictyMapsClient(PLACE, token="secret", url=maps.url)
    maps.answers["/carbon-intensity/latest"] = (401, {"error": "Invalid auth-token"})
    with pytest.raises(ZeusCarbonIntensityHTTPError, match=r"401\); give your key as token") as one:
        client.get_current_carbon_intensity()
    assert "secret" not in str(one.value)
    maps.answers["/carbon-intensity/latest"] = (200, {"zone": "XX"})
    with pytest.raises(ZeusCarbonIntensityNotFoundError, match="estimate=True"):
        client.get_current_carbon_intensity()
    maps.answers["/carbon-intensity/history"] = (200, {"history": [{"carbonIntensity": 1}]})
    client = ElectrictyMapsClient(PLACE, estimate=True, url=maps.url)
    with pytest.raises(ZeusCarbonIntensityNotFoundError, match=r"of \(42.28, -83.74\)$"):
        client.get_recent_carbon_intensity()
    nobody = ElectrictyMapsClient(PLACE, url="http://127.0.0.1:9")
    with pytest.raises(ZeusCarbonIntensityHTTPError, match="cannot be reached"):
        nobody.get_recent_carbon_intensity()


@pytest.mark.parametrize("proxy", ["socks4://proxy:1080", "http://proxy:port"])
def test_a_proxy_that_cannot_be_used_is_reported(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    client = ElectrictyMapsClient(PLACE, url="http://127.0.0.1:9")
    with pytest.raises(ZeusCarbonIntensityHTTPError, match="cannot be reached"):
        client.get_current_carbon_intensity()


def test_each_hours_energy_counts_with_that_hours_intensity(
    node: VirtualNode, maps: RecordedService
) -> None:
    client = ElectrictyMapsClient(PLACE, url=maps.url)
    monitor = at_noon(CarbonEmissionMonitor(client, gpu_indices=[0]), node, before_s=10)
    monitor.begin_window("epoch")
    assert monitor.current_keys == {"epoch"}
    node.clock.sleep(40)
    measured = pickle.loads(pickle.dumps(monitor.end_window("epoch")))
    assert measured.time == pytest.approx(40)
    whole_j = measured.gpu_energy[0]
    expected_g = whole_j * (400 / 4 + 500 * 3 / 4) / KWH  # an idle GPU's power does not change
    assert measured.gpu_carbon_emission[0] == pytest.approx(expected_g, rel=0.01)
    assert (measured.cpu_energy, measured.cpu_carbon_emission) == (None, None)
    assert monitor.current_keys == set()


def test_windows_of_emissions_overlap_and_have_names(
    node: VirtualNode, maps: RecordedService
) -> None:
    client = ElectrictyMapsClient(PLACE, url=maps.url)
    monitor = at_noon(CarbonEmissionMonitor(client), node)
    monitor.begin_window("a")
    with pytest.raises(ValueError, match="already exists"):
        monitor.begin_window("a")
    with pytest.raises(ValueError, match="does not exist"):
        monitor.end_window("b")
    monitor.begin_window("b")
    node.clock.sleep(1)
    longer = monitor.end_window("b")
    node.clock.sleep(1)
    assert monitor.end_window("a").time >= 2
    assert longer.gpu_carbon_emission[0] > 0


def test_offline_one_warning_and_energy_alone(node: VirtualNode) -> None:
    client = ElectrictyMapsClient(PLACE, url="http://127.0.0.1:9")
    monitor = at_noon(CarbonEmissionMonitor(client), node)
    with pytest.warns(
        UserWarning, match="carbon intensity is not known.*cannot be reached"
    ) as seen:
        for key in ("a", "b"):
            monitor.begin_window(key)
            node.clock.sleep(1)
            measured = monitor.end_window(key)
            assert math.isnan(measured.gpu_carbon_emission[0])
    assert len([one for one in seen if "carbon" in str(one.message)]) == 1
    assert measured.gpu_energy[0] > 0


def test_cpus_and_memory_have_emissions(node: VirtualNode, maps: RecordedService) -> None:
    client = ElectrictyMapsClient(PLACE, url=maps.url)
    monitor = at_noon(CarbonEmissionMonitor(client), node)
    parts = [Measurement(1.0, {0: KWH}, {1: 2 * KWH}, {1: KWH / 2})] * 2
    whole = Measurement(2.0, {0: 2 * KWH}, {1: 4 * KWH}, {1: KWH})
    pieces = [(NOON - timedelta(hours=1), parts[0]), (NOON, parts[1])]
    found = monitor._fields(whole, pieces)
    assert found == (2.0, {0: 2 * KWH}, {0: 900.0}, {1: 4 * KWH}, {1: 1800.0}, {1: KWH}, {1: 450.0})
    lost = monitor._fields(whole, [(NOON, Measurement(1.0, {0: KWH}))])
    assert math.isnan(lost[4][1])


class Flat(CarbonIntensityProvider):
    """A provider of a user's own, which fails."""

    update_period = timedelta(hours=1)
    history_length = 24

    def get_current_carbon_intensity(self) -> float:
        return 100.0

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        raise KeyError("a bug of the user's")


def test_a_providers_bug_is_a_warning(node: VirtualNode) -> None:
    monitor = at_noon(CarbonEmissionMonitor(Flat()), node)
    monitor.begin_window("a")
    node.clock.sleep(1)
    with pytest.warns(UserWarning, match="a bug of the user's"):
        assert math.isnan(monitor.end_window("a").gpu_carbon_emission[0])
    assert monitor._rate.fetch() == 60, "it is asked again after a minute"


def test_this_hours_intensity_is_asked_for_where_the_history_ends_before(
    monkeypatch: pytest.MonkeyPatch, maps: RecordedService
) -> None:
    intensity = carbon.Intensity(ElectrictyMapsClient(PLACE, url=maps.url))
    assert intensity.at(NOON) is None
    rate = rates.FetchedRate(intensity, "The carbon intensity")
    clock = types.SimpleNamespace(time=lambda: 7200 + 3500, monotonic=time.monotonic)
    monkeypatch.setattr(rates, "time", clock)
    assert rate.fetch() == 101, "a second after the hour has ended"
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    hours = (NOON - timedelta(hours=2), NOON - timedelta(hours=1), NOON + timedelta(hours=5), later)
    assert [intensity.at(one) for one in hours] == [None, 400, 500, 491]


def test_openei_is_asked_with_the_users_key_and_never_without(
    openei: RecordedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = RATES["items"][1]["label"]
    monkeypatch.delenv(price.KEY_ENV, raising=False)
    with pytest.raises(ZeusElectricityPriceHTTPError, match="wants a key; give your own"):
        OpenEIClient(PLACE, label, url=openei.url).get_current_electricity_prices()
    assert openei.asked == []
    monkeypatch.setenv(price.KEY_ENV, "mine")
    client = OpenEIClient(PLACE, label, sector="Commercial", radius=5, url=openei.url)
    found = client.get_current_electricity_prices()
    assert found["energy_rate_structure"] == RATES["items"][1]["energyratestructure"]
    _, query, _ = openei.asked[0]
    assert (query["api_key"], query["sector"], query["radius"], query["detail"]) == (
        *("mine", "Commercial", "5", "full"),
    )
    with pytest.raises(ZeusElectricityPriceNotFoundError, match="no rate 'else'"):
        OpenEIClient(PLACE, "else", url=openei.url).get_current_electricity_prices()
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ZeusElectricityPriceHTTPError, match="cannot be reached"):
        OpenEIClient(PLACE, label, url=nobody).get_current_electricity_prices()


def test_each_hours_energy_costs_that_hours_price(
    node: VirtualNode, openei: RecordedService
) -> None:
    client = OpenEIClient(PLACE, RATES["items"][1]["label"], api_key="mine", url=openei.url)
    monitor = at_noon(EnergyCostMonitor(client), node, before_s=10)
    monitor.begin_window("epoch")
    node.clock.sleep(40)
    measured = monitor.end_window("epoch")
    whole_j = measured.gpu_energy[0]
    expected = whole_j * (0.10 / 4 + 0.25 * 3 / 4) / KWH
    assert measured.gpu_energy_cost[0] == pytest.approx(expected, rel=0.01)
    assert measured.cpu_energy_cost is None
    prices = price.Price(client)
    assert prices.at(NOON) is None
    prices.fetch()
    days = [prices.at(NOON + timedelta(days=number)) for number in range(6)]
    assert days == [0.25, 0.25, 0.25, 0.1, 0.1, 0.25], "from Wednesday on"
    assert prices.at(NOON - timedelta(days=7)) == 0.1, "another month"


class Broken(ElectricityPriceProvider):
    """Has schedules of another shape."""

    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        return {"energy_weekday_schedule": []}


def test_prices_of_another_shape_are_a_warning_and_not_a_price(node: VirtualNode) -> None:
    monitor = at_noon(EnergyCostMonitor(Broken()), node)
    monitor.begin_window("a")
    node.clock.sleep(1)
    with pytest.warns(UserWarning, match="price of electricity is not known"):
        assert math.isnan(monitor.end_window("a").gpu_energy_cost[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.begin_window("a")
        node.clock.sleep(1)
        assert math.isnan(monitor.end_window("a").gpu_energy_cost[0])
