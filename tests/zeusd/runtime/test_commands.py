"""The name of a process: its program, its script, or the command that zeusctl runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zeusd.devices.port import printable
from zeusd.runtime.processes import command_of, describe


@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        ("/usr/bin/python3 train.py --lr 1", "python3", "python3 train.py"),
        ("python -u -W ignore /home/a/run.py", "python", "python run.py"),
        ("python -m torch.distributed.run x.py", "python", "python -m torch.distributed.run"),
        ("/env/bin/python3 train.py", "pt_main_thread", "python3 train.py"),
        ("/usr/bin/python3 ./train.py", "train.py", "train.py"),
        ("python -c import(os)", "python", "python"),
        ("python", "python", "python"),
        ("./a.out 3", "a.out", "a.out"),
        ("postgres: writer process", "postgres", "postgres"),
        ("", "kworker/0:1", "kworker/0:1"),
        (
            "/p/python -I /usr/bin/zeusctl set 0 -p 150 -- python train.py",
            "zeusctl",
            "python train.py",
        ),
        ("python -m zeusctl measure -- ./job.sh 7", "python", "job.sh"),
        ("python /usr/bin/zeusctl set 0 -p 150", "zeusctl", "zeusctl"),
        ("python /usr/bin/zeusctl set 0 -- zeusctl measure -- ./x", "zeusctl", "x"),
        ("python train.py -- zeusctl", "python", "python train.py"),
    ],
)
def test_a_command_is_known_by_what_its_user_ran(line: str, name: str, said: str) -> None:
    assert describe(line.split(), name) == said


def test_nothing_in_it_draws_and_it_is_short() -> None:
    assert printable("\x1b[31mroot\n1", 64) == "?[31mroot?1"
    assert printable("x" * 1000, 64) == "x" * 63 + "…"


def test_of_a_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "this", "stays"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.kill()
    child.wait()
    assert command_of(child.pid) == ""
