"""What the core of the power limit optimizer has its shell do.

What an action brings about is told to the core by the method that is named with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import Message, Try
from zeus_ipc.overriding import override


@dataclass(frozen=True)
class Part:
    """Some steps of a trial that are measured together."""

    trial: Try
    index: int
    steps: int


@dataclass(frozen=True)
class _Plain:
    """An action that needs no more to be said."""


@dataclass(frozen=True)
class _AtLimit:
    """An action at a limit, mW."""

    power_limit_mw: int


class ForLeader(ABC):
    """Something for the leader, if it is in this process."""

    @abstractmethod
    def reach(self, leader: Leader, now_s: float, step: int) -> None:
        """Tell it, at a time (monotonic, s) and a step of this process."""


class Join(_Plain):
    """Find the processes that train together, and say hello. -> `joined`, or `cut_off`"""


@dataclass(frozen=True)
class SetLimit(_AtLimit):
    """Set the limit on all GPUs, mW, and the workload power profile; None: that of others.
    -> `limit_set`, `limit_refused`, `limit_denied`, `limit_failed`, or `unanswered`
    """

    profile: int | None = None


class AskForLimit(_Plain):
    """See what became of the limit that was not answered. -> as `SetLimit`, or nothing yet"""


class ReleaseLimits(_Plain):
    """Restore the limits."""


class OpenWindow(_AtLimit):
    """Begin to measure at a limit, mW. -> `window_failed` where that fails"""


@dataclass(frozen=True)
class CloseWindow:
    """End the window at a limit, mW, and have its energy read by `Collect`. None: of a check that
    follows the choice. -> `window_failed` where that fails
    """

    power_limit_mw: int
    part: Part | None


class DropWindow(_AtLimit):
    """End the window at a limit, mW, if it is open: it is worth nothing."""


class Collect(_Plain):
    """Read the energies that have come. -> `measured` or `unknown`, for each window in order"""


class Forget(_Plain):
    """The windows whose energy was not read are worth nothing. -> `unknown` for each part"""


@dataclass(frozen=True)
class Ran(ForLeader):
    """A piece was run."""

    part: Part

    @override
    def reach(self, leader: Leader, now_s: float, step: int) -> None:
        leader.ran(self.part.trial, self.part.index, self.part.steps)


@dataclass(frozen=True)
class Tell:
    """Tell the leader something. -> `cut_off` where that fails"""

    message: Message


class Listen(_Plain):
    """See what the leader commands. -> `heard`, or `cut_off`"""


@dataclass(frozen=True)
class Leave:
    """Have no more to do with the leader.

    Attributes:
        reason: Why this process searches no more, for the others, who must not wait for it; None:
            they know.
    """

    reason: str | None


@dataclass(frozen=True)
class Waited(ForLeader):
    """In so many steps nothing could be measured."""

    steps: int

    @override
    def reach(self, leader: Leader, now_s: float, step: int) -> None:
        leader.waited(self.steps)


class SearchAgain(_Plain, ForLeader):
    """Search again from the beginning."""

    @override
    def reach(self, leader: Leader, now_s: float, step: int) -> None:
        leader.again(now_s, step)


class CheckChoice(_Plain, ForLeader):
    """Measure once more what the choice depends on."""

    @override
    def reach(self, leader: Leader, now_s: float, step: int) -> None:
        leader.check(now_s, step)


@dataclass(frozen=True)
class GiveUp:
    """Say why there is no search any more, and what limit is in force. Limits were released."""

    reason: str
    warn: bool


@dataclass(frozen=True)
class Say:
    """Say something to the user: a warning, or a line in the log."""

    text: str
    warn: bool = False


@dataclass(frozen=True)
class Show:
    """Show figures, by name."""

    figures: dict[str, float]


Action = (
    Join | SetLimit | AskForLimit | ReleaseLimits | OpenWindow | CloseWindow | DropWindow | Collect
    | Forget | Tell | Listen | Leave | ForLeader | GiveUp | Say | Show
)  # fmt: skip
Actions = list[Action]
