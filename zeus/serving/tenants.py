"""Finds other tenants on an engine's GPUs, from zeusd's list of processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from zeus_ipc.client import Client
from zeus_ipc.errors import NotSupported, RequestRejected, SeveralGpusFailed, ZeusIpcError
from zeus_ipc.replies import GpuProcesses
from zeus_ipc.users import user_name

log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Period of checks for other tenants: zeusd lists processes once a second."""


def shared_by(
    found: Mapping[str, GpuProcesses], name_of: Callable[[int], str] = user_name
) -> str | None:
    """Describes the tenants of the first GPU with more than one; None: there is none.

    A tenant is a user, or one of several jobs of a user; an engine's processes belong to one. If
    zeusd does not report the job of a process, all processes of its user are one tenant.
    """
    for gpu, listed in found.items():
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
