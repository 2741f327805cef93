from __future__ import annotations

import grp
import os
import pwd
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import configuration, running_daemon
from zeus_ipc.controls import Control
from zeusctl.checks import _configuration
from zeusd.cli import main
from zeusd.config import DEFAULT_GROUP, Config, ConfigError, load
from zeusd.core.access import LOWERING, OPEN

GOOD = """
[daemon]
socket = "/tmp/z.sock"
socket_mode = "0666"

[restore]
power_limit = "device-default"

[[gpu]]
match = "GPU-1*"
power_limit_w = 250.5

[[gpu]]
match = "Tesla*"
gpu_clocks_mhz = [210, 1200]
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "zeusd.toml"
    path.write_text(text)
    return str(path)


def test_a_good_file_becomes_a_policy(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert (config.daemon.socket_mode, config.daemon.stop_timeout_s) == ("0666", 10)
    policy = config.settings().site
    assert policy.restore_power == "device-default"
    assert policy.rules[0].targets[Control.POWER_LIMIT] == (250_500,)
    assert policy.rules[1].targets[Control.GPU_CLOCKS] == (210, 1200)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[daemon]\nsocket = \n", 2, "not valid TOML"),
        ("[daemon]\n\nsokcet = '/x'\n", 3, "daemon.sokcet: zeusd has no such setting"),
        ("[demon]\n", 1, "demon: zeusd has no such setting"),
        (GOOD + "\n[[gpu]]\nmatch = 'x'\npower_limit_w = -1\n", 19, "[[gpu]] 3: power_limit_w: "),
        ("# comment\n[restore]\npower_limit = 'maximum'\n", 3, "restore.power_limit"),
        ("[server]\nmax_connections = 'many'\n", 2, "server.max_connections"),
        (
            "daemon.socket_mode = '9999'\n",
            1,
            "daemon.socket_mode: '9999' is not valid; write three",
        ),
        ("log = 'debug'\n", 1, "log: write it as [log]"),
        ("[[gpu]]\nmatch = 'x'\nlimit = 1\n", 3, "[[gpu]] 1: limit: zeusd has no such setting"),
        ("[gpu]\nmatch = 'x'\n", 1, "gpu: write it as [[gpu]]"),
        (
            "[[gpu]]\ngpu_clocks_mhz = [1200, 900]\n",
            2,
            "[[gpu]] 1: gpu_clocks_mhz: the first",
        ),
        ("[[gpu]]\nmemory_clocks_mhz = [-5, 900]\n", 2, "[[gpu]] 1: memory_clocks_mhz.1: "),
        ("[[allow]]\npower_limit_w = [0, inf]\n", 2, "[[allow]] 1: power_limit_w.2: "),
        ("[[allow]]\npower_limit_w = [nan, nan]\n", 2, "[[allow]] 1: power_limit_w.1: "),
        ("[[allow]]\nusers=['*']\npower_limit_w = [200, 100]\n", 3, "[[allow]] 1: power_limit_w: "),
        ("[[allow]]\ncontrols = ['fan']\n", 2, "[[allow]] 1: controls.1: "),
        (
            "[[gpu]]\npower_limit_w = 9\n[[allow]]\npower_limit_w = [0, inf]\n",
            *(4, "[[allow]] 1: power_limit_w.2: "),
        ),
        ('\n"a=b" = 1\n', 2, "a=b: zeusd has no such setting"),
        ("# comment\n\ndaemon . 'sokcet' = '/x'\n", 3, "daemon.sokcet: zeusd has no such"),
        ("[access]\nroot = true\n", 2, "access.root"),
        (
            "[[gpu]]\nenforce = true\n",
            1,
            "[[gpu]] 1: enforce needs a power_limit_w, gpu_clocks_mhz",
        ),
    ],
)
def test_a_bad_file_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert f"line {line}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000])
def test_a_value_that_the_parser_cannot_hold_is_not_valid_toml(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(write(tmp_path, f"a = {value}\n"))


@pytest.mark.parametrize("kind", ["fifo", "device", "large", "directory"])
def test_what_is_no_file_of_a_configuration_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A reload must not wait for it, nor fill the memory."""
    path = tmp_path / "zeusd.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("#" * 10_000_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(path))


def test_a_byte_order_mark_is_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "zeusd.toml"
    path.write_bytes(b"\xef\xbb\xbf[log]\r\nlevel = 'debug'\r\n")
    assert load(str(path)).log.level == "debug"


def test_users_groups_and_ranges_become_rules(tmp_path: Path) -> None:
    text = """
[lease]
ttl_s = 5
ttl_max_s = 3600

[restore]
outside_change = "override"

[access]
admin_groups = ["root"]
admin_users = [4711]
root = "never"
writes_per_second = 20

[[allow]]
users = ["nobody", 1234]
groups = ["daemon", "no-such-group"]
gpus = ["0", "Tesla*"]
controls = ["power_limit"]
power_limit_w = [150, 200.5]

[[allow]]
users = ["*"]
gpu_clocks_mhz = [600, 1200]
"""
    settings = load(write(tmp_path, text)).settings()
    assert settings.site.outside_change == "override"
    assert (settings.terms.ttl(0), settings.terms.ttl(10**7)) == (5 * 10**9, 3600 * 10**9)
    access = settings.access
    assert access.admin_gids == {0}
    assert 4711 in access.admin_uids
    assert (access.root, access.writes_per_second) == ("never", 20)
    first, second = access.rules
    assert first.uids == {pwd.getpwnam("nobody").pw_uid, 1234}
    assert first.gids == {grp.getgrnam("daemon").gr_gid}, "an unknown group matches nobody"
    assert not first.everyone
    assert first.controls == {Control.POWER_LIMIT}
    assert first.ranges[Control.POWER_LIMIT] == (150_000, 200_500)
    assert first.gpus == ("0", "Tesla*")
    assert second.everyone
    assert second.ranges[Control.GPU_CLOCKS] == (600, 1200)
    assert second.controls == LOWERING


def test_without_rules_nobody_but_members_of_zeus_may_change_anything() -> None:
    access = Config().settings().access
    (rule,) = access.rules
    assert not rule.everyone
    assert not rule.uids
    assert rule.controls == LOWERING
    assert access.root == "host"
    assert not access.require_compute_process


def test_simulated_gpus_are_open_unless_the_file_restricts_them(tmp_path: Path) -> None:
    simulated = "[nvml]\nsimulate = '1xa40'\n"
    lenient = load(write(tmp_path, simulated)).settings().access
    assert lenient.rules == OPEN.rules
    assert lenient.admin_uids == {os.geteuid()}
    strict = load(write(tmp_path, simulated + "[access]\n")).settings().access
    assert strict.rules != OPEN.rules


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[server]\nmax_connections = 1\n[log]\nlevel = 'loud'\n"))
    assert "line 2: " in str(caught.value)
    assert "line 4: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[nvml]\nsimulate = '4xv100-pci'\n", "cannot simulate '4xv100-pci'"),
        ("[nvml]\nsimulate = 'report:/none.json'\n", "cannot read the report /none.json"),
        (f"[daemon]\nsocket = '/run/{'z' * 94}'\n", "write a path of 1 to 98 bytes"),
    ],
)
def test_what_prevents_a_start_is_found_by_all_that_read_the_file(
    tmp_path: Path, text: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, text)
    monkeypatch.setattr("zeusctl.checks.CONFIGURATION", path)
    for command in (["check-config", path], ["serve", "--config", path]):
        said = CliRunner().invoke(main, command)
        assert (said.exit_code, said.stdout.count("ok")) == (1, 0)
        assert f"{path}: line 2: " in said.output
        assert sentence in said.output
    (check,) = _configuration(None)
    assert (check.state, sentence in check.found) == ("fault", True)


def test_a_reload_refuses_what_would_prevent_a_start(tmp_path: Path) -> None:
    with running_daemon("--simulate", "1xa40", *configuration(tmp_path, "")) as daemon:
        write(tmp_path, "[nvml]\nsimulate = '4xv100-pci'\n")
        daemon.process.send_signal(signal.SIGHUP)
        (refused,) = daemon.wait_for_records("reload_failed")
    assert "cannot simulate '4xv100-pci'" in refused["message"]


def test_check_config(tmp_path: Path) -> None:
    good, bad = write(tmp_path, GOOD), str(tmp_path / "none.toml")
    assert CliRunner().invoke(main, ["check-config", good]).output == f"{good}: ok\n"
    failed = CliRunner().invoke(main, ["check-config", bad])
    assert failed.exit_code == 1
    assert "none.toml: cannot be read (No such file or directory)" in failed.output


@pytest.mark.parametrize(("option", "value"), [("--socket-mode", "rw-rw-rw-"), ("--state-dir", "")])
def test_a_wrong_option_is_named(option: str, value: str) -> None:
    failed = CliRunner().invoke(main, ["serve", option, value])
    assert failed.exit_code == 1
    assert failed.output.startswith(f"zeusd: {option}: ")


def test_an_empty_socket_is_refused_as_by_all_programs() -> None:
    failed = CliRunner().invoke(main, ["serve", "--socket", ""])
    assert failed.exit_code == 2
    assert "Invalid value for '--socket': '' names no path" in failed.output


SHIPPED = Path(__file__).resolve().parents[2] / "systemd" / "zeusd.toml"


def test_the_shipped_file_changes_nothing() -> None:
    assert load(str(SHIPPED)) == Config()


def test_the_shipped_file_shows_the_defaults(tmp_path: Path) -> None:
    """Every setting in it exists, and has the default that it shows."""
    shown = re.sub(r"(?m)^# (?=\[|[a-z_]+ = )", "", SHIPPED.read_text())
    config = load(write(tmp_path, shown))
    for section in ("lease", "restore", "access", "server", "log"):
        assert getattr(config, section) == getattr(Config(), section), section
    assert config.allow[0].groups == [DEFAULT_GROUP]
    assert set(config.allow[0].controls) == LOWERING
    assert config.gpu[0].power_limit_w == 220
