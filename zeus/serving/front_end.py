"""Steps as an engine's front end knows them: who was in one is known when requests have finished.

The front end sees when each step's output came, and of a finished request how long its prefill and
its decode took. A request was in every step between; its prompt is spread over those of its prefill
evenly. So figures are rougher than with a probe in the scheduler, and come later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

WAIT_NS = 120 * 10**9
"""A step is given out with the requests that are known by then, even if some still run."""
NEAR_NS = 2_000_000
"""By how much instants of the same step may differ."""


@dataclass
class _Iteration:
    end_ns: int
    running: int
    begin_ns: int = 2**62
    rows: list[tuple[str, bool, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A finished request.

    Attributes:
        request: Its id.
        prefill_s: From its first step to its first token.
        decode_s: From its first token to its last.
        prompt: Tokens of its prompt that were computed.
        cached: Tokens of its prompt that were not.
        generated: Tokens that it generated.
    """

    request: str
    prefill_s: float
    decode_s: float
    prompt: int
    cached: int
    generated: int


Row = tuple[int, int, list[str], list[bool], list[float], list[float]]
"""Arguments of `Ledger.step`."""


class FrontEnd:
    """Puts steps together."""

    def __init__(self) -> None:
        self._iterations: list[_Iteration] = []
        self._ends: list[int] = []
        self._last_ns = -(2**62)

    def iteration(self, end_ns: int, running: int, finished: list[Finished]) -> None:
        """A step's output came.

        Args:
            end_ns: When.
            running: Requests in it.
            finished: Requests whose last token was in it.
        """
        if self._ends and end_ns <= self._ends[-1]:
            end_ns = self._ends[-1] + 1
        self._iterations.append(_Iteration(end_ns, running))
        self._ends.append(end_ns)
        for one in finished:
            self._place(one, end_ns)

    def ready(self, now_ns: int) -> Iterator[Row]:
        """Steps whose requests are all known, or that have waited long enough, each once."""
        done = 0
        for one in self._iterations:
            if len(one.rows) < one.running and now_ns - one.end_ns < WAIT_NS:
                break
            done += 1
            if one.rows:
                begin_ns = min(max(one.begin_ns, self._last_ns), one.end_ns)
                names, prefill, tokens, context = map(list, zip(*one.rows, strict=True))
                yield begin_ns, one.end_ns, names, prefill, tokens, context
            self._last_ns = one.end_ns
        del self._iterations[:done], self._ends[:done]

    def _place(self, one: Finished, last_ns: int) -> None:
        first_ns = last_ns - round(one.decode_s * 1e9)
        begin_ns = first_ns - round(one.prefill_s * 1e9)
        low = bisect_right(self._ends, begin_ns + NEAR_NS)
        middle = bisect_right(self._ends, first_ns + NEAR_NS)
        high = bisect_left(self._ends, last_ns) + 1
        prefills = self._iterations[low:middle]
        for number, step in enumerate(prefills):
            part = one.prompt / len(prefills)
            self._add(step, begin_ns, one.request, True, part, one.cached + number * part)
        decodes = self._iterations[middle:high]
        for number, step in enumerate(decodes):
            # More than one token per step: speculation, of which only accepted tokens are known.
            part = max(1.0, (one.generated - 1) / len(decodes))
            before = one.cached + one.prompt + number * part
            self._add(step, begin_ns, one.request, False, part, before)

    @staticmethod
    def _add(
        step: _Iteration, begin_ns: int, name: str, prefill: bool, tokens: float, context: float
    ) -> None:
        step.begin_ns = min(step.begin_ns, begin_ns)
        step.rows.append((name, prefill, tokens, context))
