"""Reports: those that are shipped agree with the device table, and a node made of one is probed as
what it is made of.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.snippets import ROOT
from tests.support import known, running_daemon
from tests.zeusctl.probe.parsed import read
from tests.zeusctl.probe.ship import HARDWARE
from tests.zeusctl.probe.stand_in import probed
from tests.zeusctl.probe.test_stand_in import ODD
from zeusctl.probe.run import ProbeTiming, probe
from zeusctl.probe.simulated import ProbedSimulation
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.spec import parse_spec
from zeusd.energy.probed.compare import compare, model_of
from zeusd.energy.probed.report import ProbedGpu, ProbeReport

SHIPPED = sorted(HARDWARE.rglob("*.json"))
SHORT = ProbeTiming(seconds=8, calls=1, load_scale=0.5)

DIFFERENCES: dict[str, set[str]] = {}
"""What a shipped report's GPU has otherwise than the device table, by the report's path."""


def _name(path: Path) -> str:
    return path.relative_to(HARDWARE).as_posix()


def _again(path: Path) -> ProbeReport:
    driver = ProbedSimulation(f"report:{path}")
    return probe(driver, SHORT, load_on=driver.load_on)


def _same(first: ProbedGpu, second: ProbedGpu) -> None:
    """Both are of one product, as far as a probe can determine."""
    for name in ("name", "architecture", "memory_mib", "clocks", "power_limits"):
        assert getattr(first, name) == getattr(second, name), name
    for name in ("power_instant_mw", "energy_field_mj"):
        one, other = known(first.sensors[name].period), known(second.sensors[name].period)
        assert other.period_ms == pytest.approx(one.period_ms, rel=0.02)
        was, now = known(first.loaded).windows, known(second.loaded).windows
        if name not in was:
            continue  # a real load was too unsteady to show it
        unsure = was[name].window_uncertainty_ms / one.period_ms
        before = was[name].share(one.period_ms)
        assert now[name].share(other.period_ms) == pytest.approx(before, rel=0.1, abs=unsure)
    one, other = first.sensors["power_instant_mw"], second.sensors["power_instant_mw"]
    assert other.resolution == one.resolution
    assert other.mean == pytest.approx(one.mean, rel=0.01)
    assert ("power_average_mw" in first.sensors) == ("power_average_mw" in second.sensors)
    assert second.doubts == []


@pytest.mark.parametrize("path", SHIPPED, ids=_name)
def test_a_shipped_report_agrees_with_the_device_table(path: Path) -> None:
    report = read(path.read_text())
    for gpu in report.gpus:
        model = model_of(gpu.name)
        assert model is not None, f"{gpu.name} is not in the device table"
        differs = {row.quantity for row in compare(gpu, model) if row.verdict == "differs"}
        assert differs == DIFFERENCES.get(_name(path), set())
        assert gpu.identity is None


@pytest.mark.parametrize("path", SHIPPED, ids=_name)
def test_a_shipped_report_says_what_it_is_of(path: Path) -> None:
    report = read(path.read_text())
    assert read(report.to_json()) == report
    kind = _name(path).partition("/")[0]
    assert (kind == "simulated") == (report.simulated is not None)
    assert (kind == "stand-in") == report.stand_in
    index = (HARDWARE / "index.md").read_text()
    assert f"({_name(path)})" in index


def test_a_product_is_listed_with_its_proof_and_all_others_as_never_seen() -> None:
    index = (HARDWARE / "index.md").read_text()
    proofs = dict(re.findall(r"^\| (.+) \| (measured|stand-in) \|$", index, re.MULTILINE))
    assert proofs.keys() <= {model.name for model in DEVICES.values()}
    measured = [read(path.read_text()) for path in SHIPPED if _name(path).startswith("measured/")]
    names = {report.gpus[0].name for report in measured}
    assert {name for name, proof in proofs.items() if proof == "measured"} == names
    assert "All other [simulated products]" in index
    assert "reference/hardware/" in (ROOT / "docs" / "explain" / "limits.md").read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=_name)
def test_a_node_made_of_a_shipped_report_is_probed_as_the_report(path: Path) -> None:
    report = read(path.read_text())
    again = _again(path)
    assert again.software.driver == report.software.driver
    _same(report.gpus[0], again.gpus[0])


def test_a_node_made_of_an_odd_gpu_is_probed_as_that_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd: dict[str, Any] = {**ODD, "name": "NVIDIA Nonesuch", "limit_max_mw": 275_000}
    report = probed(tmp_path, monkeypatch, odd, plan=SHORT, load=True)
    path = tmp_path / "odd.json"
    path.write_text(report.to_json())
    again = _again(path)
    _same(report.gpus[0], again.gpus[0])


def test_a_daemon_serves_a_node_made_of_a_report() -> None:
    path = HARDWARE / "simulated" / "h100-sxm.json"
    with (
        running_daemon("--simulate", f"report:{path},v100", gpus=2) as daemon,
        daemon.client() as c,
    ):
        assert [gpu.name for gpu in c.node().gpus] == [
            "NVIDIA H100 80GB HBM3",
            "Tesla V100-PCIE-16GB",
        ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("{}", "its schema is not zeusctl.probe/1"),
        ('{"schema": "zeusctl.probe/1"}', "is a damaged report: 'software' is missing"),
        (None, "cannot read the report"),
    ],
)
def test_an_invalid_report_is_named_in_one_sentence(
    text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        parse_spec(f"report:{path}")


def test_a_report_without_gpus_makes_no_node(tmp_path: Path) -> None:
    body = json.loads((HARDWARE / "simulated" / "h100-sxm.json").read_text())
    path = tmp_path / "none.json"
    path.write_text(json.dumps({**body, "gpus": []}))
    with pytest.raises(ValueError, match="reports no GPU that could be opened"):
        parse_spec(f"report:{path}")
