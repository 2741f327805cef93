"""Starts real daemons and real users for tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import needs
from tests.preloaded import preloaded
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

PACKAGES = ("zeus_ipc", "zeus_common", "zeusd", "zeus", "zeusctl", "zeus_fleet")
"""Each imports only itself and those before it, see CONTRIBUTING.md."""

TIMEOUT_S = 60.0
"""How long a test waits for what must happen; long, because CI machines are slow."""

NOBODY = 65534

T = TypeVar("T")


def known(value: T | None) -> T:
    """A value that must be there."""
    assert value is not None
    return value


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Waits until `condition` returns something true, and returns that.

    It leaves the processors to what it waits for: between two looks it sleeps five times as long
    as a look takes (at most 0.5 s), and a twentieth of what it has waited (at most 0.1 s).
    """
    begun_s = time.monotonic()
    while True:
        looked_s = time.monotonic()
        result = condition()
        if result:
            return result
        now_s = time.monotonic()
        waited_s = now_s - begun_s
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}")
        took_s = now_s - looked_s
        time.sleep(max(0.005, min(0.5, 5 * took_s), min(0.1, waited_s / 20)))


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user of the machine may enter; pytest's own are private."""
    directory = Path(tempfile.mkdtemp(prefix="zeusd-test-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_PORTS: list[socket.socket] = []


def open_descriptors(kind: str) -> int:
    """How many this process has, such as of `pidfd` or `anon_inode`."""
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(kind in os.readlink(link) for link in links if link.is_symlink())


@pytest.fixture(autouse=True)
def pidfds_are_closed() -> Iterator[None]:
    """Fails a test that leaves descriptors of processes open; for a module that imports it."""
    before = open_descriptors("pidfd")
    yield
    assert open_descriptors("pidfd") == before


def free_port() -> int:
    """A port that nobody listens on, and that no other test gets.

    The kernel gives it to nobody. A Unix socket of its name, which has no file and ends with this
    process, keeps other processes of the tests from it.
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 10_000):
        mine, probe = socket.socket(socket.AF_UNIX), socket.socket()
        try:
            mine.bind(f"\0zeusd-test-port-{port}")
            with probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            mine.close()
            continue
        _PORTS.append(mine)
        return port
    raise AssertionError("there is no port left")


ALL_MAY = """
[[allow]]
users = ["*"]
controls = ["power_limit", "gpu_clocks", "memory_clocks", "persistence_mode"]
"""


def configuration(directory: Path, text: str = ALL_MAY) -> tuple[str, str]:
    """The options of `zeusd serve` that make it read this configuration."""
    path = directory / "zeusd.toml"
    path.write_text(text)
    return "--config", str(path)


def stopped(process: subprocess.Popen[Any]) -> int:
    """SIGTERM, and waits for the end; one that does not end is killed, and is a failure.

    Returns:
        The exit code.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


Started = TypeVar("Started", bound="subprocess.Popen[Any]")


@contextlib.contextmanager
def ending(process: Started) -> Iterator[Started]:
    """A process that is killed at the end of the block: `subprocess.Popen` would wait for it, also
    after the alarm of a test that takes too long.
    """
    with process:
        try:
            yield process
        finally:
            process.kill()


IMPORTED = ("zeusd.cli", "zeusd.main", "zeusd.devices.simulated.node")
"""Most of what a daemon imports."""


class RunningDaemon:
    """`zeusd serve` in its own process.

    Args:
        directory: Where socket, journal and log go.
        arguments: Further options of `zeusd serve`.
        env: Further environment.
        program: What Python runs instead of `-m zeusd`, the first time.
        imported: What that Python has imported before; nothing: it is a new one.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "zeusd"),
        imported: Sequence[str] = IMPORTED,
    ) -> None:
        self.directory = directory
        self.socket = str(directory / "zeusd.sock")
        self.state_dir = directory / "state"
        self.log_path = directory / "zeusd.log"
        self.arguments = arguments
        self._env = {**os.environ, **(env or {})}
        self.process = self._spawn(program, imported)

    def _spawn(
        self, program: Sequence[str] = ("-m", "zeusd"), imported: Sequence[str] = IMPORTED
    ) -> subprocess.Popen[Any]:
        serve = ["serve", "--socket", self.socket, "--state-dir", str(self.state_dir)]
        serve += ["--log-format", "json", *self.arguments]
        with self.log_path.open("ab") as log:
            command = [*program, *serve]
            if imported:
                start = preloaded(*imported).start
                return start(*command, cwd=Path.cwd(), env=self._env, stdout=log, stderr=log)
            command = [sys.executable, *command]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=self._env)

    def wait_until_serving(self, gpus: int | None = None) -> RunningDaemon:
        """Waits until it answers, with this many GPUs if a number is given."""

        def answers() -> bool:
            assert self.process.poll() is None, f"zeusd ended:\n{self.log_path.read_text()}"
            try:
                with self.client(timeout_s=1.0) as client:
                    found = len(client.node().gpus)
            except ZeusIpcError:
                return False
            return gpus is None or found == gpus

        wait_for(answers, f"zeusd to serve {gpus} GPUs")
        return self

    def client(self, timeout_s: float = 30.0) -> Client:
        """A new client of it."""
        return Client(self.socket, timeout_s=timeout_s)

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """Its log so far; lines that are not JSON come from a crash."""
        lines: list[dict[str, Any]] = []
        for line in self.log_path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if event is None or record.get("event") == event:
                    lines.append(record)
        return lines

    def wait_for_records(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Waits until it has logged an event so often: a GPU changes before the record of it."""
        wait_for(lambda: len(self.records(event)) >= count, f"{count} records of {event}")
        return self.records(event)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def start_again(self, program: Sequence[str] = ("-m", "zeusd")) -> None:
        """A new daemon with the same socket and the same journal."""
        self.process = self._spawn(program)

    def stop(self) -> int:
        """SIGTERM, and waits for the end. Returns the exit code."""
        return stopped(self.process)


@contextlib.contextmanager
def running_daemon(
    *arguments: str,
    gpus: int | None = None,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Iterator[RunningDaemon]:
    """A daemon that serves, in its own directory, which everyone may enter."""
    with contextlib.ExitStack() as stack:
        where = directory or stack.enter_context(public_directory())
        daemon = RunningDaemon(where, *arguments, env=env)
        try:
            yield daemon.wait_until_serving(gpus)
        finally:
            daemon.stop()
        assert not daemon.records("bug")


def forked(work: Callable[[], object]) -> int:
    """The pid of a child of `fork` that does only this: it ends with 0, or with 1 if that fails."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """The exit code of a child of `fork`, minus the signal that killed it."""

    def status() -> list[int]:
        pid, found = os.waitpid(child, os.WNOHANG)
        return [found] if pid else []

    try:
        return os.waitstatus_to_exitcode(wait_for(status, "the child to end")[0])
    except BaseException:
        os.kill(child, signal.SIGKILL)  # it holds all that this process has open
        raise


CLIENTS = (
    *("zeus_ipc.client", "zeus_ipc.socket_transport", "zeus_ipc.stream", "zeusctl.cli"),
    *("zeusctl.commands.status", "zeusctl.commands.doctor", "zeusctl.checks"),
    "zeusctl.exporter.collector",
)
"""Most of what users' programs import."""


def script(source: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """A Python program in its own process, with pipes to talk to it."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
    if "user" in options:  # who may not read what a server has imported from a private checkout
        return subprocess.Popen([sys.executable, "-c", source, *arguments], **options)
    return preloaded(*CLIENTS).start("-c", source, *arguments, **options)


def zeusctl_line() -> str:
    """The line of a shell script that is `zeusctl`, in a process that has imported it before."""
    return f'exec {preloaded(*CLIENTS).python} -m zeusctl "$@"'


def as_nobody() -> dict[str, Any]:
    """Options of Popen that make the child an ordinary user, where this process may do that."""
    if os.getuid() != 0:
        return {}
    needs.require("two users")
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def in_a_notebook(shown: Any) -> str:
    """The HTML that Jupyter shows for it."""
    return str(shown._repr_html_())


def for_users(caught: Iterable[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    """Of what was caught, what is said to users: what another test left open may be collected, and
    warned of, at any time."""
    return [one for one in caught if issubclass(one.category, UserWarning)]
