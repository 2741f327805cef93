from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from zeusd.cli import main
from zeusd.config import ConfigError, load

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
    assert config.daemon.socket_mode == "0666"
    policy = config.policy()
    assert policy.restore_power == "device-default"
    assert policy.rules[0].power_limit_mw == 250_500
    assert policy.rules[1].gpu_clocks_mhz == (210, 1200)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[daemon]\nsocket = \n", 2, "not valid TOML"),
        ("[daemon]\n\nsokcet = '/x'\n", 3, "daemon.sokcet: zeusd knows no such setting"),
        ("[demon]\n", 1, "demon: zeusd knows no such setting"),
        (GOOD + "\n[[gpu]]\nmatch = 'x'\npower_limit_w = -1\n", 19, "gpu.2.power_limit_w"),
        ("# comment\n[restore]\npower_limit = 'maximum'\n", 3, "restore.power_limit"),
        ("[front]\nmemory_mib = 'much'\n", 2, "front.memory_mib"),
        ("daemon.socket_mode = '9999'\n", 1, "daemon.socket_mode"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert f"line {line}: " in str(caught.value)
    assert words in str(caught.value)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[front]\nmemory_mib = 1\n[log]\nlevel = 'loud'\n"))
    assert "line 2: " in str(caught.value)
    assert "line 4: " in str(caught.value)


def test_check_config(tmp_path: Path) -> None:
    good, bad = write(tmp_path, GOOD), str(tmp_path / "none.toml")
    assert CliRunner().invoke(main, ["check-config", good]).output == f"{good}: ok\n"
    failed = CliRunner().invoke(main, ["check-config", bad])
    assert failed.exit_code == 1
    assert "none.toml: cannot be read (No such file or directory)" in failed.output


def test_a_wrong_option_is_told_by_its_name() -> None:
    failed = CliRunner().invoke(main, ["serve", "--socket-mode", "rw-rw-rw-"])
    assert failed.exit_code == 1
    assert "--socket-mode" in failed.output
