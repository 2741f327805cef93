"""A zeusd to measure: started here, or one that runs already; its processes, costs and log."""

from __future__ import annotations

import contextlib
import json
import pwd
import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_ipc import Client
from zeusd.config import ServerSection

NOBODY = 65534
GENEROUS = {
    "requests_per_second": 1e6,
    "bytes_per_second": 1e9,
    "accepts_per_second": 1e5,
    "handshakes_per_user": 1000,
    "max_connections_per_user": 1000,
}
"""Limits that one user never meets, by the names that a release of zeusd may have for them."""
UNITS = ("zeusd",)
"""Units whose processes and logs are zeusd's."""
FIRST_ATTACKER = 30_001
"""The attackers of one daemon are one user each, since a user is logged once a minute."""


def without_limits() -> str:
    """A part of zeusd.toml that lets one user ask as fast as it can."""
    fields = ServerSection.model_fields
    lines = [f"{name} = {value}" for name, value in GENEROUS.items() if name in fields]
    return "\n".join(["[server]", *lines, ""])


@dataclass(frozen=True)
class Usage:
    """CPU time and memory of some processes together, and how many they are."""

    cpu_s: float
    rss_mib: float
    pss_mib: float
    peak_mib: float
    processes: int


def with_children(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                pids += with_children(int(child))
    return pids


def usage(pids: list[int]) -> Usage:
    """What these processes have used so far."""
    cpu_ns = 0
    sizes = {"Rss": 0, "Pss": 0, "VmHWM": 0}
    for pid in pids:
        # Of each thread, what the scheduler counted: utime and stime miss what sleeps between
        # the clock's ticks.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                cpu_ns += int((task / "schedstat").read_text().split()[0])
        for name in ("smaps_rollup", "status"):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                key = line.partition(":")[0]
                if key in sizes:
                    sizes[key] += int(line.split()[1])
    rss, pss, peak = (sizes[name] / 1024 for name in ("Rss", "Pss", "VmHWM"))
    return Usage(cpu_ns / 1e9, rss, pss, peak, len(pids))


class Daemon(ABC):
    """A zeusd that serves.

    Args:
        path: Its socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with self.client() as client:
            self.gpus = [gpu.uuid for gpu in client.node().gpus]

    def client(self) -> Client:
        """A client of it, as this process's user."""
        return Client(self.path, timeout_s=60)

    def usage(self) -> Usage:
        """CPU time that its processes have used so far."""
        return usage(self.pids())

    @abstractmethod
    def pids(self) -> list[int]:
        """Its processes."""

    @abstractmethod
    def new_log_lines(self) -> contextlib.AbstractContextManager[list[str]]:
        """A list that holds, after the block, the warnings and errors logged during it."""

    @abstractmethod
    def attacker_uid(self, number: int) -> int:
        """The user of the attack with this number."""


class OwnDaemon(Daemon):
    """One that this process has started.

    Args:
        path: Its socket.
        pid: Its process.
        log: Where it writes JSON lines.
    """

    def __init__(self, path: str, pid: int, log: Path) -> None:
        super().__init__(path)
        self._pid = pid
        self._log = log

    def pids(self) -> list[int]:
        return with_children(self._pid)

    @contextlib.contextmanager
    def new_log_lines(self) -> Iterator[list[str]]:
        lines: list[str] = []
        before = self._log.stat().st_size
        yield lines
        with self._log.open() as log:
            log.seek(before)
            for line in log:
                with contextlib.suppress(ValueError):  # libzmq's last words are no JSON
                    record = json.loads(line)
                    if record["level"] in ("warning", "error", "critical"):
                        lines.append(str(record["message"]))

    def attacker_uid(self, number: int) -> int:
        return NOBODY


class InstalledDaemon(Daemon):
    """One that systemd runs on this machine."""

    def pids(self) -> list[int]:
        pids: list[int] = []
        for unit in UNITS:
            show = ["systemctl", "show", "--value", "--property=MainPID", f"{unit}.service"]
            pid = int(subprocess.run(show, capture_output=True, text=True).stdout or 0)
            pids += with_children(pid) if pid else []
        return pids

    @contextlib.contextmanager
    def new_log_lines(self) -> Iterator[list[str]]:
        lines: list[str] = []
        began_s = time.time()
        yield lines
        subprocess.run(["journalctl", "--sync"], check=True)
        command = ["journalctl", "-o", "json", "--priority=warning", f"--since=@{began_s:.6f}"]
        command += [f"--unit={unit}" for unit in UNITS]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines += [str(json.loads(line)["MESSAGE"]) for line in out.splitlines()]

    def attacker_uid(self, number: int) -> int:
        return FIRST_ATTACKER + 1 + number


def user_name(uid: int) -> str:
    """A user's name; its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def owner_of(uid: int) -> str | None:
    """The user whose subordinate uid this is, by /etc/subuid; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/etc/subuid").read_text().splitlines():
            owner, first, count = line.split(":")
            if int(first) <= uid < int(first) + int(count):
                return owner
    return None


def subordinate_users(uids: Sequence[int]) -> set[str]:
    """Names that a log may use for these: of the owner of their range, and their own."""
    owner = owner_of(uids[0])
    return {user_name(uid) for uid in uids} | ({owner} if owner is not None else set())


def names_any(line: str, users: set[str]) -> bool:
    """Whether a log line names one of these users."""
    return not users.isdisjoint(re.findall(r"[\w.-]*\w", line))
