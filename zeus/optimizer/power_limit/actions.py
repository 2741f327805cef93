"""Actions that the core of the power limit optimizer requests from its shell. The shell reports the
result of an action by the core's method named with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import Message, Try


@dataclass(frozen=True)
class Part:
    """Steps of a trial that are measured together."""

    trial: Try
    index: int
    steps: int


@dataclass(frozen=True)
class _Plain:
    """An action without parameters."""


@dataclass(frozen=True)
class _AtLimit:
    """An action at a limit, mW."""

    power_limit_mw: int


@dataclass(frozen=True)
class ForLeader:
    """Deliver something to the leader, if it is in this process, with the time (monotonic, s) and
    the step of this process.
    """

    reach: Callable[[Leader, float, int], None]


class Join(_Plain):
    """Find the processes that train together, and say hello. -> `joined`, or `cut_off`"""


@dataclass(frozen=True)
class SetLimit(_AtLimit):
    """Set the limit on all GPUs, mW, and the workload power profile; None: leave it to others. ->
    `limit_set`, `limit_refused`, `limit_denied`, `limit_failed`, or `unanswered`
    """

    profile: int | None = None


class AskForLimit(_Plain):
    """Check the limit that is still pending. -> as `SetLimit`, or nothing yet"""


@dataclass(frozen=True)
class ReleaseLimits:
    """Restore the limits.

    Attributes:
        at_end: Training has ended, and may wait a moment for it.
    """

    at_end: bool


class OpenWindow(_AtLimit):
    """Begin to measure at a limit, mW. -> `window_failed` if that fails"""


@dataclass(frozen=True)
class CloseWindow:
    """End the window at a limit, mW; `Collect` reads its energy. None: the window of a check after
    the choice. -> `window_failed` if that fails
    """

    power_limit_mw: int
    part: Part | None


class DropWindow(_AtLimit):
    """Discard the window at a limit, mW, if it is open."""


class Collect(_Plain):
    """Read the energies that are available. -> `measured` or `unknown`, for each window in order"""


class Forget(_Plain):
    """Discard the windows whose energy was not read. -> `unknown` for each part"""


@dataclass(frozen=True)
class Tell:
    """Send the leader a message. -> `cut_off` if that fails"""

    message: Message


class Listen(_Plain):
    """Read the leader's commands. -> `heard`, or `cut_off`"""


@dataclass(frozen=True)
class Leave:
    """Leave the leader.

    Attributes:
        reason: Why this process no longer searches, for the others, which must not wait for it;
            None: they know.
    """

    reason: str | None


@dataclass(frozen=True)
class GiveUp:
    """Report why the search ended, and which limit is in force. Limits were released."""

    reason: str
    warn: bool


@dataclass(frozen=True)
class Say:
    """Report to the user: a warning, or a line in the log."""

    text: str
    warn: bool = False


@dataclass(frozen=True)
class Show:
    """Report figures, by name."""

    figures: dict[str, float]


Action = (
    Join | SetLimit | AskForLimit | ReleaseLimits | OpenWindow | CloseWindow | DropWindow | Collect
    | Forget | Tell | Listen | Leave | ForLeader | GiveUp | Say | Show
)  # fmt: skip
Actions = list[Action]
