"""Sets the clock policy's choices through zeusd, under a lease with a short TTL.

The engine calls `step` and `finished`, which take some microseconds and never raise. One thread
does everything else, including the heartbeats. If that thread, the process or the engine's
statistics stop, zeusd restores the GPUs within the TTL, or within `lease.busy_ttl_s` while the
engine keeps computing.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zeus.serving.clock_fleet import Needs, needed_w
from zeus.serving.clock_load import Queue, Step
from zeus.serving.clock_policy import ClockPolicy
from zeus.serving.gpus import Tenants
from zeus_ipc.client import Client
from zeus_ipc.controls import Control
from zeus_ipc.errors import (
    DaemonUnavailable,
    DeferredSetFailed,
    LeaseHeld,
    NotSupported,
    SeveralGpusFailed,
    ZeusIpcError,
)
from zeus_ipc.prepared import holds


@dataclass
class ClockStatus:
    """A status.

    Attributes:
        wanted_mhz: Clock that the policy wants.
        set_mhz: Last clock that was set; the highest: the GPUs are at their restore target.
        effective_mhz: The slowest GPU's sampled clock; NaN: not known.
        working: Whether clocks are being set; in a dry run, whether they would be.
        trouble: Why not, as a sentence; empty: no problem.
        changes: Clocks set so far; in a dry run, those that would have been.
        escapes: Number of times that steps took far longer than predicted.
        ttft_violations, tpot_violations: Requests that missed this objective.
        predicted_tpot_s, predicted_ttft_s: Predictions at the wanted clock.
        seen_tpot_s, seen_ttft_s: Latencies of the last request that ended; NaN: none yet.
        saving: Share of saved energy; see `ClockPolicy.saving`.
        needed_mhz: The clock floor: the highest clock that the objectives needed in the last
            minutes; 0: not known yet.
        needed_w: Power limit of each GPU that the objectives needed in this time: a lower one may
            violate them. In a dry run, at the highest clock. NaN: not known.
    """

    wanted_mhz: int = 0
    set_mhz: int = 0
    effective_mhz: float = math.nan
    working: bool = False
    trouble: str = ""
    changes: int = 0
    escapes: int = 0
    ttft_violations: int = 0
    tpot_violations: int = 0
    predicted_tpot_s: float = math.nan
    predicted_ttft_s: float = math.nan
    seen_tpot_s: float = math.nan
    seen_ttft_s: float = math.nan
    saving: float = math.nan
    needed_mhz: float = 0.0
    needed_w: float = math.nan


log = logging.getLogger(__name__)

CONTROL = Control.GPU_CLOCKS.value

TTL_S = 2.0
"""TTL of the lease: the shortest that zeusd grants by default."""

TICK_S = 0.05
"""Period at which the thread checks if nothing wakes it."""

IDLE_S = 0.1
"""Time without a step after which the policy chooses the clock for an idle engine."""

SETTLED_S = 0.4
"""Time after a change before a sample of the clock is valid for it."""

IDLE_REASON = 1
"""The bit of nvmlClocksEventReasons for an idle GPU."""

CAPPED = 0.97
"""A sampled clock below this share of the set one is throttled."""

RETRY_S = (0.5, 30.0)
"""First and longest pause after a failure."""

TIMEOUT_S = 1.0

ENERGY_NS = 1_000_000_000
"""Period at which energy is reported to the policy, and its delay: it is known by then."""


class ClockControl:
    """Runs a clock policy for one engine instance.

    Args:
        gpus: UUIDs of all GPUs of the instance; one message sets the clock of all of them.
        ttft_s: Objective for each request's time to first token, s.
        tpot_s: Objective for each request's mean time per output token, s.
        floor_mhz: No clock below this one; None: it finds a floor by itself.
        dry_run: Take no lease and set nothing; log what it would do. Lower clocks are not tried, so
            it assumes the longest possible steps there.
        stretch: Step times from `tune` or an earlier run; see `ClockPolicy`.
        path: zeusd's socket; None: `$ZEUSD_SOCK_PATH`, else `/run/zeusd/zeusd.sock`.
        ttl_s: Time for which clocks stay set if this process hangs, s.
        policy: Makes the policy; `clock_tune.Tuner` tunes.

    Raises:
        ValueError: An argument is wrong. Nothing is raised later: `status` and the log report
            failures, which are retried.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        ttft_s: float,
        tpot_s: float,
        *,
        floor_mhz: float | None = None,
        dry_run: bool = False,
        stretch: dict[int, float] | None = None,
        path: str | os.PathLike[str] | None = None,
        ttl_s: float = TTL_S,
        policy: Callable[..., ClockPolicy] = ClockPolicy,
    ) -> None:
        if not gpus or isinstance(gpus, str):
            raise ValueError("gpus must be the UUIDs of the instance's GPUs; see zeusctl gpus")
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be a positive number of seconds, not {ttl_s!r}")
        ClockPolicy([1], ttft_s, tpot_s, floor_mhz)  # raises now if the objectives are wrong
        self._gpus = list(gpus)
        self._objectives = ttft_s, tpot_s, floor_mhz
        self._stretch = stretch
        self._path = path
        self._ttl_s = ttl_s
        self._energy = True  # whether the GPUs have a counter
        self._energy_ns = 0  # energy was reported until then
        self._tenants = Tenants(self._gpus)
        self._make = policy
        self.dry_run = dry_run
        self._policy: ClockPolicy | None = None
        self._client: Client | None = None
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._now = ClockStatus()
        self._refused: str | None = None
        self._lowest = 0
        self._set_s = self._stepped_s = self._beat_s = -math.inf
        self._serving_s = -math.inf  # it has served without a pause since then
        self._cap = math.inf
        self._needs = Needs(gpus, ttl_s)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="zeus-serving-clocks", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------- called by the engine

    def step(self, step: Step, queue: Queue) -> None:
        """Handles the end of a step. Times are of `time.monotonic`; this method sets the step's
        clock. Never raises, never waits for zeusd.
        """

        def handle(policy: ClockPolicy) -> None:
            now = time.monotonic()
            if now - self._stepped_s > IDLE_S:
                self._serving_s, self._cap = now, math.inf
            self._stepped_s = now
            wanted = policy.step(step._replace(clock_mhz=self._effective()), queue)
            if wanted != self._now.wanted_mhz:
                self._now.wanted_mhz = wanted
                self._wake.set()

        self._tell(handle)

    def finished(self, ttft_s: float, tpot_s: float) -> None:
        """Handles the end of a request; see `ClockPolicy.finished`. Never raises."""
        self._tell(lambda policy: policy.finished(ttft_s, tpot_s))
        self._now.seen_ttft_s, self._now.seen_tpot_s = ttft_s, tpot_s

    def seen(self, ttft_s: float, tpot_s: float) -> None:
        """Handles a request's latencies; see `ClockPolicy.seen`. Never raises."""
        self._tell(lambda policy: policy.seen(ttft_s, tpot_s))
        self._now.seen_ttft_s, self._now.seen_tpot_s = ttft_s, tpot_s

    def drained(self) -> None:
        """Handles that the engine has no request; see `ClockPolicy.drained`. Never raises."""
        self._tell(lambda policy: policy.drained())

    def refuse(self, reason: str | None) -> None:
        """Pause while another tenant uses a GPU; this restores the clocks. None: resume.

        Args:
            reason: Such as `another process used the GPU`.
        """
        self._refused = reason
        self._wake.set()

    def status(self) -> ClockStatus:
        """The present status."""
        with self._guard:
            policy, needs = self._policy, self._needs
            status = replace(self._now, needed_mhz=needs.clock_mhz, needed_w=needs.power_w)
            if policy is not None:
                predicted = policy.predict()
                status.predicted_tpot_s, status.predicted_ttft_s = (
                    predicted.tpot_s,
                    predicted.ttft_s,
                )
                status.ttft_violations, status.tpot_violations = policy.violations
                status.escapes, status.saving = policy.escapes, policy.saving()
            return status

    @property
    def stretch(self) -> dict[int, float]:
        """Learned step times, as a start for the next run; see `ClockPolicy`."""
        with self._guard:
            return self._policy.stretch if self._policy is not None else {}

    def close(self) -> None:
        """Restores the clocks and ends the thread. Never raises."""
        if os.getpid() != self._pid or self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        atexit.unregister(self.close)
        self._thread.join(3 * TIMEOUT_S)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause_s, retry_s = RETRY_S[0], -math.inf
        while not self._ended.is_set():
            try:
                if self._refused is not None:
                    self._leave(f"another tenant uses a GPU: {self._refused}")
                elif not self._now.working:
                    if time.monotonic() >= retry_s:
                        self._begin()
                        pause_s = RETRY_S[0]
                else:
                    self._look()
            except Exception as error:  # noqa: BLE001 - a thread that nobody watches must not end in silence
                self._fail(error)
                retry_s = time.monotonic() + pause_s
                pause_s = min(RETRY_S[1], 2 * pause_s)
            self._wake.wait(TICK_S)
            self._wake.clear()
        self._leave("")

    def _begin(self) -> None:
        """Connects to zeusd and acquires the leases on the clocks of all GPUs.

        Raises:
            ZeusIpcError: This is not possible now.
        """
        if self._client is None:
            # Only this thread sends heartbeats: another one would continue while this one hangs.
            self._client = Client(self._path, timeout_s=TIMEOUT_S, heartbeat=False)
        client = self._client
        self._tenants.refuse_others(client)
        highest = math.inf
        if not self.dry_run:
            taken = client.acquire(self._gpus, [CONTROL], ttl_s=self._ttl_s)
            self._beat_s = time.monotonic()
            for back in taken.values():
                target = back[CONTROL].value
                if len(target) == 2:  # not unlocked: the site limits the clocks
                    highest = min(highest, target[1])
        if self._policy is None:
            self._offer(client, highest)
        elif not self.dry_run:
            client.reset(self._gpus, CONTROL)
        assert self._policy is not None
        with self._guard:
            self._now.set_mhz = self._policy.highest_mhz
            self._now.working = True
        if self._now.trouble:
            log.warning("clocks of the serving engine are set again")
        self._now.trouble = ""

    def _offer(self, client: Client, highest: float) -> None:
        clocks = [client.clocks(uuid) for uuid in self._gpus]
        common = set.intersection(*(set(one.gpu_mhz[str(max(one.memory_mhz))]) for one in clocks))
        self._lowest = min(common, default=0)
        usable = [mhz for mhz in common if mhz <= highest]
        if not usable:
            raise ZeusIpcError(
                "the GPUs of this instance have no common clock that may be set; choose GPUs of "
                "one kind, and clocks that `zeusctl show` lists"
            )
        ttft_s, tpot_s, floor_mhz = self._objectives
        stretch = self._stretch
        if self.dry_run and not stretch:
            stretch = {mhz: max(usable) / mhz for mhz in usable}
        policy = self._make(usable, ttft_s, tpot_s, floor_mhz, stretch)
        with self._guard:
            self._policy, self._now.wanted_mhz = policy, policy.highest_mhz

    def _look(self) -> None:
        """Asks the policy while idle, sets the clock that it wants, and keeps the lease."""
        policy, client, status = self._policy, self._client, self._now
        assert policy is not None
        assert client is not None
        now = time.monotonic()
        with self._guard:
            if now - self._stepped_s > IDLE_S:
                status.wanted_mhz = policy.idle(now)
            wanted, before = status.wanted_mhz, status.set_mhz
        if wanted != before:
            if not self.dry_run:
                if wanted == policy.highest_mhz:
                    client.reset(self._gpus, CONTROL, block=False)
                else:
                    client.set_gpu_clocks(self._gpus, self._lowest, wanted, block=False)
            with self._guard:
                status.set_mhz, self._set_s = wanted, now
                status.changes += 1
            level = logging.INFO if self.dry_run else logging.DEBUG
            verb = "would change" if self.dry_run else "change"
            log.log(level, "clocks %s from %d to %d MHz", verb, before, wanted)
        if now >= self._beat_s + self._ttl_s / 4:
            self._beat_s = now
            for uuid in () if self.dry_run else self._gpus:
                if not holds(client, uuid, CONTROL):
                    raise ZeusIpcError("this process lost its lease on the clocks; see zeusd's log")
            self._tenants.refuse_others(client)
            self._sample(client)
            self._report_energy(client, policy)

    def _sample(self, client: Client) -> None:
        states = [*client.state(self._gpus).values()]
        clocks = [state.gpu_clock_mhz for state in states]
        known = [mhz for mhz in clocks if mhz is not None]
        idle = any((state.throttle_reasons or 0) & IDLE_REASON for state in states)
        now = time.monotonic()
        powers = [(one.power_mw, one.power_limit_mw or math.inf) for one in states]
        watts = needed_w((drawn / 1000, limit / 1000) for drawn, limit in powers if drawn)
        sampled = float(min(known)) if len(known) == len(self._gpus) else math.nan
        with self._guard:
            self._needs.seen(now, self._now.wanted_mhz, watts)
            self._now.effective_mhz = sampled
            # An idle GPU lowers its clock by itself, which does not apply to its next step.
            serving = now - self._stepped_s < IDLE_S and now - self._serving_s > SETTLED_S
            capped = sampled < CAPPED * self._now.set_mhz and now > self._set_s + SETTLED_S
            self._cap = sampled if capped and serving and not idle else math.inf
        if not self.dry_run:
            self._needs.publish(client, now)

    def _report_energy(self, client: Client, policy: ClockPolicy) -> None:
        end_ns = time.monotonic_ns() - ENERGY_NS
        begin_ns = self._energy_ns
        if not self._energy or end_ns - begin_ns < ENERGY_NS:
            return
        self._energy_ns = end_ns
        if end_ns - begin_ns > 10 * ENERGY_NS:
            return  # the first one, or after a pause
        try:
            by_gpu = client.windows(self._gpus, [(begin_ns, end_ns, False)])
        except (NotSupported, SeveralGpusFailed) as error:
            self._energy = False
            log.info("the policy continues without the energy of the GPUs: %s", error.message)
            return
        parts = [one.energy_uj[0] for one in by_gpu.values()]
        joules = sum(part for part in parts if part is not None) / 1e6
        if None in parts:
            return
        with self._guard:
            policy.energy(begin_ns / 1e9, end_ns / 1e9, joules)

    def _effective(self) -> float:
        """The clock at which steps run, MHz, if known."""
        if self.dry_run or not self._now.working:
            policy = self._policy
            return float(policy.highest_mhz) if policy is not None else math.nan
        return min(self._cap, float(self._now.set_mhz))

    def _tell(self, handle: Callable[[ClockPolicy], object]) -> None:
        """Hands something to the policy; serving continues whatever comes of it."""
        policy = self._policy
        if policy is None or os.getpid() != self._pid:
            return
        try:
            with self._guard:
                handle(policy)
        except Exception:  # serving must continue
            log.debug("the clock policy failed", exc_info=True)

    def _fail(self, error: Exception) -> None:
        """Handles a failure: sets no clock until zeusd works again."""
        if isinstance(error, DeferredSetFailed):
            error = error.last
        message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        if isinstance(error, LeaseHeld):
            message = f"another process controls the clocks: {message}"
        known = bool(self._now.trouble)
        self._restore(message, None if isinstance(error, DaemonUnavailable) else self._client)
        if not known:
            log.warning(
                "the serving engine's clocks cannot be set; it continues at default clocks "
                "and tries again: %s",
                message,
            )

    def _leave(self, reason: str) -> None:
        """Restores the clocks, and closes the connection."""
        client, self._client = self._client, None
        self._restore(reason, client)
        if client is not None:
            client.close()
            if reason:
                log.warning("clocks are not controlled: %s", reason)

    def _restore(self, trouble: str, client: Client | None) -> None:
        """Releases the leases, if zeusd can be asked to: clocks that are set must not stay."""
        with self._guard:
            self._now.working, self._now.trouble = False, trouble
            if self._policy is not None:
                self._now.set_mhz = self._policy.highest_mhz
        if client is None or self.dry_run:
            return
        try:
            client.release(self._gpus, [CONTROL])
            self._needs.release(client)
        except ZeusIpcError as error:
            log.debug("clocks are restored when the lease ends: %s", error.message)
