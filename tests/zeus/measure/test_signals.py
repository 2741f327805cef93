"""Signals from CSV files and from providers of prices and carbon intensities."""

from __future__ import annotations

import warnings
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from zeus.monitor.carbon import CarbonIntensityProvider
from zeus.monitor.price import ElectricityPriceProvider
from zeus.monitor.signals import read_signal, signal_of
from zeus.policy.signal import HOUR_S

NOON = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def test_a_file_of_dates(tmp_path: Path) -> None:
    path = tmp_path / "price.csv"
    path.write_text(
        "time,price,unit\n2026-11-23T12:00Z,0.30,EUR\n\n2026-11-23T15:00+02:00,0.10,EUR\n"
    )
    signal = read_signal(path)
    assert signal.at(NOON.timestamp() + 1) == 0.30
    assert signal.at(NOON.timestamp() + HOUR_S) == 0.10
    assert signal.at(NOON.timestamp() - 1) is None


def test_a_file_of_times_of_day_is_of_every_day_in_local_time(tmp_path: Path) -> None:
    path = tmp_path / "price.csv"
    path.write_text("00:00,0.10\n16:00,0.40\n21:00,0.10\n")
    signal = read_signal(path)
    for day in (5, 500):
        evening = datetime(2026, 1, 1, 17) + timedelta(days=day)
        # Where clocks change, a time of the other half of the year is an hour off until that day.
        assert signal.at((evening + timedelta(hours=1)).timestamp()) == 0.40
        assert signal.at((evening + timedelta(hours=7)).timestamp()) == 0.10


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time,price\n08:00,cheap\n", "line 2"),
        ("08:00,0,21\n16:00,0,40\n", "line 1 must be a time and a value, .* not '08:00,0,21'"),
        ("time,price\n08:00,0,21\n", "line 2"),
        ("8:00,1\n16:00,1\n", "line 1 must be a time"),
        ("08:00,1_0\n", "line 1"),
        ("08:00,\xff\n", "line 1: it is not text in UTF-8"),
        ("08:00,1\n2026-11-23T12:00,1\n", "both dates and times"),
        ("08:00,1\n08:00,2\n", "same time"),
        ("time,price\n", "at least one value"),
    ],
)
def test_a_file_that_is_no_signal_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "price.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=why):
        signal_of(path)


def test_a_file_is_read_again_and_the_last_counts_where_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "price.csv"
    path.write_text("00:00,1\n12:00,3\n")
    signal = signal_of(str(path))
    evening = datetime(2026, 11, 23, 18).timestamp()
    assert signal.relative(evening, evening) == pytest.approx(1.5)
    path.write_text("00:00,3\n12:00,1\n")
    assert signal.relative(evening, evening) == pytest.approx(0.5)
    path.unlink()
    with pytest.warns(UserWarning, match=r"cannot be fetched.*price.csv"):
        assert signal.relative(evening, evening) == pytest.approx(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert signal.relative(evening, evening) == pytest.approx(0.5)


class Grid(CarbonIntensityProvider):
    """A day in which each hour has 100 more than the one before."""

    def get_current_carbon_intensity(self) -> float:
        return 2400.0

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        hour = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
        return {hour - timedelta(hours=ago): 2400.0 - 100 * ago for ago in range(1, 24)}

    update_period = timedelta(hours=1)
    history_length = 24


class Tariff(ElectricityPriceProvider):
    """Twice as much in the second half of each day."""

    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        schedule = [[0] * 12 + [1] * 12] * 12
        return {
            "energy_rate_structure": [[{"rate": 0.1}], [{"rate": 0.15, "adj": 0.05}]],
            "energy_weekday_schedule": schedule,
            "energy_weekend_schedule": schedule,
        }


def test_a_grid_counts_with_the_present_over_the_day_before() -> None:
    now_s = datetime.now(timezone.utc).timestamp()
    relative = signal_of(Grid()).relative(now_s, now_s + 6 * HOUR_S)
    assert relative == pytest.approx(2400 / 1250, rel=0.09)


def test_a_tariff_is_known_ahead() -> None:
    signal = signal_of(Tariff())
    morning = datetime(2026, 11, 23, 9).timestamp()
    assert signal.relative(morning, morning) == pytest.approx(1 / 1.5)
    assert signal.relative(morning, morning + 6 * HOUR_S) == pytest.approx(1.0)
