"""The search under a power budget over many nodes, if the site has one. The allocator shares watts
by their value to jobs, so a job publishes its measurements. Before it measures, it requests its
highest limits: idle GPUs are held at their minimum.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long a search waits for its highest limit: others may measure first."""
CEILING = "fleet"


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
    """Publishes what each limit is worth, and that the measurement is over. Never raises.

    Args:
        gpus: The GPUs of this process.
        indices: Those to publish for.
        times_s: Time per step by limit, mW.
    """
    if not times_s or not indices:
        return
    fastest = times_s[max(times_s)]
    progress = {limit: min(1.0, fastest / time_s) for limit, time_s in times_s.items()}
    with contextlib.suppress(ZeusBaseError):
        gpus.publish_profile(indices, progress)
