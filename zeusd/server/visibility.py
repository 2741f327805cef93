"""Finds clients that zeusd cannot serve because of their namespaces, and the remedy for each."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zeus_ipc.sockets import peer_of


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a client cannot be served."""

    reason: str
    message: str


UNSEEN = Unusable(
    "pid_namespace",
    "zeusd does not see this process, since it runs in a pid namespace of its own; start zeusd's "
    "container in the host's (--pid=host, or hostPID: true)",
)


def unusable(connection: socket.socket) -> Unusable | None:
    """Why the process at the other end cannot be served; None: it can."""
    pid, _, _ = peer_of(connection)
    if pid <= 0:
        return UNSEEN
    shift_s = monotonic_offset_s(pid) - _own_offset_s()
    # Clocks that differ by more than this would shift windows and deadlines noticeably.
    if abs(shift_s) > 0.001:
        direction = "ahead of" if shift_s > 0 else "behind"
        return Unusable(
            "time_namespace",
            f"the clock of this process is {abs(shift_s):g} s {direction} zeusd's, since one of "
            "them runs in a time namespace; run both in the same one (see time_namespaces(7))",
        )
    return None


@cache
def _own_offset_s() -> float:
    return monotonic_offset_s("self")  # only the process itself can change it


def monotonic_offset_s(pid: int | str) -> float:
    """Offset of a process's CLOCK_MONOTONIC, from its time namespace; 0: unknown.

    /proc has the offset of the children's namespace, which is the process's own unless it called
    unshare(2).
    """
    try:
        lines = Path(f"/proc/{pid}/timens_offsets").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        fields = line.split()
        if len(fields) == 3 and fields[0] in ("monotonic", "1"):
            return int(fields[1]) + int(fields[2]) * 1e-9
    return 0.0
