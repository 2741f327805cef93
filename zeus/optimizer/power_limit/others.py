"""What a search has to agree on with others: optimizers of this process, and jobs of the site.

Two optimizers on one GPU would overwrite each other's limits. It belongs to the one that was
created or began to train last: in a notebook, an earlier one may not know that its training ended.

Under a power budget over many nodes, the allocator shares watts by their value to jobs, so a job
publishes its measurements. Before it measures, it requests its highest limits: idle GPUs are held
at their minimum.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long a search waits for its highest limit: others may measure first."""
CEILING = "fleet"


_owners: dict[str, weakref.ref[object] | None] = {}
"""The optimizer that was created or began to train last, by UUID of its GPUs; None: it has ended,
and what it had set is restored.
"""
os.register_at_fork(after_in_child=_owners.clear)


def take(owner: object, gpus: Sequence[str]) -> bool:
    """An optimizer takes GPUs, by their UUIDs. Returns whether an earlier one had one of them."""
    had = any(last is not None and last() is not owner for last in map(_owners.get, gpus))
    _owners.update(dict.fromkeys(gpus, weakref.ref(owner)))
    return had


def leave(owner: object, gpus: Sequence[str]) -> set[str]:
    """An optimizer has ended. Returns those of its GPUs that no living one has taken since."""
    last = {uuid: _owners.get(uuid) for uuid in gpus}
    own = {uuid for uuid, by in last.items() if by is None or by() in (owner, None)}
    _owners.update(dict.fromkeys(own))
    return own


def taken(owner: object, gpus: Sequence[str]) -> bool:
    """Whether another optimizer has taken one of these GPUs since."""
    last = [_owners[uuid] for uuid in gpus if uuid in _owners]
    return any(by is None or by() is not owner for by in last)


def borrow(gpus: GPUs, indices: Sequence[int], wait_s: float = WAIT_S) -> None:
    """Under a fleet's ceiling, announces a search and waits for its highest limit. Acquires the
    leases of the power limits. Never raises: the search then uses the limits that are allowed.
    """
    try:
        bounded = gpus.bounded_by(indices, CEILING)
        if bounded is None:
            return
        gpus.acquire(indices, "power_limit")
        gpus.publish_profile(indices, {}, measuring=True)
        if not bounded:
            return
        log.info("waiting up to %g s for the watts to measure with", wait_s)
        end = time.monotonic() + wait_s
        while gpus.bounded_by(indices, CEILING) and time.monotonic() < end:
            time.sleep(0.5)
    except ZeusBaseError as error:
        log.info("the search has the power limits that are allowed now: %s", error.message)


def publish(gpus: GPUs, indices: Sequence[int], times_s: Mapping[int, float]) -> None:
    """Publishes, on a thread, what each limit is worth, and that the measurement is over: from the
    time per step, s, by limit, mW. Never raises.
    """
    if not times_s or not indices:
        return
    fastest = times_s[max(times_s)]
    progress = {limit: min(1.0, fastest / time_s) for limit, time_s in times_s.items()}

    def send() -> None:
        with contextlib.suppress(ZeusBaseError):
            gpus.publish_profile(indices, progress)

    with contextlib.suppress(RuntimeError):  # no more threads
        threading.Thread(target=send, name="zeus-publish", daemon=True).start()
