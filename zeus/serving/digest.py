"""Condenses steps and updates, as they arrive, to the data that a fit and a bill need.

Each update is reduced to one row: the features of the steps in the part that the sensor measured.
Each request is reduced to its share of the features, summed over blocks of half a second: a few
rows for any number of steps. So one fit can settle an hour without the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeus.serving.columns import Floats, Ints, StepColumns, Updates, clipped, joined, joined_updates
from zeus.serving.features import NAMES, shares
from zeus.serving.fit import IDLE, Observed
from zeus.serving.rows import METHODS
from zeus.serving.spread import Spread, row_shares

BLOCK_S = 0.5
"""Length of a block; doubled when there are too many rows."""
MOST_ROWS = 1_000_000
"""Most rows of requests and blocks that are kept."""
MOST_PARTS = 256
"""Most parts of rows that are kept before they are joined."""
CHUNK_ROWS = 100_000
"""Rows of steps that are processed at a time."""
LEVEL_WIDTH = 0.03
"""Clocks with a smaller difference form one level."""
MOST_LEVELS = 24
KEPT_NS = 300 * 10**9
"""Longest possible step; older updates do not matter for new steps."""

_WIDTH = len(NAMES)


@dataclass
class Condensed:
    """A period's rows of requests and of updates.

    Attributes:
        request, block, level: Keys of the rows of requests.
        features: Each row's share of the features, in the time that updates cover; rows x features.
            For the method `tokens`: J of prefill and of decode.
        block_s: Length of a block; block `n` starts at `n * block_s` s of the steps' clock.
        observed: The updates, for the fit.
        joules: Energy of each update.
        idle_s: Seconds of each update without a step.
        idle_j: Energy of this time, J; zeros with the method `regression`, which fits it.
        update_begin_ns, update_end_ns: Start and end of each update.
        levels: Number of clock levels.
        clocks_mhz: Clock of each level; NaN: unknown.
    """

    request: Ints
    block: Ints
    level: Ints
    features: Floats
    block_s: float
    observed: Observed
    joules: Floats
    idle_s: Floats
    idle_j: Floats
    update_begin_ns: Ints
    update_end_ns: Ints
    levels: int
    clocks_mhz: list[float]

    @property
    def center_s(self) -> Floats:
        """Middle of each row's block."""
        found: Floats = self.block.astype(np.float64) * self.block_s + 0.5 * self.block_s
        return found


class Digest:
    """Collects steps and updates in the order of their ends; see the module."""

    def __init__(self, method: str = METHODS[0]) -> None:
        self._spread = None if method == METHODS[0] else Spread()
        self._width = _WIDTH if self._spread is None else 2
        self._steps: list[StepColumns] = []
        self._updates: list[Updates] = []
        self._cover: tuple[Ints, Ints] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._clocks: list[float] = []
        self._level = 0
        self._level_at: tuple[Ints, Ints] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._block_s = BLOCK_S
        self._rows: list[tuple[Ints, Ints, Ints, Floats]] = []
        self._count = 0
        self._seen: list[tuple[NDArray[Any], ...]] = []

    def __len__(self) -> int:
        """Number of updates in this period."""
        return sum(part[0].size for part in self._seen)

    def add(self, steps: StepColumns) -> None:
        """Adds steps that ended after all earlier ones."""
        if steps.count:
            self._steps.append(steps)

    def add_updates(self, updates: Updates) -> None:
        """Adds updates that start after the end of all earlier ones."""
        if updates.count:
            self._updates.append(updates)

    def advance(self, until_ns: int | None = None) -> StepColumns | None:
        """Condenses complete data.

        Returns:
            The condensed steps; None if there are none.
        """
        steps = clipped(joined(self._steps)) if self._steps else None
        updates = joined_updates(self._updates) if self._updates else None
        if until_ns is not None:
            ready = 0
            if updates is not None:
                ready = int(np.searchsorted(updates.end_ns, until_ns, side="right"))
            if updates is not None:
                later = updates.part(ready, updates.count)
                self._updates = [later] if later.count else []
                updates = updates.part(0, ready) if ready else None
        else:
            self._updates = []
        if updates is not None:
            self._see(steps, updates)
        if steps is None:
            self._cover = _recent(*self._cover)
            self._level_at = _recent(*self._level_at)
            return None
        done = steps.count
        if until_ns is not None:
            # Do not wait indefinitely for steps without an update.
            seen_ns = until_ns - KEPT_NS
            if updates is not None:
                seen_ns = max(seen_ns, int(updates.end_ns[-1]))
            done = int(np.searchsorted(steps.end_ns, seen_ns, side="right"))
        rest = steps.part(done, steps.count)
        self._steps = [rest] if rest.count else []
        finished = steps.part(0, done)
        self._charge(finished)
        self._cover = _recent(*self._cover)
        self._level_at = _recent(*self._level_at)
        return finished if finished.count else None

    @property
    def next_ns(self) -> float:
        """End of the first step that is not condensed; infinity: there is none."""
        return int(self._steps[0].end_ns[0]) if self._steps else math.inf

    def condensed(self) -> Condensed:
        """The rows so far."""
        self._compact()
        return self._made(self._rows, self._seen)

    def recent(self, requests: Ints, updates: int) -> Condensed:
        """The rows of some requests, and about this number of newest updates; fast."""
        rows = []
        for part in self._rows:
            some = np.isin(part[0], requests)
            if some.any():
                rows.append((part[0][some], part[1][some], part[2][some], part[3][some]))
        first, count = len(self._seen), 0
        while first > 0 and count < updates:
            first -= 1
            count += self._seen[first][0].size
        return self._made(rows, self._seen[first:])

    def restart(self) -> None:
        """Starts another period."""
        self._rows, self._count, self._seen = [], 0, []
        self._block_s = BLOCK_S

    # ------------------------------------------------------------------------------- internals

    def _made(
        self,
        rows: list[tuple[Ints, Ints, Ints, Floats]],
        updates: list[tuple[NDArray[Any], ...]],
    ) -> Condensed:
        none, zero = np.zeros(0, np.int64), np.zeros(0)
        rows = rows or [(none, none, none, np.zeros((0, self._width)))]
        request, block, level, features = (np.concatenate(part) for part in zip(*rows, strict=True))
        updates = updates or [(zero, np.zeros((0, _WIDTH + 1)), *[zero] * 7)]
        seen_j, seen, center, levels, joules, idle_s, idle_j, begin, end = (
            np.concatenate(part) for part in zip(*updates, strict=True)
        )
        observed = Observed(seen_j, seen, center, seen[:, 0] > 0, levels.astype(np.int64))
        return Condensed(
            request,
            block,
            level,
            features,
            self._block_s,
            observed,
            joules,
            idle_s,
            idle_j,
            begin.astype(np.int64),
            end.astype(np.int64),
            max(1, len(self._clocks)),
            list(self._clocks),
        )

    def _see(self, steps: StepColumns | None, updates: Updates) -> None:
        level = self._levels(updates)
        self._level_at = _appended(*self._level_at, updates.begin_ns, level)
        length = updates.end_ns - updates.begin_ns
        edges, covered = self._cover
        base = int(covered[-1]) if covered.size else 0
        ends = base + np.cumsum(length)
        self._cover = _appended(
            edges,
            covered,
            np.stack([updates.begin_ns, updates.end_ns], axis=1).ravel(),
            np.stack([ends - length, ends], axis=1).ravel(),
        )
        count = updates.count
        seen = np.zeros((count, _WIDTH + 1))
        whole_s: Floats = np.zeros(count)
        if steps is not None:
            if self._spread is None:
                sums = _step_sums(steps)
                seen[:, :IDLE] = _between(steps, sums, updates.seen_begin_ns, updates.seen_end_ns)
            length_s = ((steps.end_ns - steps.begin_ns) / 1e9)[:, None]
            seen_s = _between(steps, length_s, updates.seen_begin_ns, updates.seen_end_ns)
            seen[:, IDLE] = seen_s[:, 0]
            whole_s = _between(steps, length_s, updates.begin_ns, updates.end_ns)[:, 0]
        seen_s = (updates.seen_end_ns - updates.seen_begin_ns) / 1e9
        seen[:, IDLE] = np.maximum(seen_s - seen[:, IDLE], 0.0)
        idle_s = np.maximum(updates.length_s - whole_s, 0.0)
        idle_j = np.zeros(count) if self._spread is None else self._spread.see(updates, idle_s)
        seen_j = updates.joules * seen_s / updates.length_s
        center_s = (updates.seen_begin_ns + updates.seen_end_ns) / 2e9
        self._seen.append(
            (
                seen_j,
                seen,
                center_s,
                level.astype(np.float64),
                updates.joules,
                idle_s,
                idle_j,
                updates.begin_ns,
                updates.end_ns,
            )
        )

    def _charge(self, steps: StepColumns) -> None:
        if not steps.count:
            return
        edges, covered = self._cover
        length = np.maximum(steps.end_ns - steps.begin_ns, 1)
        if edges.size:
            inside = np.interp(steps.end_ns, edges, covered)
            inside = inside - np.interp(steps.begin_ns, edges, covered)
            share = np.clip(inside / length, 0.0, 1.0)
        else:
            share = np.zeros(steps.count)
        if self._spread is not None:
            self._split(steps, self._spread.steps(length / 1e9 * share))
            return
        begins, levels = self._level_at
        level: Ints = np.zeros(steps.count, np.int64)
        if begins.size:
            place = np.searchsorted(begins, steps.end_ns, side="left") - 1
            level = levels[np.clip(place, 0, None)]
        middle_s = (steps.begin_ns + steps.end_ns) / 2e9
        block = np.floor(middle_s / self._block_s).astype(np.int64)
        for begin, end in _chunks(steps):
            part = steps.part(begin, end)
            step = part.step_of_row + begin
            features = shares(part) * share[step][:, None]
            self._keep(part.request, block[step], level[step], features)

    def _split(self, steps: StepColumns, joules: Floats) -> None:
        step = steps.step_of_row
        row_j = row_shares(steps) * joules[step]
        split = np.stack([row_j * steps.prefill, row_j * ~steps.prefill], axis=1)
        none = np.zeros(step.size, np.int64)
        self._keep(steps.request, none, none, split)

    def _keep(self, request: Ints, block: Ints, level: Ints, features: Floats) -> None:
        added = _summed(request, block, level, features)
        self._rows.append(added)
        self._count += added[0].size
        if len(self._rows) > MOST_PARTS:
            self._compact()
        if self._count > MOST_ROWS:
            self._compact()
            while self._count > MOST_ROWS // 2 and self._block_s < 3600:
                self._block_s *= 2
                one, coarse, lvl, values = self._rows[0]
                self._rows = [(one, coarse >> 1, lvl, values)]
                self._compact(force=True)

    def _compact(self, *, force: bool = False) -> None:
        if len(self._rows) > 1 or (force and self._rows):
            request, block, level, features = (
                np.concatenate(part) for part in zip(*self._rows, strict=True)
            )
            self._rows = [_summed(request, block, level, features)]
            self._count = int(self._rows[0][0].size)

    def _levels(self, updates: Updates) -> Ints:
        found = np.zeros(updates.count, np.int64)
        known: dict[float, int] = {}
        for n, mhz in enumerate(updates.clock_mhz.tolist()):
            if not math.isnan(mhz) and mhz > 0:
                if mhz not in known:
                    known[mhz] = self._level_of(mhz)
                self._level = known[mhz]
            found[n] = self._level
        return found

    def _level_of(self, mhz: float) -> int:
        near = min(range(len(self._clocks)), key=lambda n: abs(self._clocks[n] - mhz), default=None)
        if near is not None and (
            abs(self._clocks[near] / mhz - 1) < LEVEL_WIDTH or len(self._clocks) >= MOST_LEVELS
        ):
            return near
        self._clocks.append(mhz)
        return len(self._clocks) - 1


def _appended(old_at: Ints, old: Ints, new_at: Ints, new: Ints) -> tuple[Ints, Ints]:
    return np.concatenate([old_at, new_at]), np.concatenate([old, new])


def _recent(at: Ints, values: Ints) -> tuple[Ints, Ints]:
    first = int(np.searchsorted(at, at[-1] - KEPT_NS)) if at.size else 0
    return at[first:], values[first:]


def _chunks(steps: StepColumns) -> list[tuple[int, int]]:
    found, begin = [], 0
    while begin < steps.count:
        end = int(np.searchsorted(steps.first_row, steps.first_row[begin] + CHUNK_ROWS, "right"))
        end = min(max(end - 1, begin + 1), steps.count)
        found.append((begin, end))
        begin = end
    return found


def _step_sums(steps: StepColumns) -> Floats:
    """Features of whole steps, steps x features."""
    found = np.zeros((steps.count, _WIDTH))
    for begin, end in _chunks(steps):
        part = steps.part(begin, end)
        found[begin:end] = _by_step(shares(part), part)
    return found


def _by_step(rows: Floats, steps: StepColumns) -> Floats:
    return np.add.reduceat(rows, steps.first_row[:-1], axis=0)


def _between(steps: StepColumns, sums: Floats, begin_ns: Ints, end_ns: Ints) -> Floats:
    """Sums over the steps between instants; a step counts by the share of its time in between."""
    base = int(steps.begin_ns[0])
    knots = (np.stack([steps.begin_ns, steps.end_ns], axis=1).ravel() - base).astype(np.float64)
    total = np.concatenate([np.zeros((1, sums.shape[1])), np.cumsum(sums, axis=0)])
    total = np.repeat(total, 2, axis=0)[1:-1]
    found = np.empty((begin_ns.size, sums.shape[1]))
    for column in range(sums.shape[1]):
        at_end = np.interp(end_ns - base, knots, total[:, column])
        found[:, column] = at_end - np.interp(begin_ns - base, knots, total[:, column])
    return found


def _summed(
    request: Ints, block: Ints, level: Ints, features: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    """One row for each request, block and level."""
    order = np.lexsort((level, block, request))
    request, block, level = request[order], block[order], level[order]
    fresh = np.flatnonzero(
        np.concatenate(
            [[True], (np.diff(request) != 0) | (np.diff(block) != 0) | (np.diff(level) != 0)]
        )
    )
    summed = np.add.reduceat(features[order], fresh, axis=0)
    return request[fresh], block[fresh], level[fresh], summed


LEAST_UPDATES = 5
"""Number of updates in a row, ignoring those with steps, that must show it."""
SHARE = 0.25
"""Threshold, as a share of the difference between idle and busy power."""

Interval = tuple[int, int, str]
"""Start and end, ns, and the reason."""


def find_foreign(what: Condensed) -> list[Interval]:
    """Intervals in which another process used the GPU: power above idle in time without a step.

    A process that only runs during steps is not found. zeusd knows which jobs hold the GPU, and the
    caller can report them (`Ledger.foreign`).
    """
    length_s = (what.update_end_ns - what.update_begin_ns) / 1e9
    empty = what.idle_s > 0.999 * length_s
    busy = np.flatnonzero(~empty)
    if busy.size == 0:
        return []
    # An update may lag behind slightly, so one next to a step is not trusted.
    trusted = empty.copy()
    trusted[1:] &= empty[:-1]
    trusted[:-1] &= empty[1:]
    trusted[: busy[0]] = False  # start-up: loading weights, capturing graphs
    where = np.flatnonzero(trusted)
    if where.size < 2 * LEAST_UPDATES:
        return []
    power = what.joules[where] / length_s[where]
    idle_w = float(np.quantile(power, 0.2))
    busy_w = float((what.joules[~empty] / length_s[~empty]).mean())
    limit_w = idle_w + SHARE * max(busy_w - idle_w, 0.2 * idle_w)
    above = power > limit_w
    found: list[Interval] = []
    begin = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < LEAST_UPDATES:
            continue
        # From the last normal idle update to the next one.
        first = where[begin - 1] + 1 if begin else 0
        last = where[end] - 1 if end < where.size else what.idle_s.size - 1
        found.append(
            (
                int(what.update_begin_ns[first]),
                int(what.update_end_ns[last]),
                f"another process used the GPU: {power[begin:end].mean():.0f} W without a step, "
                f"{idle_w:.0f} W is idle",
            )
        )
    return found
