"""Publishes, with its leases, the power that an instance's objectives need from a fleet's budget.

The budget's allocator gives such jobs this power before others get more than their minimum.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence

from zeus_ipc.client import Client
from zeus_ipc.controls import Control
from zeus_ipc.errors import LeaseHeld, ZeusIpcError

log = logging.getLogger(__name__)

KEPT_S = 300.0
"""Length of the interval whose highest values count; at most twice this."""

CEILING = "fleet"
CONTROL = Control.POWER_LIMIT.value

PUBLISHED_S = 10.0
"""Period of publishing, because a restart of zeusd drops it."""

MARGIN = 1.1
"""Ratio of needed to drawn power: an average hides bursts, which a limit would cut off."""

CAPPED = 0.95
"""A GPU that draws this share of its limit may need more, ..."""

MORE = 1.5
"""... and then requests this multiple of its power."""


def needed_w(gpus: Iterable[tuple[float, float]]) -> float:
    """The power limit that an instance needs, W, from the power of its GPUs under the present
    limits, W; 0: no GPU is known."""
    return max(
        (watts * (MORE if watts > CAPPED * limit_w else MARGIN) for watts, limit_w in gpus),
        default=0.0,
    )


class Needs:
    """The highest wanted clock, and the highest power limit needed, over some minutes.

    Publishes the power if the instance's GPUs are under a fleet's ceiling: a power budget's
    allocator must not go below it (`zeus_fleet.policies.JobGroup.needs_mw`). Acquires leases on
    their power limits for this, and sets none.

    Args:
        gpus: UUIDs of the instance's GPUs.
        ttl_s: TTL of the leases, s.
    """

    def __init__(self, gpus: Sequence[str], ttl_s: float) -> None:
        self._gpus = [*gpus]
        self._ttl_s = ttl_s
        self._began_s = -math.inf
        self._now = self._before = (0.0, 0.0)
        self._published_w = 0.0
        self._next_s = -math.inf
        self._holds = False
        self._refused = False

    def seen(self, now_s: float, clock_mhz: float, watts: float) -> None:
        """Adds the clock that the policy wants, and the power limit that a GPU needs; NaN: not
        known.
        """
        if not self._began_s <= now_s < self._began_s + KEPT_S:
            self._began_s, self._before, self._now = now_s, self._now, (0.0, 0.0)
        clock, power = self._now
        self._now = max(clock, clock_mhz), watts if watts > power else power

    @property
    def clock_mhz(self) -> float:
        """The lowest clock that would have met the objectives all the time; 0: not known yet."""
        return max(self._before[0], self._now[0])

    @property
    def power_w(self) -> float:
        """The lowest power limit of each GPU that would have done so, W; NaN: not known."""
        return max(self._before[1], self._now[1]) or math.nan

    def publish(self, client: Client, now_s: float) -> None:
        """Publishes the power if it is due. Never raises.

        Args:
            client: Client of their zeusd; its heartbeats keep the leases.
            now_s: Time on a monotonic clock, s.
        """
        watts = self.power_w
        if math.isnan(watts) or (now_s < self._next_s and watts <= 1.02 * self._published_w):
            return
        self._next_s, self._published_w = now_s + PUBLISHED_S, watts
        try:
            self._publish(client, watts)
        except LeaseHeld as error:
            if not self._refused:
                log.warning("the power budget is not told what this instance needs: %s", error)
            self._refused, self._holds = True, False
        except ZeusIpcError as error:
            self._holds = False
            log.debug("the power budget is not told what this instance needs: %s", error)

    def release(self, client: Client) -> None:
        """Releases the leases: the objectives no longer need power."""
        if self._holds:
            self._holds = False
            with contextlib.suppress(ZeusIpcError):
                client.release(self._gpus, [CONTROL])

    def _publish(self, client: Client, watts: float) -> None:
        gpus = [gpu for gpu in client.node().gpus if gpu.uuid in self._gpus]
        if not any(one.name == CEILING for gpu in gpus for one in gpu.ceilings):
            self.release(client)
            return
        most = min((gpu.power_limit_max_mw for gpu in gpus if gpu.power_limit_max_mw), default=0)
        client.acquire(self._gpus, [CONTROL], ttl_s=self._ttl_s)
        self._holds = True
        client.publish_profile(self._gpus, needs_mw=min(most, round(1000 * watts)))
        self._refused = False
