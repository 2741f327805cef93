"""The probe on simulated nodes: it finds the values of the device table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import known
from zeusctl.probe.page import lines
from zeusctl.probe.run import ProbeTiming, probe
from zeusctl.probe.simulated import ProbedSimulation
from zeusd.devices.simulated.models import DEVICES
from zeusd.energy.probed.compare import compare, model_of
from zeusd.energy.probed.report import ProbeReport

SHORT = ProbeTiming(seconds=6, alone_seconds=2, calls=1, load_scale=0.4)


def probed(spec: str, load: bool = True) -> ProbeReport:
    driver = ProbedSimulation(spec)
    return probe(driver, SHORT, load_on=driver.load_on if load else None)


@pytest.mark.parametrize("key", ["p100", "rtx6000", "a100-pcie-40", "b200"])
def test_a_simulated_product_agrees_with_the_table(key: str) -> None:
    gpu = probed(f"{key}:seed=7").gpus[0]
    rows = compare(gpu, DEVICES[key])
    assert [row for row in rows if row.verdict not in ("ok", "not supported")] == []
    assert len([row for row in rows if row.verdict == "ok"]) > 9
    assert gpu.doubts == []


def test_differences_from_the_table_are_named() -> None:
    report = probed("a40", load=False)
    other = replace(
        DEVICES["a40"],
        power_limits_w=(100, 280, 300),
        sensor=replace(DEVICES["a40"].sensor, tick_ms=50),
    )
    rows = {row.quantity: row for row in compare(report.gpus[0], other)}
    different = {name for name, row in rows.items() if row.verdict == "differs"}
    assert different == {
        "default power limit",
        "update period of power",
        "update period of energy counter",
    }
    assert rows["window that power sees"].verdict == "not known"


def test_a_product_that_the_table_lacks_is_reported() -> None:
    report = probed("t4", load=False)
    assert model_of("NVIDIA Nonesuch") is None
    unknown = replace(report, gpus=[replace(report.gpus[0], name="NVIDIA Nonesuch")])
    assert any("is not in the simulator's table" in line for line in lines(unknown))


def test_all_gpus_are_read_at_once_and_each_alone() -> None:
    report = probed("2xv100", load=False)
    phases = []
    for gpu in report.gpus:
        counter = gpu.sensors["energy_field_mj"]
        alone, together = known(counter.alone), known(counter.together)
        assert alone.period_ms == pytest.approx(together.period_ms, rel=0.01)
        phases.append(together.phase_ms)
        assert gpu.latency["temperature_c"].together is not None
    assert phases[0] != phases[1]
