"""Follows a plan, instruction by instruction: pure, without clock, thread or device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FREE = -1
"""No clock of the plan: the GPU's own default."""


@dataclass(frozen=True)
class Schedule:
    """One rank's instructions of an iteration, with their clocks.

    Attributes:
        version: Of the plan; 0 for none.
        steps: Instruction and MHz, or another setting's name, in order; 0 leaves it as it is.
        at_iteration: The first iteration to run under it.
    """

    version: int = 0
    steps: tuple[tuple[str, int | str], ...] = ()
    at_iteration: int = 0


class Follower:
    """Says which clock each instruction gets.

    Whatever the program does, it answers: what does not fit the plan gets the default clock until
    the next step begins. A program that never calls `begin_step` has steps that end where the next
    begins.

    Args:
        tell: Called once with a sentence for each kind of misfit.

    Attributes:
        iteration: The step that is under way, or the last one; -1 before the first.
        schedule: The plan in force.
        count: Instructions of this step so far.
        expected: How many instructions a step has by the plan; 0 without one.
        training: Whether a step is under way.
        explicit: Whether the program says where steps begin.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()
        self._pending: Schedule | None = None
        self.explicit = False
        self._ended = 0
        self._lost = False
        self._position = 0
        self.training = True
        self.iteration = -1
        self.count = 0
        self._adopt(Schedule())

    def offer(self, schedule: Schedule) -> None:
        """A plan to go over to; of several the newest counts. From any thread."""
        self._pending = schedule

    def begin_step(self) -> None:
        """A step begins."""
        if not self.explicit:
            self.explicit = True
            if not self._ended:
                self.iteration = -1  # what was before the first step was none
        self._next_step()
        self.training = True

    def end_step(self) -> None:
        """A step has ended."""
        if self.training and not self._lost and self.count and self._position < self.expected:
            self._say(
                "missing",
                f"a training step ran {self._position} instructions, the plan has {self.expected}; "
                "make the plan for this number of microbatches, or call on_instruction_begin for "
                "each forward and backward",
            )
        self._ended += 1
        if self.explicit:
            self.training = False
            self._position = self.count = 0
        elif self.count or not self.training:
            self._next_step()
            self.training = True

    def pause(self) -> None:
        """What comes until the next step begins is no training."""
        self.training = False

    def instruction(self, name: str) -> int | str:
        """An instruction's clock, MHz, or other setting; 0: as it is; `FREE`: the default."""
        if not self.training:
            return FREE
        if self.iteration < 0:
            self._next_step()
        self.count += 1
        if self._lost:
            return FREE
        expected, mhz = self._steps[self._position]
        if name == expected:
            self._position += 1
            return mhz
        return self._misfit(name, expected)

    def skip(self) -> None:
        """An instruction that does not follow the plan, on purpose."""
        if self.training:
            self.count += 1
            self._lost = True

    # ---------------------------------------------------------------------------------- internals

    def _next_step(self) -> None:
        self.iteration += 1
        self._position = self.count = 0
        self._lost = False
        pending = self._pending
        if pending is not None and self.iteration >= pending.at_iteration:
            if self._pending is pending:
                self._pending = None
            self._adopt(pending)

    def _adopt(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.expected = len(schedule.steps)
        self._steps: Sequence[tuple[str | None, int | str]] = (*schedule.steps, (None, FREE))

    def _misfit(self, name: str, expected: str | None) -> int:
        if not self.expected:
            return FREE  # there is no plan
        self._lost = True
        if expected is not None:
            self._say(
                "name",
                f"instruction {self._position} of a step is {name!r}, but {expected!r} by the "
                "plan; the rest of the step runs at default clocks. Announce evaluations with "
                "`with optimizer.paused():`, or make the plan for this schedule",
            )
        else:
            self._say(
                "over",
                f"a step has more than the {self.expected} instructions of the plan; the rest of "
                "it runs at default clocks. Call on_step_end after each step and announce "
                "evaluations with `with optimizer.paused():`",
            )
        return FREE

    def _say(self, kind: str, sentence: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(sentence)
