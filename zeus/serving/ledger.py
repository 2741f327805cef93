"""The energy of every request of an inference server, adding up to what the sensor measured.

    ledger = Ledger()
    ledger.step(begin_ns, end_ns, ["a", "b"], [True, False], [512, 1], [0, 830])
    ledger.update(begin_ns, end_ns, joules, clock_mhz=1980)
    ledger.finish("a", tenant="search")
    ledger.advance(now_ns)        # provisional figures of what has finished
    ledger.settle().rows          # final ones

A step's energy has several causes at once, so a request's part of it is attributed, not measured:
`uncertainty_j` says how far sensor and fit may be off, `rule_uncertainty_j` the rule. There is no
I/O here, no thread, and nothing of an engine. Needs NumPy: pip install "zeusd[serving]".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zeus.serving.columns import Floats, Ints, Steps, Updates, by_end
from zeus.serving.digest import Digest
from zeus.serving.fit import fit
from zeus.serving.foreign import Interval, find_foreign
from zeus.serving.prior import Prior, Weights
from zeus.serving.requests import Requests
from zeus.serving.rows import RequestEnergy, Settlement, Totals
from zeus.serving.settlement import predict, split
from zeus.serving.spread import METHODS

MOST_PENDING = 50_000
"""Steps, or updates, that are condensed without being asked to."""
MOST_UPDATES = 200_000
"""Updates after which a period is settled without being asked to: more than an hour's."""
LIVE_UPDATES = 6_000
"""Updates that a provisional fit looks at."""

DUMMY = "\x00dummy"
"""Name under which steps without a request are kept; they are part of the idle energy."""


class Ledger:
    """Attributes energy to requests.

    Not safe across threads. Memory is bounded: steps are condensed to a few rows per request, of
    at most a million rows; requests that never finish are given up, oldest first, beyond 200,000.

    Args:
        method: `regression`, `tokens` or `roofline`.
        prior: Weights of an earlier fit of the same GPU, engine and model, by clock in MHz
            (`weights`), which help until there are updates enough.

    Raises:
        ValueError: There is no such method.
    """

    def __init__(self, method: str = METHODS[0], *, prior: Weights | None = None) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
        self.method = method
        self._digest = Digest(method)
        self._requests = Requests()
        self._prior = Prior(prior or {})
        self._steps: list[tuple[int, int, Sequence[str], object, object, object]] = []
        self._costs: list[tuple[object, object]] = []
        self._updates: list[tuple[int, int, float, int, int, float]] = []
        self._finished: list[tuple[int, str, str]] = []
        self._end_ns = -(2**62)  # of the newest step
        self._foreign: list[Interval] = []
        self._early: list[Settlement] = []
        self.totals = Totals()
        """Of all settled periods."""

    # --------------------------------------------------------------------------------------- input

    def step(
        self,
        begin_ns: int,
        end_ns: int,
        ids: Sequence[str],
        prefill: Sequence[bool] | Floats,
        tokens: Sequence[float] | Floats,
        context: Sequence[float] | Floats,
        flops: Sequence[float] | Floats | None = None,
        bytes: Sequence[float] | Floats | None = None,
    ) -> None:
        """Takes a step of the engine. Steps come in the order of their ends.

        Args:
            begin_ns: When it began, on the clock of the updates.
            end_ns: When it ended.
            ids: Its requests; none: a dummy step, whose energy counts as idle.
            prefill: For each whether it is in its prefill.
            tokens: Computed in this step, whether or not they are accepted.
            context: Already in the KV cache when the step began.
            flops: Of each request in this step, for the method `roofline`.
            bytes: Read and written for each, for the method `roofline`.
        """
        if not len(ids):
            ids, prefill, tokens, context, flops, bytes = (DUMMY,), (False,), (1,), (0,), (0,), (0,)
        self._end_ns = max(self._end_ns, end_ns)
        self._steps.append((begin_ns, end_ns, ids, prefill, tokens, context))
        self._costs.append((flops, bytes))
        if len(self._steps) >= MOST_PENDING:
            self._flush_steps()

    def add_steps(self, steps: Steps, names: Sequence[str]) -> None:
        """Takes many steps at once.

        Args:
            steps: `request` holds positions in `names`; each step has at least one row.
            names: The requests.
        """
        self._flush_steps()
        if steps.count:
            self._end_ns = max(self._end_ns, int(steps.end_ns.max()))
        used, where = np.unique(steps.request, return_inverse=True)
        numbers = self._requests.numbers([names[number] for number in used.tolist()])
        self._digest.add(by_end(replace(steps, request=numbers[where])))

    def update(
        self,
        begin_ns: int,
        end_ns: int,
        joules: float,
        seen_begin_ns: int | None = None,
        seen_end_ns: int | None = None,
        clock_mhz: float = math.nan,
    ) -> None:
        """Takes an update of the sensor. They come in the order of time and do not overlap.

        Args:
            begin_ns: When it begins.
            end_ns: When it ends.
            joules: What it showed for all of this time.
            seen_begin_ns: When the sensor began to look; None: at the beginning.
            seen_end_ns: When it ceased to; None: at the end.
            clock_mhz: Effective clock of the GPU; NaN: unknown.

        Raises:
            ValueError: It ends before it begins.
        """
        if not begin_ns < end_ns:
            raise ValueError(
                f"an update must end after it begins, not at {end_ns} after {begin_ns}"
            )
        first = begin_ns if seen_begin_ns is None else seen_begin_ns
        last = end_ns if seen_end_ns is None else seen_end_ns
        self._updates.append((begin_ns, end_ns, joules, first, last, clock_mhz))
        if len(self._updates) >= MOST_PENDING:
            self._flush_updates()

    def add_updates(self, updates: Updates) -> None:
        """Takes many updates at once."""
        self._flush_updates()
        self._digest.add_updates(updates)

    def finish(self, request: str, tenant: str = "") -> None:
        """Marks a request as finished, completed or aborted."""
        self._finished.append((self._end_ns, request, tenant))

    def finish_all(self) -> None:
        """Marks all requests so far as finished: the engine that computed them is gone."""
        self._flush_steps()
        self._finished += [(self._end_ns, name, "") for name in self._requests.names()]

    def foreign(self, begin_ns: int, end_ns: int, reason: str) -> None:
        """Excludes a span from attribution, such as one in which another process used the GPU.

        Requests with a step in it are refused, and their energy is unattributed.
        """
        last = self._foreign[-1] if self._foreign else None
        if last is not None and last[2] == reason and last[0] <= begin_ns <= last[1]:
            begin_ns, end_ns = last[0], max(last[1], end_ns)
            self._foreign.pop()
        self._foreign.append((begin_ns, end_ns, reason))

    # -------------------------------------------------------------------------------------- output

    def advance(self, until_ns: int) -> list[RequestEnergy]:
        """Condenses what has come, and returns provisional figures.

        Args:
            until_ns: All steps and updates that ended before have been added.

        Returns:
            Requests that have finished and whose last step is covered, each once.
        """
        self._condense(until_ns)
        if len(self._digest) > MOST_UPDATES or self._requests.full:
            self._early.append(self._settle(final=False))
        wanted = self._requests.newly_done()
        if not wanted:
            return []
        return self._provisional(np.array(wanted))

    def settle(self, until_ns: int | None = None) -> Settlement:
        """Closes a period: fits once more and scales to what was measured.

        Args:
            until_ns: The period ends here, and all steps and updates that ended before have been
                added; None: nothing more comes.

        Returns:
            Requests that have finished, in the order of their first step; when nothing more comes,
            all.
        """
        self._condense(until_ns)
        settled = [*self._early, self._settle(final=until_ns is None)]
        self._early = []
        if len(settled) == 1:
            return settled[0]
        totals = Totals()
        for one in settled:
            totals.add(one.totals)
        return Settlement([row for one in settled for row in one.rows], totals, settled[-1].fit)

    @property
    def open_requests(self) -> int:
        """How many requests are known that have not been returned by `settle`."""
        return len(self._requests)

    @property
    def weights(self) -> Weights:
        """Weights of the newest fit at each clock, to begin the next ledger with."""
        return self._prior.weights

    # -------------------------------------------------------------------------------- internals

    def _condense(self, until_ns: int | None) -> None:
        self._flush_steps()
        self._flush_updates()
        done = self._digest.advance(until_ns)
        if done is not None:
            self._requests.saw(done)
        next_ns, later = self._digest.next_ns, []
        for end_ns, request, tenant in self._finished:
            if end_ns < next_ns:
                self._requests.finish(request, tenant)
            else:  # its last step is not condensed yet
                later.append((end_ns, request, tenant))
        self._finished = later

    def _flush_steps(self) -> None:
        if not self._steps:
            return
        begins, ends, ids, prefill, tokens, context = zip(*self._steps, strict=True)
        counts = [len(one) for one in ids]
        numbers = self._requests.numbers([name for one in ids for name in one])
        flops, moved = None, None
        if all(a is not None and b is not None for a, b in self._costs):
            flops = np.concatenate([np.asarray(a, np.float64) for a, _ in self._costs])
            moved = np.concatenate([np.asarray(b, np.float64) for _, b in self._costs])
        self._steps, self._costs = [], []
        steps = Steps(
            np.array(begins, np.int64),
            np.array(ends, np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            numbers,
            np.concatenate([np.asarray(one, bool) for one in prefill]),
            np.concatenate([np.asarray(one, np.float64) for one in tokens]),
            np.concatenate([np.asarray(one, np.float64) for one in context]),
            flops,
            moved,
        )
        self._digest.add(by_end(steps))

    def _flush_updates(self) -> None:
        if not self._updates:
            return
        begin, end, joules, first, last, clock = zip(*self._updates, strict=True)
        self._updates = []
        self._digest.add_updates(
            Updates(
                np.array(begin, np.int64),
                np.array(end, np.int64),
                np.array(joules, np.float64),
                np.array(first, np.int64),
                np.array(last, np.int64),
                np.array(clock, np.float64),
            )
        )

    def _provisional(self, wanted: Ints) -> list[RequestEnergy]:
        what = self._digest.recent(wanted, LIVE_UPDATES)
        fitted = None
        if self.method == METHODS[0]:
            fitted = fit(what.observed, what.levels, self._prior.of(what))
            if fitted.refusal:
                return self._requests.rows_of(wanted, None, self.method, fitted.refusal)
        found = predict(what, fitted, self.method)
        return self._requests.rows_of(wanted, found, self.method, "")

    def _settle(self, *, final: bool) -> Settlement:
        what = self._digest.condensed()
        fitted = None
        if self.method == METHODS[0]:
            fitted = fit(what.observed, what.levels, self._prior.of(what))
            if not fitted.refusal:
                self._prior.learn(what, fitted)
        found = split(what, fitted, self.method)
        foreign = [*self._foreign, *find_foreign(what)]
        totals = self._requests.charge(found, foreign, DUMMY)
        rows = self._requests.take(self.method, DUMMY, final=final)
        self._foreign = []
        self._digest.restart()
        self.totals.add(totals)
        return Settlement(rows, totals, fitted)
