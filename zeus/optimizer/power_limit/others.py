"""What a search has to agree on with others: optimizers of this process, and jobs of the site.

Two optimizers on one GPU would overwrite each other's limits. One whose training has begun keeps
its GPUs until it ends. One that has only seen steps keeps them until another claims them, as after
an interrupted notebook cell.

Under a power budget over many nodes, the allocator shares watts by their value to jobs, so a job
publishes its measurements. Before it measures, it requests its highest limits: idle GPUs are held
at their minimum.
"""

from __future__ import annotations

import contextlib
import gc
import logging
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


_guard = threading.Lock()
_Claim = tuple["weakref.ref[object]", bool]
"""An optimizer, and whether its training has begun."""
_claims: dict[str, _Claim] = {}


def firmly_held(owner: object, gpus: Sequence[str]) -> bool:
    """Whether an optimizer other than `owner` is training on one of these GPUs."""
    return any(firm for _, firm in _of_others(owner, gpus))


def claim(owner: object, gpus: Sequence[str], *, firm: bool, again: bool) -> bool:
    """Claims GPUs for an optimizer, as long as it exists. Returns whether that succeeded.

    Args:
        gpus: UUIDs.
        firm: Whether training has begun and not ended.
        again: Whether it has claimed them before: then it does not take them from another.
    """
    with _guard:
        others = _of_others(owner, gpus)
        if others and (again or any(firm for _, firm in others)):
            return False
        _claims.update(dict.fromkeys(gpus, (weakref.ref(owner), firm)))
        return True


def release(owner: object) -> None:
    """Ends the claims of an optimizer."""
    with _guard:
        for uuid in [uuid for uuid, (by, _) in _claims.items() if by() in (owner, None)]:
            del _claims[uuid]


def _of_others(owner: object, gpus: Sequence[str]) -> list[_Claim]:
    def found() -> list[_Claim]:
        claims = [_claims[uuid] for uuid in gpus if uuid in _claims]
        return [one for one in claims if one[0]() not in (owner, None)]

    others = found()
    if others:
        gc.collect()  # an unreferenced one may still exist
        others = found()
    return others


def borrow(gpus: GPUs, indices: Sequence[int], wait_s: float = WAIT_S) -> None:
    """Under a fleet's ceiling, announces a search and waits for its highest limit. Acquires the
    leases of the power limits. Never raises: the search then uses the limits that are allowed.
    """
    try:
        bounded = gpus.bounded_by(indices, CEILING)
        if bounded is None:
            return
        gpus.acquire_power_limits(indices)
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
