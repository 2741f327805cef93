"""A node for the command line: one daemon for a module, and `ctl`, which runs a command line."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.preloaded import Program, preloaded
from tests.support import CLIENTS, RunningDaemon, as_nobody, configuration, running_daemon, wait_for
from zeus_common.simulation import SimulatedNode
from zeusctl.cli import main

READINGS = (
    *("sensors", "power_limit_mw", "enforced_power_limit_mw", "temperature_c"),
    *("gpu_clock_mhz", "memory_clock_mhz", "persistence_mode", "throttle_reasons"),
    *("utilization_percent", "memory_used_mib"),
)
"""What fails of a GPU that the driver has lost."""


NODE = ("--simulate", "2xv100-pcie,a100-sxm-80,p100")


def with_ledger(folder: Path) -> tuple[str, str]:
    """The options of `zeusd serve` that make it keep an energy ledger there."""
    return configuration(folder, f'[accounting]\ndirectory = "{folder}"\n')


class Said(NamedTuple):
    """The output of a command line."""

    code: int
    out: str
    err: str


Ctl = Callable[..., Said]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("ledger")
    with running_daemon(*NODE, *with_ledger(folder), gpus=4) as running:
        with running.client() as client:
            uuids = [gpu.uuid for gpu in client.node().gpus]
            wait_for(lambda: all(map(client.timeline, uuids)), "a sample of each GPU")
        yield running


@pytest.fixture
def ctl(
    daemon: RunningDaemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ctl]:
    """Runs `zeusctl ARGUMENTS` here and now; everything is back afterwards."""
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        captured = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Said(code, captured.out, captured.err)

    yield run
    with daemon.client() as client:
        client.resume()
        client.restore()
        client.release()  # this process knows its lost leases


def shows(ctl: Ctl, *arguments: str, part: str) -> Said:
    """The output of a command line, once it has a part."""

    def look() -> Said | None:
        said = ctl(*arguments)
        return said if part in said.out else None

    found: Said = wait_for(look, f"{part!r} in the output of {' '.join(arguments)}")
    return found


def limits(daemon: RunningDaemon) -> list[float]:
    """The power limit of each GPU, W."""
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
        return [(state.power_limit_mw or 0) / 1000 for state in client.state(uuids).values()]


def python() -> str:
    """Python, where what clients import has been imported once for all programs."""
    return preloaded(*CLIENTS).python


COMMANDS = """
import json, os, sys, tempfile
from zeusctl.cli import main
answers = os.fdopen(os.dup(1), "w")
for asked in sys.stdin:
    arguments, env = json.loads(asked)
    os.environ.clear()
    os.environ.update(env)
    said = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for descriptor, file in enumerate(said, 1):
        os.dup2(file.fileno(), descriptor)
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    for file in said:
        file.seek(0)
    print(json.dumps([code, *(file.read().decode() for file in said)]), file=answers, flush=True)
"""
"""Runs command lines one after the other in one process: that takes less than to start each."""


def says(commands: subprocess.Popen[str], *arguments: str, **env: str) -> Said:
    """The output of a command line in such a process."""
    assert commands.stdin is not None
    assert commands.stdout is not None
    print(json.dumps([arguments, env]), file=commands.stdin, flush=True)
    return Said(*json.loads(commands.stdout.readline()))


@functools.cache
def _nobody() -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", COMMANDS], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **as_nobody())
    atexit.register(process.kill)
    return process


def as_nobody_says(daemon: RunningDaemon, *lines: Sequence[str], **env: str) -> list[Said]:
    """The output of command lines, and if this is root's process, of an ordinary user's."""
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket, **env}
    return [says(_nobody(), *line, **env) for line in lines]


@pytest.fixture
def node(daemon: RunningDaemon) -> Iterator[SimulatedNode]:
    """Changes that a test may make to the devices; faults end with the test."""
    with daemon.client() as client:
        path = client.node().simulated
    assert path is not None
    simulated = SimulatedNode(path)
    yield simulated
    simulated.clear_faults()
    simulated.close()


@contextlib.contextmanager
def spawn(daemon: RunningDaemon, *arguments: str) -> Iterator[Program]:
    """`zeusctl ARGUMENTS` in its own process, with pipes; it ends with the block."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
    command = ("-m", "zeusctl", *arguments)
    with preloaded(*CLIENTS).start(*command, env=env, text=True, **pipes) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
