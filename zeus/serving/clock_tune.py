"""Finds and reports the lowest static clock that meets the objectives, by load, under live load.

Walks down the clocks, one window at a time, separately in each bucket of load: two clocks are
compared only over windows of similar load. A clock that misses objectives is abandoned at once and
not tried again in its bucket. When the lowest clock that meets them is known, windows of the clock
policy alternate with it, so that the policy's benefit is measured under the same load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zeus.serving.clock_load import Queue, Step
from zeus.serving.clock_policy import ClockPolicy
from zeus.serving.rows import known
from zeus_common.text import percent
from zeus_common.text import table as columns
from zeus_ipc.overriding import override

POLICY = 0
"""The arm that stands for the clock policy instead of a static clock."""

ALLOWED = 0.005
"""Share of requests that may miss in addition to those at the highest clock."""

SURE = 3
"""Misses beyond the allowed ones that reject a clock early."""

RELIEF = 0.8
"""A queue that has used this share of TTFT is served at the highest clock. Its latencies count for
the clock at which it grew."""

STEP = math.sqrt(2.0)
"""Ratio of a bucket's highest to its lowest load."""

SETTLE_S = 1.0
"""Start of a window that still serves earlier requests."""

HEAD = (
    "tokens/s", "clock", "requests", "missed", "J/token", "saving", "TTFT p99", "TPOT p99", "",
)  # fmt: skip


@dataclass
class Arm:
    """Measurements at one clock, or with the policy, at one load."""

    requests: int = 0
    late: int = 0
    joules: float = 0.0
    tokens: float = 0.0
    failed: bool = False
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=4000))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=4000))

    def add(self, other: Arm) -> None:
        """One window."""
        for name in ("requests", "late", "joules", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ttft_s.extend(other.ttft_s)
        self.tpot_s.extend(other.tpot_s)


class TuneRow(NamedTuple):
    """One line of the report.

    Attributes:
        tokens_per_s: Lowest and highest load of the bucket, output tokens a second.
        clock_mhz: 0: the clock policy.
        requests: Requests that ended.
        late: Share of them that missed an objective.
        joules_per_token: Energy per output token; NaN: energy was not reported.
        saving: Saved share of J per token compared with the highest clock at this load; NaN as
            above.
        ttft_p99_s, tpot_p99_s: NaN: no request ended.
        best: Whether it is the lowest static clock that meets the objectives.
    """

    tokens_per_s: tuple[float, float]
    clock_mhz: int
    requests: int
    late: float
    joules_per_token: float
    saving: float
    ttft_p99_s: float
    tpot_p99_s: float
    best: bool


class Tuner(ClockPolicy):
    """A clock policy that holds one clock for a window and learns which clocks meet the objectives.

    Args:
        clocks_mhz: Clocks to choose from, MHz.
        ttft_s: Objective for each request's time to first token, s.
        tpot_s: Objective for each request's mean time per output token, s.
        floor_mhz: No clock below this one; None: it finds a floor by itself.
        stretch: Step times from earlier runs; see `ClockPolicy`.
        window_s: Length of a window, s.
        requests: Requests before a clock is judged.
        tell: Called with one line at the end of each window that counts.
    """

    def __init__(
        self,
        clocks_mhz: Iterable[int],
        ttft_s: float,
        tpot_s: float,
        floor_mhz: float | None = None,
        stretch: dict[int, float] | None = None,
        *,
        window_s: float = 20.0,
        requests: int = 200,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(clocks_mhz, ttft_s, tpot_s, floor_mhz, stretch)
        if not window_s > 2 * SETTLE_S or requests < 1:
            raise ValueError(
                f"a window must be longer than {2 * SETTLE_S:g} s, and judge at least one request"
            )
        self._window_s, self._needed, self._tell = window_s, requests, tell
        self._buckets: dict[int, dict[int, Arm]] = {}
        self._arm = self.highest_mhz
        self._window = Arm()
        self._began_s = -math.inf
        self._counted = self._tokens_reported = 0.0
        self._given_up = False
        self._relief = False

    # ------------------------------------------------------------------------------------- inputs

    @override
    def step(self, step: Step, queue: Queue) -> int:
        if 0 <= step.decode_sequences < 1e9:
            self._counted += step.decode_sequences
        self._relief = queue.oldest_wait_s > RELIEF * self._ttft.seconds
        return super().step(step, queue)

    @override
    def seen(self, ttft_s: float, tpot_s: float) -> None:
        super().seen(ttft_s, tpot_s)
        window = self._window
        if not self._settled() or not (0 <= ttft_s < 1e9 and 0 <= tpot_s < 1e9):
            return
        window.requests += 1
        window.late += ttft_s > self._ttft.seconds or tpot_s > self._tpot.seconds
        window.ttft_s.append(ttft_s)
        window.tpot_s.append(tpot_s)
        if self._arm not in (POLICY, self.highest_mhz):
            arms = self._buckets.get(self._bucket(), {})
            before = arms.get(self._arm)
            late, requests = window.late, window.requests
            if before is not None:
                late, requests = late + before.late, requests + before.requests
            if late >= SURE + self._most_late(arms) * max(self._needed, requests):
                self._give_up()

    @override
    def energy(self, begin_s: float, end_s: float, joules: float) -> None:
        super().energy(begin_s, end_s, joules)
        tokens, self._tokens_reported = self._counted - self._tokens_reported, self._counted
        if begin_s >= self._began_s + SETTLE_S and 0.0 < joules < 1e12 and not self._given_up:
            self._window.joules += joules
            self._window.tokens += tokens

    # ------------------------------------------------------------------------------------ outputs

    def done(self) -> bool:
        """Whether the lowest clock that meets the objectives is known at each load that occurred
        for long."""
        judged = [arms for arms in self._buckets.values() if self._judged(arms, self.highest_mhz)]
        return bool(judged) and all(self._next(arms) is None for arms in judged)

    def rows(self) -> Iterator[TuneRow]:
        """The report: by load, then by clock from the highest down, the policy last."""
        for bucket, arms in sorted(self._buckets.items()):
            top = arms.get(self.highest_mhz)
            reference = top.joules / top.tokens if top is not None and top.tokens else math.nan
            best = self._best(arms)
            for clock in [*self.clocks_mhz, POLICY]:
                arm = arms.get(clock)
                if arm is None or not arm.requests:
                    continue
                each = arm.joules / arm.tokens if arm.tokens and arm.joules else math.nan
                yield TuneRow(
                    (STEP**bucket, STEP ** (bucket + 1)),
                    clock,
                    arm.requests,
                    arm.late / arm.requests,
                    each,
                    1.0 - each / reference,
                    _p99(arm.ttft_s),
                    _p99(arm.tpot_s),
                    clock == best,
                )

    def profile(self) -> dict[str, Any]:
        """Result to store: the best clock by load, the report, and the learned step times."""
        return {
            "objectives": {"ttft_s": self._ttft.seconds, "tpot_s": self._tpot.seconds},
            "stretch": {str(mhz): value for mhz, value in self.stretch.items()},
            "loads": [
                {
                    "tokens_per_s": [STEP**bucket, STEP ** (bucket + 1)],
                    "clock_mhz": self._best(arms),
                    "complete": self._next(arms) is None,
                }
                for bucket, arms in sorted(self._buckets.items())
                if self._judged(arms, self.highest_mhz)
            ],
            "rows": [
                {name: known(value) for name, value in row._asdict().items()} for row in self.rows()
            ],
        }

    # ------------------------------------------------------------------------------------ internals

    @override
    def _choose(self, now: float) -> int:
        if self._steps < 100 or self._lost:
            self._begin(now, self.highest_mhz)
            return self._go(0, now)
        if not self._began_s <= now < self._began_s + self._window_s:
            self._end()
            arms = self._buckets.get(self._bucket(), {})
            following = self._next(arms)
            if following is None:  # all judged: alternate the best clock and the policy
                following = POLICY if self._arm != POLICY else self._best(arms)
            self._begin(now, following)
        if self._arm == POLICY:
            return super()._choose(now)
        if self._given_up or self._relief:
            return self._go(0, now)
        return self._go(self.clocks_mhz.index(self._arm), now)

    def _settled(self) -> bool:
        now = self._ended_s
        return now is not None and now >= self._began_s + SETTLE_S and not self._given_up

    def _begin(self, now: float, arm: int) -> None:
        self._arm, self._window, self._began_s = arm, Arm(), now
        self._given_up = False
        self._load_then = self._bucket()

    def _end(self) -> None:
        """Stores a window if its load was the same at its end."""
        bucket = self._bucket()
        if self._window.requests and not self._given_up and bucket == self._load_then:
            self._add(bucket)

    def _give_up(self) -> None:
        """Rejects this clock at this load."""
        if not self._given_up:
            self._given_up = True
            self._add(self._bucket(), failed=True)

    def _add(self, bucket: int, failed: bool = False) -> None:
        """Adds the window's measurements to its clock."""
        arms = self._buckets.setdefault(bucket, {})
        arm = arms.setdefault(self._arm, Arm())
        arm.add(self._window)
        arm.failed = arm.failed or failed
        following = self._next(arms)
        if failed:
            then = "it misses the objectives"
        elif following is None:
            then = f"{self._best(arms)} MHz is the lowest clock that holds"
        else:
            judged = sum(self._judged(arms, clock) for clock in self.clocks_mhz)
            then = f"{judged} of {len(self.clocks_mhz)} clocks are judged; next {following} MHz"
        at = "the clock policy" if self._arm == POLICY else f"{self._arm} MHz"
        self._tell(
            f"{STEP**bucket:.0f} to {STEP ** (bucket + 1):.0f} tokens/s at {at}: "
            f"{arm.requests} requests, {percent(arm.late / max(1, arm.requests))} late; {then}"
        )

    def _bucket(self) -> int:
        """The present load: the logarithm of output tokens per second."""
        return math.floor(math.log(max(1.0, self._load.slow_output_rate), STEP))

    def _judged(self, arms: dict[int, Arm], clock: int) -> bool:
        arm = arms.get(clock)
        return arm is not None and (arm.failed or arm.requests >= self._needed)

    def _most_late(self, arms: dict[int, Arm]) -> float:
        top = arms.get(self.highest_mhz)
        return ALLOWED + (top.late / top.requests if top is not None and top.requests else 0.0)

    def _holds(self, arms: dict[int, Arm], clock: int) -> bool:
        arm = arms[clock]
        # One more may be chance; a clock in use is judged again by all its requests.
        return not arm.failed and arm.late <= 1 + self._most_late(arms) * arm.requests

    def _next(self, arms: dict[int, Arm]) -> int | None:
        """The clock to try next at this load; None: the lowest one that meets the objectives is
        known."""
        for clock in self.clocks_mhz:
            if not self._judged(arms, clock):
                return clock
            if clock != self.highest_mhz and not self._holds(arms, clock):
                return None
        return None

    def _best(self, arms: dict[int, Arm]) -> int:
        best = self.highest_mhz
        for clock in self.clocks_mhz[1:]:
            if not self._judged(arms, clock) or not self._holds(arms, clock):
                break
            best = clock
        return best


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else math.nan


def table(rows: Sequence[TuneRow]) -> str:
    """The report as text."""
    cells = []
    for row in rows:
        low, high = row.tokens_per_s
        cells.append(
            (
                f"{low:.0f}-{high:.0f}",
                "policy" if row.clock_mhz == POLICY else f"{row.clock_mhz} MHz",
                row.requests,
                percent(row.late, ".2"),
                "-" if math.isnan(row.joules_per_token) else f"{row.joules_per_token:.3f}",
                "-" if math.isnan(row.saving) else percent(row.saving),
                f"{1e3 * row.ttft_p99_s:.0f} ms",
                f"{1e3 * row.tpot_p99_s:.1f} ms",
                "<- lowest that holds" if row.best else "",
            )
        )
    return columns(HEAD, cells, left=0, last_left=True)


def plot(rows: Sequence[TuneRow], path: Path, ttft_s: float, tpot_s: float) -> None:
    """Plots J per token, TTFT and TPOT by clock, with a line for each load; the policy is a dashed
    line.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from zeus.utils.lazy import needed

    figure = needed("matplotlib.figure", "a picture", "plot").Figure(
        figsize=(11, 3.6), layout="constrained"
    )
    panels = figure.subplots(1, 3)
    for panel, title, limit in zip(
        panels,
        ("J per output token", "TTFT p99, ms", "TPOT p99, ms"),
        (None, 1e3 * ttft_s, 1e3 * tpot_s),
        strict=True,
    ):
        panel.set_title(title)
        panel.set_xlabel("clock, MHz")
        if limit is not None:
            panel.axhline(limit, color="0.4", linestyle=":", linewidth=1)
    for number, load in enumerate(dict.fromkeys(row.tokens_per_s for row in rows)):
        color = f"C{number % 10}"
        own = [row for row in rows if row.tokens_per_s == load]
        for panel, scale, name in zip(
            panels, (1, 1e3, 1e3), ("joules_per_token", "ttft_p99_s", "tpot_p99_s"), strict=True
        ):
            clocks = [row for row in own if row.clock_mhz != POLICY]
            panel.plot(
                [row.clock_mhz for row in clocks],
                [scale * getattr(row, name) for row in clocks],
                marker="o",
                color=color,
                label=f"{load[0]:.0f}-{load[1]:.0f} tokens/s",
            )
            for row in own:
                if row.clock_mhz == POLICY:
                    panel.axhline(scale * getattr(row, name), color=color, linestyle="--")
    panels[0].legend(fontsize="small")
    figure.savefig(path)
