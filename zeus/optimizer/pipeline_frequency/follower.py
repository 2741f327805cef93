"""Follows a plan, instruction by instruction: pure, without clock, thread or device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FREE = -1
"""The GPU's default clock instead of a planned one."""


@dataclass(frozen=True)
class Schedule:
    """The instructions of one rank in an iteration, with their clocks.

    Attributes:
        version: Version of the plan; 0: none.
        steps: Instruction and MHz, or another setting's name, in order; 0: do not change it.
        at_iteration: The first iteration to run under it.
    """

    version: int = 0
    steps: tuple[tuple[str, int | str], ...] = ()
    at_iteration: int = 0


class Follower:
    """Returns the clock of each instruction.

    It handles any sequence of calls: instructions that do not fit the plan get the default clock
    until the next step begins. If a program never calls `begin_step`, each step ends where the next
    begins.

    Args:
        tell: Called once with a sentence for each kind of misfit.

    Attributes:
        schedule: The plan in force.
        count: Instructions of this step so far.
        training: Whether a step is in progress.
        explicit: Whether the program reports where steps begin.
        pending: The next plan, until its first iteration.
        iteration: The present step, or the last one; -1 before the first.
        expected: Number of instructions of a step in the plan; 0: no plan.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._reported: set[str] = set()
        self.pending: Schedule | None = None
        self.explicit = False
        self._ended = 0
        self._lost = False
        self._position = 0
        self.training = True
        self.iteration = -1
        self.count = 0
        self._adopt(Schedule())

    def offer(self, schedule: Schedule) -> None:
        """Sets the next plan; the newest replaces earlier ones. From any thread."""
        self.pending = schedule

    def begin_step(self) -> None:
        """A step begins."""
        if not self.explicit:
            self.explicit = True
            if not self._ended:
                self.iteration = -1  # instructions before the first step do not belong to a step
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
        """Instructions until the next step begins are not training."""
        self.training = False

    def instruction(self, name: str) -> int | str:
        """The clock of an instruction, MHz, or other setting; 0: unchanged; `FREE`: the default."""
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
        """Handles an instruction that deliberately does not follow the plan."""
        if self.training:
            self.count += 1
            self._lost = True

    # ---------------------------------------------------------------------------------- internals

    def _next_step(self) -> None:
        self.iteration += 1
        self._position = self.count = 0
        self._lost = False
        pending = self.pending
        if pending is not None and self.iteration >= pending.at_iteration:
            if self.pending is pending:
                self.pending = None
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
                f"instruction {self._position} of a step is {name!r}, but {expected!r} in the "
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
        if kind not in self._reported:
            self._reported.add(kind)
            self._tell(sentence)
