"""Condenses steps and updates, as they arrive, to the data that a fit and a bill need.

Each update is reduced to one row: the features of the steps in the part that the sensor measured.
Each request is reduced to its share of the features, summed over blocks of half a second: a few
rows for any number of steps. So one fit can settle an hour without the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from zeus.serving.columns import (
    Columns,
    Floats,
    Ints,
    Seen,
    StepColumns,
    Updates,
    clipped,
    joined,
)
from zeus.serving.features import NAMES, shares
from zeus.serving.fit import LEVEL_WIDTH

BLOCK_S = 0.5
"""Length of a block; doubled when there are too many rows."""
MOST_ROWS = 1_000_000
"""Most rows of requests and blocks that are kept."""
MOST_PARTS = 256
"""Most parts of rows that are kept before they are joined."""
CHUNK_ROWS = 100_000
"""Rows of steps that are processed at a time."""
MOST_LEVELS = 24
KEPT_NS = 300 * 10**9
"""Longest possible step; older updates do not matter for new steps."""


@dataclass(frozen=True)
class RequestShares(Columns):
    """Requests' shares of the features, in the time that updates cover.

    Attributes:
        request, block, level: What a row is for. Block `n` starts at `n` block lengths of the
            steps' clock.
        features: Rows x features.
    """

    request: Ints
    block: Ints
    level: Ints
    features: Floats


@dataclass(frozen=True)
class Condensed:
    """A period's rows of requests and of updates.

    Attributes:
        block_s: Length of a block.
        clocks_mhz: Clock of each level, MHz; 0: unknown.
    """

    rows: RequestShares
    seen: Seen
    block_s: float
    clocks_mhz: list[float]


class Digest:
    """Collects steps and updates in the order of their ends; see the module."""

    def __init__(self) -> None:
        self.steps: list[StepColumns] = []
        """Those that are not condensed yet."""
        self._updates: list[Updates] = []
        none = np.zeros(0, np.int64)
        # Of recent updates: starts and ends, ns, each with the time that updates cover until
        # there; and starts, each with the clock level.
        self._covered, self._levels = (none, none), (none, none)
        self._clocks: list[float] = []
        self._level = 0
        self._block_s = BLOCK_S
        self._rows: list[RequestShares] = []
        self.count = 0
        """Rows that are kept."""
        self._seen: list[Seen] = []
        self.idle_j = 0.0
        """Energy of updates without a step in this period."""

    def add(self, steps: StepColumns) -> None:
        """Adds steps that ended after all earlier ones."""
        if steps.count:
            self.steps.append(steps)

    def add_updates(self, updates: Updates) -> None:
        """Adds updates that start after the end of all earlier ones."""
        if updates.count:
            self._updates.append(updates)

    def advance(self, until_ns: int | None = None) -> StepColumns | None:
        """Condenses complete data.

        Args:
            until_ns: All steps and updates that ended before this time have arrived; None: all
                have.

        Returns:
            The condensed steps; None if there are none.
        """
        steps = clipped(joined(self.steps)) if self.steps else None
        known_ns = math.inf if until_ns is None else float(until_ns) - KEPT_NS
        if self._updates:
            updates = Updates.joined(self._updates)
            ready = updates.count
            if until_ns is not None:
                ready = int(np.searchsorted(updates.end_ns, until_ns, side="right"))
            self._updates = [updates.where(slice(ready, None))] if ready < updates.count else []
            if ready:
                self._see(steps, updates.where(slice(ready)))
                known_ns = max(known_ns, float(updates.end_ns[ready - 1]))
        finished = None
        if steps is not None:
            # Steps without an update do not wait forever.
            done = int(np.searchsorted(steps.end_ns, known_ns, side="right"))
            self.steps = [steps.part(done, steps.count)] if done < steps.count else []
            if done:
                finished = steps.part(0, done)
                self._charge(finished)
        self._covered, self._levels = _recent(*self._covered), _recent(*self._levels)
        return finished

    @property
    def next_ns(self) -> float:
        """End of the first step that is not condensed; infinity: there is none."""
        return int(self.steps[0].end_ns[0]) if self.steps else math.inf

    def condensed(self) -> Condensed:
        """The rows so far."""
        self._compact()
        return self._made(self._rows, self._seen)

    def recent(self, requests: Ints, updates: int) -> Condensed:
        """The rows of some requests, and about this number of newest updates; fast."""
        rows = [part.where(np.isin(part.request, requests)) for part in self._rows]
        first, count = len(self._seen), 0
        while first > 0 and count < updates:
            first -= 1
            count += self._seen[first].count
        return self._made(rows, self._seen[first:])

    def restart(self) -> None:
        """Starts another period."""
        self._rows, self.count, self._seen = [], 0, []
        self._block_s, self.idle_j = BLOCK_S, 0.0

    # ------------------------------------------------------------------------------- internals

    def _made(self, rows: list[RequestShares], seen: list[Seen]) -> Condensed:
        none, zero = np.zeros(0, np.int64), np.zeros(0)
        return Condensed(
            RequestShares.joined(
                rows or [RequestShares(none, none, none, np.zeros((0, len(NAMES))))]
            ),
            Seen.joined(
                seen
                or [Seen(zero, np.zeros((0, len(NAMES) + 1)), zero, none, zero, zero, none, none)]
            ),
            self._block_s,
            list(self._clocks) or [0.0],
        )

    def _see(self, steps: StepColumns | None, updates: Updates) -> None:
        level = self._levels_of(updates)
        self._levels = _appended(self._levels, updates.begin_ns, level)
        length = updates.end_ns - updates.begin_ns
        edges, covered = self._covered
        ends = (int(covered[-1]) if covered.size else 0) + np.cumsum(length)
        self._covered = _appended(
            (edges, covered),
            np.stack([updates.begin_ns, updates.end_ns], axis=1).ravel(),
            np.stack([ends - length, ends], axis=1).ravel(),
        )
        part_ns = updates.seen_begin_ns, updates.seen_end_ns
        seen_s = (part_ns[1] - part_ns[0]) / 1e9
        features = np.zeros((updates.count, len(NAMES) + 1))
        features[:, -1] = seen_s
        idle_s = updates.length_s
        if steps is not None:
            for column, sums in enumerate(_step_sums(steps).T):
                features[:, column] = steps.between(sums, *part_ns)
            features[:, -1] -= steps.between(steps.length_s, *part_ns)
            idle_s = idle_s - steps.between(steps.length_s, updates.begin_ns, updates.end_ns)
        features[:, -1] = np.maximum(features[:, -1], 0.0)
        seen = Seen(
            updates.joules * seen_s / updates.length_s,
            features,
            (part_ns[0] + part_ns[1]) / 2e9,
            level,
            updates.joules,
            np.maximum(idle_s, 0.0),
            updates.begin_ns,
            updates.end_ns,
        )
        self._seen.append(seen)
        self.idle_j += float(seen.whole_j[seen.empty].sum())

    def _charge(self, steps: StepColumns) -> None:
        share: Floats = np.zeros(steps.count)
        level: Ints = np.zeros(steps.count, np.int64)
        edges, covered = self._covered
        begins, levels = self._levels
        if edges.size:
            inside = np.interp(steps.end_ns, edges, covered)
            inside = inside - np.interp(steps.begin_ns, edges, covered)
            share = np.clip(inside / np.maximum(steps.end_ns - steps.begin_ns, 1), 0.0, 1.0)
            place = np.searchsorted(begins, steps.end_ns, side="left") - 1
            level = levels[np.clip(place, 0, None)]
        middle_s = (steps.begin_ns + steps.end_ns) / 2e9
        block = np.floor(middle_s / self._block_s).astype(np.int64)
        for begin, end in _chunks(steps):
            part = steps.part(begin, end)
            step = part.step_of_row + begin
            features = shares(part) * share[step][:, None]
            self._keep(RequestShares(part.request, block[step], level[step], features))

    def _keep(self, rows: RequestShares) -> None:
        added = _summed(rows)
        self._rows.append(added)
        self.count += added.count
        if len(self._rows) > MOST_PARTS or self.count > MOST_ROWS:
            self._compact()
        if self.count > MOST_ROWS:
            while self.count > MOST_ROWS // 2 and self._block_s < 3600:
                self._block_s *= 2
                self._rows = [_summed(replace(one, block=one.block >> 1)) for one in self._rows]
                self.count = self._rows[0].count

    def _compact(self) -> None:
        if len(self._rows) > 1:
            self._rows = [_summed(RequestShares.joined(self._rows))]
            self.count = self._rows[0].count

    def _levels_of(self, updates: Updates) -> Ints:
        levels = np.zeros(updates.count, np.int64)
        known: dict[float, int] = {}
        for n, mhz in enumerate(updates.clock_mhz.tolist()):
            if not math.isnan(mhz) and mhz > 0:
                if mhz not in known:
                    known[mhz] = self._level_of(mhz)
                self._level = known[mhz]
            levels[n] = self._level
        return levels

    def _level_of(self, mhz: float) -> int:
        near = min(range(len(self._clocks)), key=lambda n: abs(self._clocks[n] - mhz), default=None)
        if near is not None and (
            abs(self._clocks[near] / mhz - 1) < LEVEL_WIDTH or len(self._clocks) >= MOST_LEVELS
        ):
            return near
        self._clocks.append(mhz)
        return len(self._clocks) - 1


def _appended(old: tuple[Ints, Ints], at: Ints, values: Ints) -> tuple[Ints, Ints]:
    return np.concatenate([old[0], at]), np.concatenate([old[1], values])


def _recent(at: Ints, values: Ints) -> tuple[Ints, Ints]:
    first = int(np.searchsorted(at, at[-1] - KEPT_NS)) if at.size else 0
    return at[first:], values[first:]


def _chunks(steps: StepColumns) -> list[tuple[int, int]]:
    chunks, begin = [], 0
    while begin < steps.count:
        end = int(np.searchsorted(steps.first_row, steps.first_row[begin] + CHUNK_ROWS, "right"))
        end = min(max(end - 1, begin + 1), steps.count)
        chunks.append((begin, end))
        begin = end
    return chunks


def _step_sums(steps: StepColumns) -> Floats:
    """Features of whole steps, steps x features."""
    sums = np.zeros((steps.count, len(NAMES)))
    for begin, end in _chunks(steps):
        part = steps.part(begin, end)
        sums[begin:end] = np.add.reduceat(shares(part), part.first_row[:-1], axis=0)
    return sums


def _summed(rows: RequestShares) -> RequestShares:
    """One row for each request, block and level."""
    rows = rows.where(np.lexsort((rows.level, rows.block, rows.request)))
    changes = [np.diff(key) != 0 for key in (rows.request, rows.block, rows.level)]
    fresh = np.flatnonzero(np.concatenate([[True], changes[0] | changes[1] | changes[2]]))
    summed = np.add.reduceat(rows.features, fresh, axis=0)
    return RequestShares(rows.request[fresh], rows.block[fresh], rows.level[fresh], summed)
