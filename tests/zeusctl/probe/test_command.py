"""Both command lines of the probe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import NvmlDouble
from tests.snippets import ROOT
from tests.zeusctl.probe.parsed import read
from zeusctl.cli import cli
from zeusctl.exits import CommandError, Exit
from zeusctl.probe.__main__ import main

nvml_double = fixtures.nvml_double

BARE = """
import runpy, sys
for absent in ("click", "pydantic", "msgpack", "zmq"):
    sys.modules[absent] = None
sys.argv = ["probe", *sys.argv[1:]]
runpy.run_module("zeusctl.probe", run_name="__main__")
"""
"""The probe where nothing but the vendor's binding can be imported."""

QUICK = ("--simulate", "v100", "--seconds", "1", "--calls", "1", "--no-load")


@pytest.fixture
def ctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli, ["probe", *words], standalone_mode=False)


def test_a_bare_checkout_probes_a_library_as_an_ordinary_process(
    nvml_double: Callable[..., NvmlDouble], tmp_path: Path
) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 50}])
    output = tmp_path / "report.json"
    command = [sys.executable, "-c", BARE, "--library", double.library, "--output", str(output)]
    command += ["--seconds", "1.5", "--alone", "0.2", "--calls", "3", "--no-load"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **double.env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GPU 1: Tesla V100-PCIE-16GB" in done.stdout
    assert "compared with the simulator's v100-pcie" in done.stdout
    report = read(output.read_text())
    assert report.stand_in
    assert double.calls() == []
    for gpu in report.gpus:
        assert gpu.sensors["energy_field_mj"].readings > 20
        assert gpu.latency["power_usage_mw"].together is not None


def test_the_page_is_printed_and_the_report_is_written(ctl: Callable[..., Result]) -> None:
    node = "1xv100,1xh100:seed=7"
    done = ctl("--simulate", node, "--seconds", "1", "--calls", "5", "--no-load")
    assert done.exit_code == 0, done.exception
    head, software, *page = done.stdout.splitlines()
    assert re.fullmatch(rf"Probe of simulated node {node}: \S+, 17 s; nothing was set", head)
    assert software.startswith("driver 595.58.03, zeusd's simulated node, Python 3.")
    wanted = Path(__file__).with_name("page.txt").read_text()
    assert [*done.stderr.splitlines(), *page] == wanted.splitlines()
    assert read(Path("zeus-probe.json").read_text()).simulated == node
    done = ctl(*QUICK, "--json", "-o", "here.json")
    assert json.loads(done.stdout) == json.loads(Path("here.json").read_text())


def test_wrong_options_and_absent_drivers_are_one_sentence(
    ctl: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    absent = ctl(*QUICK, "--gpus", "4").exception
    assert isinstance(absent, CommandError)
    assert (str(absent), absent.exit_code) == (
        "there is no GPU 4; this node has 1",
        Exit.UNKNOWN,
    )
    assert "--gpus takes indices" in str(ctl(*QUICK, "--gpus", "first").exception)
    assert "cannot simulate" in str(ctl("--simulate", "abacus").exception)
    assert main(["--library", "/nonexistent.so"]) == Exit.NOT_SUPPORTED
    assert "cannot load /nonexistent.so" in capsys.readouterr().err
