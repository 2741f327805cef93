"""The zeusd section of `zeus.show_env`."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zeus.show_env.packages import Row, unexpected
from zeus_ipc._version import __version__
from zeus_ipc.paths import DEFAULT_SOCKET_PATH, SOCKET_ENV, socket_path
from zeus_ipc.users import group_name, user_name

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import LeaseInfo, NodeInfo, Policy

TIMEOUT_S = 0.5
"""Time limit for zeusd's reply."""

ROUND_TRIPS = 20


@dataclass(frozen=True)
class Zeusd:
    """The state of the daemon.

    Attributes:
        path: Its socket.
        wanted: Whether `zeus` would use it, or raise an error.
        problem: Why `info` is missing.
        round_trip_s: Median round-trip time.
        leases_problem: Why `leases` are missing.
        policy: This user's permissions.
    """

    path: str
    wanted: bool
    problem: str = ""
    info: NodeInfo | None = None
    round_trip_s: float = 0.0
    leases: list[LeaseInfo] = field(default_factory=list)
    leases_problem: str = ""
    policy: Policy | None = None


def ask_zeusd() -> Zeusd:
    """Queries the daemon that `zeus` would use. Never raises."""
    path = socket_path()
    wanted = bool(os.environ.get(SOCKET_ENV)) or os.path.exists(DEFAULT_SOCKET_PATH)
    if not wanted:
        return Zeusd(
            path,
            wanted,
            "there is no such socket, so this process uses the GPUs directly; start zeusd, "
            f"or name its socket in {SOCKET_ENV}",
        )
    try:
        from zeus_ipc.client import Client
        from zeus_ipc.errors import ZeusIpcError
    except ImportError as error:
        return Zeusd(path, wanted, unexpected(error))
    try:
        with Client(path, timeout_s=TIMEOUT_S, heartbeat=False) as client:
            info = client.node()
            round_trip_s = _round_trip_s(client)
            try:
                leases, problem = client.leases(), ""
            except ZeusIpcError as error:
                leases, problem = [], error.message
            found = Zeusd(path, wanted, "", info, round_trip_s, leases, problem)
            with contextlib.suppress(ZeusIpcError):  # an older zeusd does not report it
                found = replace(found, policy=client.policy())
            return found
    except ZeusIpcError as error:
        return Zeusd(path, wanted, error.message)
    except Exception as error:  # noqa: BLE001 - as of a daemon of another release
        return Zeusd(path, wanted, unexpected(error))


def _round_trip_s(client: Client) -> float:
    taken_s = []
    for _ in range(ROUND_TRIPS):
        begun_s = time.perf_counter()
        client.node()
        taken_s.append(time.perf_counter() - begun_s)
    return statistics.median(taken_s)


def rows(zeusd: Zeusd) -> list[Row]:
    """The whole section."""
    configured = os.environ.get(SOCKET_ENV)
    origin = f"from {SOCKET_ENV}" if configured else f"the default; {SOCKET_ENV} is not set"
    rows = [("socket", f"{zeusd.path} ({origin})")]
    owner = _owner(zeusd.path)
    if owner:
        rows.append(("owner", owner))
    info = zeusd.info
    if info is None:
        return [*rows, ("reachable", f"no: {zeusd.problem}")]
    versions = ", ".join(map(str, info.protocols))
    devices = "real" if info.simulated is None else f"simulated (work goes to {info.simulated})"
    return [
        *rows,
        ("reachable", "yes"),
        ("version", _daemon_version(info)),
        ("protocol", f"{info.protocol} (it speaks {versions})"),
        ("devices", devices),
        ("driver", info.driver_version or "none yet; load the NVIDIA driver, zeusd keeps trying"),
        ("round trip", f"{zeusd.round_trip_s * 1000:.2f} ms (median of {ROUND_TRIPS})"),
    ]


def _daemon_version(info: NodeInfo) -> str:
    if info.daemon_version == __version__:
        return info.daemon_version
    return (
        f"{info.daemon_version}, while this library is {__version__}; if something is missing, "
        "install one release for both"
    )


def _owner(path: str) -> str:
    """Owner and mode of the socket; empty if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    user, group = user_name(status.st_uid), group_name(status.st_gid)
    return f"{user}:{group}, mode {status.st_mode & 0o7777:04o}"
