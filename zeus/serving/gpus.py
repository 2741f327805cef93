"""Which GPUs an engine has, and whether another tenant uses them, from zeusd."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from zeus_common.text import user_name
from zeus_ipc.client import Client
from zeus_ipc.errors import NotSupported, RequestRejected, SeveralGpusFailed, ZeusIpcError
from zeus_ipc.replies import GpuInfo, GpuProcesses

log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Period of checks for other tenants: zeusd lists processes once a second."""


def shared_by(
    processes: Mapping[str, GpuProcesses], name_of: Callable[[int], str] = user_name
) -> str | None:
    """Describes the tenants of the first GPU with more than one; None: there is none.

    A tenant is a user, or one of several jobs of a user; an engine's processes belong to one. If
    zeusd does not report the job of a process, all processes of its user are one tenant.
    """
    for gpu, listed in processes.items():
        tenants = {
            (one.uid, one.job or ""): one
            for one in listed.processes
            if one.compute and one.uid is not None
        }
        if len(tenants) > 1:
            names = [
                name_of(uid) + (f" ({job})" if job else "")
                for uid, job in sorted(tenants, key=lambda tenant: (tenant[0] or 0, tenant[1]))
                if uid is not None
            ]
            return f"processes of {' and of '.join(names)} compute on {gpu}"
    return None


class Tenants:
    """Checks for other tenants periodically."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = list(gpus)
        self._looked_s = -math.inf
        self._shared: str | None = None

    @property
    def due(self) -> bool:
        """Whether another check is due."""
        return time.monotonic() >= self._looked_s + EVERY_S

    def look(self, client: Client) -> str | None:
        """Asks zeusd for other tenants on the GPUs; None: there are none, or zeusd does not know.

        Raises:
            ZeusIpcError: zeusd does not answer.
        """
        self._looked_s = time.monotonic()
        try:
            self._shared = shared_by(client.processes(self._gpus))
        except (NotSupported, RequestRejected, SeveralGpusFailed) as error:
            self._looked_s = math.inf
            log.info("other users of the GPUs are not known: %s", error.message)
        return self._shared

    def refuse_others(self, client: Client) -> None:
        """Checks if it is due.

        Raises:
            ZeusIpcError: There is another tenant, or zeusd does not answer.
        """
        shared = self.look(client) if self.due else self._shared
        if shared is not None:
            raise ZeusIpcError(f"another tenant uses a GPU: {shared}")


def engines_of(named: Sequence[str], gpus: Sequence[GpuInfo]) -> dict[str, list[str]]:
    """UUIDs by engine, from `NAME=GPU,GPU`.

    Raises:
        ValueError: An engine is malformed, or has a GPU that does not exist or that another engine
            has.
    """
    if not named:
        return {"0": chosen(gpus, ())}
    engines: dict[str, list[str]] = {}
    taken: set[str] = set()
    for one in named:
        name, equals, rest = one.partition("=")
        if not equals or not name or name in engines:
            raise ValueError(f"--engine {one!r} must be NAME=GPU,GPU with a unique name")
        engines[name] = chosen(gpus, rest.split(","))
        if taken.intersection(engines[name]):
            raise ValueError(f"--engine {one!r} has a GPU of another engine")
        taken.update(engines[name])
    return engines


def chosen(gpus: Sequence[GpuInfo], wanted: Sequence[str]) -> list[str]:
    """UUIDs of GPUs by index or UUID, each once; all GPUs if none is named.

    Raises:
        ValueError: The GPU does not exist, or there is none at all.
    """
    by_name = {gpu.uuid: gpu.uuid for gpu in gpus} | {str(gpu.index): gpu.uuid for gpu in gpus}
    if not gpus:
        raise ValueError("this node has no GPU; see zeusctl status")
    for one in wanted:
        if one not in by_name:
            raise ValueError(f"there is no GPU {one}; GPUs are 0 to {len(gpus) - 1}, or UUIDs")
    return list(dict.fromkeys(by_name[one] for one in wanted)) or [gpu.uuid for gpu in gpus]
