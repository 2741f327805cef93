"""What `zeusd check-config` and the doctor say of rules that have no effect."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import configuration, running_daemon, wait_for
from tests.zeusd.core.world import facts
from zeusctl.cli import cli as zeusctl
from zeusctl.exporter.collector import ZeusdCollector
from zeusd.cli import main
from zeusd.config import load
from zeusd.config_check import findings

GPUS = [facts(f"GPU-{index}", index=index).info for index in range(2)]
NAME = GPUS[0].name


def found(tmp_path: Path, text: str, known: bool = True) -> list[str]:
    path = tmp_path / "zeusd.toml"
    path.write_text(text)
    return findings(load(str(path)), GPUS if known else None)


def test_rules_with_effect_cause_no_finding(tmp_path: Path) -> None:
    text = f'[[gpu]]\nmatch = "GPU-1"\npower_limit_w = 150\n[[gpu]]\nmatch = "{NAME[:4]}*"\n'
    text += '[[allow]]\nusers = ["root", 4711, "*"]\ngpus = [0, "GPU-1"]\n'
    assert found(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[gpu]]\nmatch = "H100*"\n', f"matches no GPU of this node; its GPUs are {NAME!r}"),
        ('[[gpu]]\nmatch = "GPU-7*"\n', "its GPUs are listed with their UUIDs by `zeusctl gpus`"),
        ('[[gpu]]\n[[gpu]]\nmatch = "GPU-0"\n', "[[gpu]] 2 (match = 'GPU-0') has no effect"),
        ('[[gpu]]\nmatch = "GPU-1"\npower_limit_w = 5000\n', "which GPU 1"),
        ('[[gpu]]\nmatch = "GPU-1"\npower_limit_w = 5000\n', "zeusd uses 300 W"),
        ('[[gpu]]\nmatch = "GPU-1"\npower_limit_w = 5\n', "zeusd uses 100 W"),
        ("[[allow]]\ngpus = [7]\n", "[[allow]] 1: gpus = '7' matches no GPU of this node"),
        ('[[allow]]\nusers = ["no-such"]\n', "[[allow]] 1: users: there is no user no-such here"),
        ('[access]\nadmin_groups = ["no-such"]\n', "[access] admin_groups: there is no group"),
        ('[accounting]\nreaders = ["no-such"]\n', "[accounting] readers: there is no group"),
        ('[daemon]\nsocket_group = "no-such"\n', "no group no-such here, and zeusd does not start"),
    ],
)
def test_rules_without_effect_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    assert any(sentence in one for one in found(tmp_path, text)), found(tmp_path, text)


def test_only_groups_that_the_file_names_are_missed(tmp_path: Path) -> None:
    """The default group of administrators need not exist."""
    assert found(tmp_path, '[access]\nadmin_users = ["root"]\n') == []


def test_without_a_node_only_names_are_looked_up(tmp_path: Path) -> None:
    text = '[[gpu]]\nmatch = "H100*"\n[[allow]]\ngroups = ["no-such"]\n'
    (only,) = found(tmp_path, text, known=False)
    assert "there is no group no-such here" in only


def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "zeusd.toml"
    path.touch()
    command = [sys.executable, "-m", "zeusd", "check-config", str(path)]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr == (
        "zeusd: standard output cannot be written: No space left on device; make room, or write "
        "elsewhere\n"
    )


def test_check_config_asks_a_running_node_which_names_what_its_own_file_has(
    tmp_path: Path,
) -> None:
    text = '[[gpu]]\nmatch = "H100*"\n[[allow]]\nusers = ["nobody-of-this-name"]\n'
    options = configuration(tmp_path, text)
    other = tmp_path / "other.toml"
    other.write_text('[[gpu]]\nmatch = "H100*"\npower_limit_w = 300\n')
    with running_daemon("--simulate", "1xv100-pcie", *options, gpus=1) as daemon:
        command = ["check-config", str(other), "--socket", daemon.socket]
        said = CliRunner().invoke(main, command)
        assert said.exit_code == 0
        first, last = said.output.splitlines()
        assert "warning: [[gpu]] 1 (match = 'H100*') matches no GPU of this node" in first
        assert "'Tesla V100-PCIE-16GB'" in first
        assert last == f"{other}: ok"
        assert CliRunner().invoke(main, [*command, "--strict"]).exit_code == 1
        with daemon.client() as client:
            first, second = client.node().findings
            assert "there is no user nobody-of-this-name here" in first
            assert "[[gpu]] 1 (match = 'H100*') matches no GPU of this node" in second
            for verb in ("status", "doctor"):
                said = CliRunner().invoke(zeusctl, ["--socket", daemon.socket, verb]).output
                assert second in said
            found = {one.name: one.samples for one in ZeusdCollector(client).collect()}
            assert found["zeusd_configuration_findings"][0].value == 2
            configuration(tmp_path, '[[gpu]]\nmatch = "Tesla*"\npower_limit_w = 900\n')
            daemon.process.send_signal(signal.SIGHUP)
            wait_for(lambda: len(client.node().findings) == 1, "the reload")
            (outside,) = client.node().findings
            assert "power_limit_w = 900 is outside 100 to 250 W, which GPU 0" in outside
            client.quiesce()
            assert client.node().findings == [], "the GPUs are not known meanwhile"
            client.resume()
            wait_for(lambda: client.node().findings == [outside], "the GPUs")


def test_every_cap_is_shown_with_whether_it_is_enforced(tmp_path: Path) -> None:
    text = '[[gpu]]\nmatch = "Tesla*"\npower_limit_w = 200\nenforce = true\n'
    options = configuration(tmp_path, text + '[[gpu]]\nmatch = "*A100*"\npower_limit_w = 300\n')
    node = ("--simulate", "1xv100-pcie,a100-sxm-80", *options)
    with running_daemon(*node, gpus=2) as daemon:

        def said(*verb: str) -> str:
            return CliRunner().invoke(zeusctl, ["--socket", daemon.socket, *verb]).output

        daemon.wait_for_records("restore")
        for verb in ("status", "gpus"):
            assert "The site limit of GPU 1 is not enforced: zeusd sets nothing above" in said(verb)
        above = "GPU 1: its limit is above the site limit, which is not enforced; `zeusctl reset 1`"
        assert above in said("status")
        assert "above the site limit: GPU 1 (400 W, site limit 300 W)" in said("doctor")
        assert "200 W, enforced" in said("show", "0")
        assert re.search(r"restore .* 250 W -> 200 W +zeusd, ceiling, ok", said("audit"))
        assert "300 W, not enforced" in said("show", "1")
        (first, second) = json.loads(said("gpus", "--json"))["gpus"]
        assert first["power_limit_w"]["site_enforced"] is True
        assert second["power_limit_w"]["site_enforced"] is False
