"""What the core of the power limit optimizer has its shell do.

What an action brings about is told to the core by the method that is named with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeus.optimizer.power_limit.leader import Message, Try


@dataclass(frozen=True)
class Part:
    """Some steps of a trial that are measured together."""

    trial: Try
    index: int
    steps: int


@dataclass(frozen=True)
class Join:
    """Find out who trains together, and say hello. -> `joined`, or `cut_off`"""


@dataclass(frozen=True)
class SetLimit:
    """Set the limit on all GPUs, mW. -> `limit_set`, `limit_refused`, `limit_denied`,
    `limit_failed`, or `unanswered`
    """

    power_limit_mw: int


@dataclass(frozen=True)
class AskForLimit:
    """See what became of the limit that was not answered. -> as `SetLimit`, or nothing yet"""


@dataclass(frozen=True)
class ReleaseLimits:
    """Give the limits back."""


@dataclass(frozen=True)
class OpenWindow:
    """Begin to measure at a limit, mW. -> `window_failed` where that fails"""

    power_limit_mw: int


@dataclass(frozen=True)
class CloseWindow:
    """End the window at a limit, mW, and have its energy read by `Collect`. None: of a check that
    follows the choice. -> `window_failed` where that fails
    """

    power_limit_mw: int
    part: Part | None


@dataclass(frozen=True)
class DropWindow:
    """End the window at a limit, mW, if it is open: it is worth nothing."""

    power_limit_mw: int


@dataclass(frozen=True)
class Collect:
    """Read the energies that have come. -> `measured` or `unknown`, for each window in order"""


@dataclass(frozen=True)
class Forget:
    """The windows whose energy was not read are worth nothing. -> `unknown` for each part"""


@dataclass(frozen=True)
class Ran:
    """Tell the leader, if it is here, that a piece was run."""

    part: Part


@dataclass(frozen=True)
class Tell:
    """Tell the leader something. -> `cut_off` where that fails"""

    message: Message


@dataclass(frozen=True)
class Listen:
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
class Waited:
    """Tell the leader, if it is here, that in so many steps nothing could be measured."""

    steps: int


@dataclass(frozen=True)
class SearchAgain:
    """Have the leader, which is here, begin its search anew."""


@dataclass(frozen=True)
class CheckChoice:
    """Have the leader, which is here, measure once more what its choice depends on."""


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
    | Forget | Ran | Tell | Listen | Leave | Waited | SearchAgain | CheckChoice | GiveUp | Say
    | Show
)  # fmt: skip
Actions = list[Action]
