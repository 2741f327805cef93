"""The probe finds the settings of the C stand-in, and detects wrong values.

Nothing was tuned on these stand-ins: thresholds come from test_analysis.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml.double import H100
from tests.support import known
from tests.zeusctl.probe.stand_in import START_NS, probed, stand_in
from zeusctl.probe.driver import CallError, Clock
from zeusctl.probe.estimates import estimates_of
from zeusctl.probe.page import lines
from zeusctl.probe.run import ProbeTiming, probe
from zeusd.devices.simulated.models import DEVICES
from zeusd.energy.probed.compare import compare
from zeusd.energy.probed.report import DriverEstimates, EstimatedPoint

SHORT = ProbeTiming(seconds=8, alone_seconds=2, calls=20, load_scale=0.4)

ODD: dict[str, Any] = {
    "tick_us": 83_400,
    "window_us": 21_000,
    "start_ns": START_NS + 37_000_000,
    "counter_windowed": 1,
    "jitter_us": 600,
    "quantum_mw": 125,
    "average_us": 1_000_000,
}
FAST: dict[str, Any] = {
    "tick_us": 17_300,
    "window_us": 9_000,
    "start_ns": START_NS + 4_200_000,
    "counter_quantum_mj": 50,
}


def test_the_settings_of_two_stand_ins_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = probed(tmp_path, monkeypatch, ODD, FAST, plan=SHORT, load=True)

    for gpu, truth in zip(report.gpus, (ODD, FAST), strict=True):
        tick_ms, late_ms = truth["tick_us"] / 1000, truth.get("jitter_us", 0) / 1000
        for name in ("power_instant_mw", "energy_field_mj", "energy_counter_mj"):
            period = known(gpu.sensors[name].period)
            assert period.period_ms == pytest.approx(tick_ms, rel=0.02)
        counter = known(gpu.sensors["energy_field_mj"].together)
        assert counter.phase_ms is not None
        apart_ms = (truth["start_ns"] - report.phases_from_ns) / 1e6 + late_ms / 2
        apart_ms = (apart_ms - counter.phase_ms) % tick_ms
        assert min(apart_ms, tick_ms - apart_ms) < 2
        assert counter.jitter_ms == pytest.approx(late_ms / 12**0.5, abs=0.3)
        window = known(gpu.loaded).windows["power_instant_mw"]
        assert window.share(tick_ms) == pytest.approx(
            truth["window_us"] / truth["tick_us"], rel=0.1
        )
        assert gpu.doubts == []
    odd, fast = report.gpus
    assert odd.sensors["power_instant_mw"].resolution == ODD["quantum_mw"]
    assert fast.sensors["energy_field_mj"].resolution == FAST["counter_quantum_mj"]
    assert known(odd.loaded).windows["power_usage_mw"].window_ms == pytest.approx(1000, rel=0.1)


def test_the_windows_of_counter_and_power_reading_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"tick_us": 60_000, "window_us": 18_000, "counter_windowed": one} for one in (1, 0)]
    report = probed(tmp_path, monkeypatch, *gpus, plan=SHORT, load=True)
    for gpu, share in zip(report.gpus, (0.3, 1.0), strict=True):
        windows = known(gpu.loaded).windows
        assert windows["energy_field_mj"].share(60) == pytest.approx(share, rel=0.1)
        assert windows["power_instant_mw"].share(60) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("lag_ms", [4, 12])
def test_a_counter_that_is_late_and_slow_and_power_measured_when_read_are_found(
    lag_ms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = H100 | {"counter_lag_us": lag_ms * 1000, "start_ns": START_NS + 37_000_000}
    report = probed(tmp_path, monkeypatch, truth, plan=ProbeTiming(calls=40), load=True)
    gpu = report.gpus[0]
    for name in ("energy_field_mj", "energy_counter_mj"):
        period, window = known(gpu.sensors[name].period), known(gpu.loaded).windows[name]
        assert period.period_ms == pytest.approx(100, rel=0.001)
        assert period.phase_ms is not None
        assert window.window_ms == pytest.approx(100, abs=2)
        assert window.lag_ms == pytest.approx(lag_ms, abs=1.5), name
        latency = known(gpu.latency[name].alone)
        assert latency.p50_us == H100["counter_read_us"] + 40
        assert latency.p99_us == H100["counter_slow_us"] + 40
    for name in ("power_instant_mw", "power_average_mw", "power_usage_mw"):
        period, window = known(gpu.sensors[name].period), known(gpu.loaded).windows[name]
        assert 100 < period.period_ms < 100 + 2 * gpu.sensors[name].reading_gap_ms
        assert period.phase_ms is None
        seen_ms = H100["window_us" if name == "power_instant_mw" else "average_us"] / 1000
        assert window.window_ms == pytest.approx(seen_ms, rel=0.1)
    rows = compare(gpu, DEVICES["h100-sxm"])
    assert [row.quantity for row in rows if row.verdict == "differs"] == ["memory clocks"]
    assert any("power_instant_mw" in line and "drifts" in line for line in lines(report))
    assert gpu.doubts == []


def test_calls_are_timed_with_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = probed(tmp_path, monkeypatch, {}, plan=SHORT, read_us=730)
    latency = known(report.gpus[0].latency["power_usage_mw"].alone)
    assert (latency.p50_us, latency.p99_us, latency.max_us) == (730, 730, 730)
    assert latency.calls == SHORT.calls


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a counter that counts too much": ({"counter_permille": 1400}, "different parts"),
    "a counter that stands still": ({"counter_stuck_mj": 7_000_000}, "stood still"),
    "a power reading that stands still": ({"power_stuck_mw": 91_000}, "while the GPU worked"),
    "a power reading of next to nothing": ({"power_stuck_mw": 5}, "never exceeded"),
    "a power reading that no board draws": ({"power_stuck_mw": 990_000}, "at most 250 W"),
    "a limit outside its own range": ({"limit_mw": 300_000}, "requested limit (300 W) is outside"),
    "a default outside the range": ({"limit_default_mw": 50_000}, "default limit (50 W)"),
    "a clock above the highest": ({"lock_max": 2000}, "1380 MHz is the highest"),
    "more memory in use than there is": ({"memory_used_mib": 20_000}, "20000 of 16384 MiB"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_driver_that_returns_wrong_values_is_detected(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = LIES[lie]
    plan = ProbeTiming(seconds=4, calls=1, load_scale=0.1)
    report = probed(tmp_path, monkeypatch, {"tick_ms": 50, **settings}, plan=plan, load=True)
    doubts = [doubt.text for doubt in report.gpus[0].doubts]
    assert any(said in doubt for doubt in doubts), doubts
    assert any(said in line for line in lines(report))


def test_readings_that_fail_now_and_then_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(tmp_path, monkeypatch, {}) as (driver, double):
        double.inject(0, "field.186.0", code=0, count=10)  # asked, and answered
        double.inject(0, "field.186.0", code=3, count=7)
        report = probe(driver, ProbeTiming(seconds=2, calls=1))
    sensor = report.gpus[0].sensors["power_instant_mw"]
    assert sensor.failures == {"3": 7}
    assert "7 of" in report.gpus[0].doubts[0].text


def test_stalling_readings_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(tmp_path, monkeypatch, {}) as (driver, double):
        quiet = probe(driver, ProbeTiming(seconds=1, calls=1))
        driver.clock = Clock(double.now_ns, lambda seconds: double.pass_time(seconds + 0.07))
        stalled = probe(driver, ProbeTiming(seconds=1, calls=1))
    assert not any("stalled" in line for line in lines(quiet))
    assert any("readings stalled for up to 71 ms" in line for line in lines(stalled))


def test_a_gpu_that_cannot_be_opened_is_reported_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(tmp_path, monkeypatch, {}, {}) as (driver, double):
        double.inject(1, "nvmlDeviceGetHandleByIndex_v2", code=4)
        assert isinstance(driver.gpus()[1], CallError)
        report = probe(driver, ProbeTiming(seconds=1, calls=1))
    assert [(one.index, one.code) for one in report.unopened] == [(1, 4)]
    assert [gpu.index for gpu in report.gpus] == [0]


def test_no_setter_is_called_and_the_report_has_no_board_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(tmp_path, monkeypatch, {"architecture": 10}, {}) as (driver, double):
        report = probe(driver, ProbeTiming(seconds=1, alone_seconds=1, calls=2))
        assert double.calls() == []
        text = report.to_json()
        for secret in (double.uuid(0), "00000000:07", "CHASSIS", "hostname", str(Path.home())):
            assert secret not in text
        named = probe(driver, ProbeTiming(seconds=1, alone_seconds=1, calls=2, identify=True))
    identity = known(named.gpus[0].identity)
    assert identity.uuid == double.uuid(0)
    assert (identity.chassis, identity.fabric_cluster) == ("CHASSIS-77", "ab" + "00" * 15)
    assert known(named.gpus[1].identity).chassis is None


def test_a_gpu_says_what_it_is_part_of_or_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ProbeTiming(seconds=1, alone_seconds=1, calls=1)
    report = probed(tmp_path, monkeypatch, {"architecture": 10}, {}, plan=plan)
    rack, alone = report.gpus
    assert rack.place == {
        "platform": {"slot": 3, "tray": 5, "host": 1, "peer_type": 1, "module": 2},
        "fabric": {"state": 3, "status": 0, "clique": 32766, "health": 42},
    }
    found = known(rack.estimates)
    assert (found.samples, found.observed) == (2, EstimatedPoint(1210, 2619, 363.0, 82))
    curve = [EstimatedPoint(mhz, None, mhz / 5 + 200, None) for mhz in (1000, 2000, 3000)]
    assert found.points == [EstimatedPoint(1100, 1593, 330.0, 90), *curve]
    assert found.most_efficient == EstimatedPoint(1000, None, 400.0, None)
    assert found.fastest == EstimatedPoint(1980, None, 700.0, None)
    assert found.headroom_w == 25.5
    assert alone.estimates is None
    assert alone.place == {"fabric": {"state": 0, "status": 0, "clique": 0, "health": 0}}
    refused = {one.call for one in alone.answers.values() if one.code == 3}
    assert {"nvmlDeviceGetPlatformInfo", "nvmlDevicePerfMetricsGetSamples_v1"} <= refused
    page = "\n".join(lines(report))
    assert "platform: slot 3, tray 5, host 1, peer type 1, module 2" in page
    assert "fabric: state completed, status 0, clique 32766, health 42" in page
    assert "fabric: state none" in page
    assert (
        "the driver's own 4 estimates in 2 samples, 400.0 W at 1000 MHz to 800.0 W at 3000 MHz, "
        "observed 363.0 W at 1210 MHz, most efficient 400.0 W at 1000 MHz, fastest 700.0 W at 1980 "
        "MHz, headroom 25.5 W"
    ) in page
    text = alone.answers["platform"].text
    assert f"nvmlDeviceGetPlatformInfo: {text} (3)" in page


def test_what_is_no_estimate_is_not_reported_as_one() -> None:
    filled = pynvml.c_nvmlPerfMetricsSamples_v1_t.from_buffer(bytearray(b"\xff" * (1 << 18)))
    for type_ in (0, 1, 2):
        for sample in filled.samples:
            sample.controllerData[0].controllerType = type_
        found = estimates_of(filled)
        assert found == DriverEstimates(samples=2**32 - 1, points=[])
