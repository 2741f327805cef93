"""The energy of every request of an inference server, adding up to what the sensor measured.

    ledger = Ledger()
    ledger.step(begin_ns, end_ns, ["a", "b"], [True, False], [512, 1], [0, 830])
    ledger.update(begin_ns, end_ns, joules, clock_mhz=1980)
    ledger.finish("a", tenant="search")
    ledger.advance(now_ns)  # provisional figures of finished requests
    ledger.settle().rows    # final ones

A step's energy has several causes at once, so a request's part of it is attributed, not measured:
`uncertainty_j` is the error of sensor and fit, `rule_uncertainty_j` that of the rule. This module
has no I/O and no thread, and does not depend on an engine. Needs NumPy: pip install
"zeusd[serving]".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zeus.serving.columns import Floats, Ints, StepColumns, Updates, by_end
from zeus.serving.digest import Digest, Interval, find_foreign
from zeus.serving.fit import fit
from zeus.serving.prior import WeightPrior, Weights
from zeus.serving.requests import Requests
from zeus.serving.rows import METHODS, RequestEnergy, Settlement, Totals
from zeus.serving.settlement import predict, split

MOST_PENDING = 50_000
"""Number of steps, or updates, that are condensed automatically."""
MOST_UPDATES = 200_000
"""Updates after which a period is settled automatically: more than an hour's."""
LIVE_UPDATES = 6_000
"""Updates that a provisional fit uses."""

DUMMY = "\x00dummy"
"""Name of steps without a request, which are part of the idle energy."""


class Ledger:
    """Attributes energy to requests.

    Not safe across threads. Memory is bounded: steps are condensed to a few rows per request, with
    at most a million rows in total; beyond 200,000 unfinished requests, the oldest are dropped.

    Args:
        method: `regression` or `tokens`.
        prior: Weights of an earlier fit of the same GPU, engine and model, by clock in MHz
            (`weights`), which help until there are enough updates.

    Raises:
        ValueError: The method does not exist.
    """

    def __init__(self, method: str = METHODS[0], *, prior: Weights | None = None) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
        self.method = method
        self._digest = Digest(method)
        self._requests = Requests()
        self._prior = WeightPrior(prior or {})
        self._steps: list[tuple[int, int, Sequence[str], object, object, object]] = []
        self._updates: list[tuple[int, int, float, int, int, float]] = []
        self._finished: list[tuple[int, str, str]] = []
        self._end_ns = -(2**62)  # end of the newest step
        self._foreign: list[Interval] = []
        self._early: list[Settlement] = []
        self.totals = Totals()
        """Totals of all settled periods."""

    # --------------------------------------------------------------------------------------- input

    def step(
        self,
        begin_ns: int,
        end_ns: int,
        ids: Sequence[str],
        prefill: Sequence[bool] | Floats,
        tokens: Sequence[float] | Floats,
        context: Sequence[float] | Floats,
    ) -> None:
        """Adds a step of the engine. Steps must be in the order of their ends.

        Args:
            begin_ns: Its start, on the clock of the updates.
            ids: Its requests; empty: a dummy step, whose energy counts as idle.
            prefill: Whether each request is in its prefill.
            tokens: Tokens computed in this step, accepted or not.
            context: Tokens in the KV cache at the start of the step.
        """
        if not len(ids):
            ids, prefill, tokens, context = (DUMMY,), (False,), (1,), (0,)
        self._end_ns = max(self._end_ns, end_ns)
        self._steps.append((begin_ns, end_ns, ids, prefill, tokens, context))
        if len(self._steps) >= MOST_PENDING:
            self._flush_steps()

    def add_steps(self, steps: StepColumns, names: Sequence[str]) -> None:
        """Adds many steps at once.

        Args:
            steps: `request` has positions in `names`; each step has at least one row.
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
        """Adds an update of the sensor. Updates must be sorted by time and must not overlap.

        Args:
            joules: Its energy for all of this time.
            seen_begin_ns: Start of the measured part; None: the start of the update.
            seen_end_ns: End of the measured part; None: the end of the update.
            clock_mhz: Effective clock of the GPU; NaN: unknown.

        Raises:
            ValueError: It ends before it starts.
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
        """Adds many updates at once."""
        self._flush_updates()
        self._digest.add_updates(updates)

    def finish(self, request: str, tenant: str = "") -> None:
        """Marks a request as finished, completed or aborted."""
        self._finished.append((self._end_ns, request, tenant))

    def finish_all(self) -> None:
        """Marks all requests so far as finished, because their engine has ended."""
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
        """Condenses new data, and returns provisional figures.

        Args:
            until_ns: All steps and updates that ended before have been added.

        Returns:
            Finished requests whose last step is covered; each once.
        """
        self._condense(until_ns)
        if len(self._digest) > MOST_UPDATES or self._requests.full:
            self._early.append(self._settle(final=False))
        wanted = self._requests.newly_done()
        if not wanted:
            return []
        return self._provisional(np.array(wanted))

    def settle(self, until_ns: int | None = None) -> Settlement:
        """Closes a period: fits once more, and scales to the measured energy.

        Args:
            until_ns: The period ends here, and all steps and updates that ended before have been
                added; None: there is no more data.

        Returns:
            Finished requests in the order of their first step; all requests if there is no more
            data.
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
        """Number of requests that `settle` has not returned yet."""
        return len(self._requests)

    @property
    def weights(self) -> Weights:
        """Weights of the newest fit at each clock, as a prior for the next ledger."""
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
        self._steps = []
        steps = StepColumns(
            np.array(begins, np.int64),
            np.array(ends, np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            numbers,
            np.concatenate([np.asarray(one, bool) for one in prefill]),
            np.concatenate([np.asarray(one, np.float64) for one in tokens]),
            np.concatenate([np.asarray(one, np.float64) for one in context]),
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
        found = predict(what, fitted)
        return self._requests.rows_of(wanted, found, self.method, "")

    def _settle(self, *, final: bool) -> Settlement:
        what = self._digest.condensed()
        fitted = None
        if self.method == METHODS[0]:
            fitted = fit(what.observed, what.levels, self._prior.of(what))
            if not fitted.refusal:
                self._prior.learn(what, fitted)
        found = split(what, fitted)
        foreign = [*self._foreign, *find_foreign(what)]
        totals = self._requests.charge(found, foreign, DUMMY)
        rows = self._requests.take(self.method, DUMMY, final=final)
        self._foreign = []
        self._digest.restart()
        self.totals.add(totals)
        return Settlement(rows, totals, fitted)
