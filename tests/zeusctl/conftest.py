"""A node for the command line: one daemon for a module, and `ctl`, which runs a command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import needs
from tests.support import NOBODY, RunningDaemon, configuration, running_daemon, wait_for
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


_AS_NOBODY = f"""
import json, os, sys, tempfile
if os.getuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
from zeusctl.cli import main
answers = os.fdopen(os.dup(1), "w")
for arguments in json.load(sys.stdin):
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
    print(json.dumps([code, *(file.read().decode() for file in said)]), file=answers)
"""


def as_nobody_says(daemon: RunningDaemon, *lines: Sequence[str], **env: str) -> list[Said]:
    """Runs command lines one after the other in one process, and if this is root's, as an ordinary
    user.
    """
    if os.getuid() == 0:
        needs.require("two users")
    ran = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY],
        env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket, **env},
        input=json.dumps(lines),
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return [Said(*json.loads(line)) for line in ran.stdout.splitlines()]


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


def _as_from_a_shell() -> None:
    """No signal is ignored or blocked, as tests before may have left some in this worker."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Spawned(subprocess.Popen[str]):
    """A command line in its own process."""

    def line(self) -> str:
        """The next line of its standard output."""
        assert self.stdout is not None
        return self.stdout.readline()

    def warning(self) -> str:
        """The next line of its standard error."""
        assert self.stderr is not None
        return self.stderr.readline()


@contextlib.contextmanager
def spawn(daemon: RunningDaemon, *arguments: str) -> Iterator[Spawned]:
    """`zeusctl ARGUMENTS` in its own process, with pipes; it ends with the block."""
    with Spawned(
        [sys.executable, "-m", "zeusctl", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
        start_new_session=True,
        preexec_fn=_as_from_a_shell,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
