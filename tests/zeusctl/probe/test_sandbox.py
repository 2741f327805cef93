"""The probe inside the sandbox of zeusd's unit; a program stands in for systemd-run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import NvmlDouble
from tests.snippets import ROOT
from tests.zeusctl.probe.parsed import read
from zeusctl.exits import CommandError
from zeusctl.probe import OPTIONS, sandbox
from zeusctl.probe.driver import NoDriverError
from zeusctl.probe.main import run
from zeusctl.probe.page import lines
from zeusd.energy.probed.report import from_json

nvml_double = fixtures.nvml_double

UNIT = (ROOT / "systemd" / "zeusd.service").read_text()
OPTIONS_OFF = {one.name.lstrip("-").replace("-", "_"): one.default for one in OPTIONS}

SYSTEMD_RUN = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
    -p) echo "$2" >> "$PROPERTIES"; shift 2 ;;
    -E) export "$2"; shift 2 ;;
    --*) shift ;;
    *) exec "$@" ;;
    esac
done
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for systemd's programs; and the file to which properties are written."""
    for name, text in (("systemd-run", SYSTEMD_RUN), ("systemctl", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PROPERTIES", str(tmp_path / "properties"))
    return tmp_path / "properties"


def test_the_sandbox_of_the_shipped_unit_is_all_of_it_and_nothing_else() -> None:
    found = sandbox.properties(UNIT)
    names = {line.partition("=")[0] for line in found}
    assert {"DevicePolicy", "MemoryDenyWriteExecute", "ProtectHome", "SystemCallFilter"} <= names
    assert not names & {"ExecStart", "Restart", "RestartSec", "Type", "WatchdogSec", "Nice"}
    assert found.count("SystemCallFilter=~@privileged @resources") == 1


def test_the_probe_runs_again_inside_the_sandbox(
    tools: Path,
    nvml_double: Callable[..., NvmlDouble],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = nvml_double([{}])
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    body = sandbox.inside(UNIT, ["--library", double.library])
    assert tools.read_text().splitlines() == sandbox.properties(UNIT)
    assert [gpu["name"] for gpu in body["gpus"]] == ["Tesla V100-PCIE-16GB"]


def test_reads_denied_by_the_sandbox_are_named() -> None:
    report = read((ROOT / "docs/reference/hardware/stand-in/a100-sxm-80.json").read_text())
    inner = from_json(report.to_json())
    assert sandbox.compare(report, inner)["differs"] == []
    inner["gpus"][0]["answers"]["compute_processes"] |= {"code": 4, "text": "no permission"}
    found = sandbox.compare(report, inner)
    assert found["differs"] == [
        "GPU 0 nvmlDeviceGetComputeRunningProcesses: ok outside, no permission (4) inside"
    ]
    assert any("no permission (4) inside" in line for line in lines(replace(report, sandbox=found)))
    inner["unopened"] = [{"index": 0, "code": 4, "text": "insufficient permissions"}]
    inner["gpus"] = []
    assert sandbox.compare(report, inner)["differs"] == [
        "GPU 0 cannot be opened inside: insufficient permissions"
    ]


def test_a_probe_that_fails_inside_says_why(tools: Path) -> None:
    with pytest.raises(NoDriverError, match=r"cannot load /nonexistent.so.*run as root"):
        sandbox.inside(UNIT, ["--library", "/nonexistent.so"])


def test_a_simulated_node_has_no_sandbox() -> None:
    with pytest.raises(CommandError, match="a simulated node has no sandbox"):
        run({**OPTIONS_OFF, "in_unit": True, "simulate": "v100"}, print)
