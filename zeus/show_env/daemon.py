"""The zeusd section of `zeus.show_env`: what `zeusctl doctor` finds about it."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zeus.show_env.packages import Row, unexpected
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH, SOCKET_ENV, socket_path

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import NodeInfo

TIMEOUT_S = 0.5
"""Time limit for zeusd's reply."""

ROUND_TRIPS = 20


@dataclass(frozen=True)
class Zeusd:
    """The state of the daemon.

    Attributes:
        found: The doctor's findings.
    """

    path: str
    wanted: bool
    problem: str = ""
    info: NodeInfo | None = None
    found: list[Row] = field(default_factory=list)


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
        from zeus_common.checks import of_node
        from zeus_ipc.client import Client
        from zeus_ipc.errors import ZeusIpcError
    except ImportError as error:
        return Zeusd(path, wanted, unexpected(error))
    client = Client(path, timeout_s=TIMEOUT_S)
    try:
        info = client.node()
        found = [
            (check.name, " -> ".join(filter(None, (check.found, check.remedy))))
            for check in of_node(client, info)
        ]
        found.append(("round trip", _round_trip(client)))
        return Zeusd(path, wanted, "", info, found)
    except ZeusIpcError as error:
        return Zeusd(path, wanted, error.message)
    except Exception as error:  # noqa: BLE001 - as of a daemon of another release
        return Zeusd(path, wanted, unexpected(error))
    finally:
        client.close(patient=False)


def _round_trip(client: Client) -> str:
    taken_s = []
    for _ in range(ROUND_TRIPS):
        begun_s = time.perf_counter()
        client.node()
        taken_s.append(time.perf_counter() - begun_s)
    return f"{statistics.median(taken_s) * 1000:.2f} ms (median of {ROUND_TRIPS})"


def rows(zeusd: Zeusd) -> list[Row]:
    """The whole section."""
    configured = os.environ.get(SOCKET_ENV)
    origin = f"from {SOCKET_ENV}" if configured else f"the default; {SOCKET_ENV} is not set"
    answer = "yes" if zeusd.info is not None else f"no: {zeusd.problem}"
    return [("socket", f"{zeusd.path} ({origin})"), ("reachable", answer), *zeusd.found]
