"""The base of the callbacks for trainers of other libraries. They translate events for a
`GlobalPowerLimitOptimizer`. Training must not end because of them: an error in a callback is
reported once, and the limits are restored.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from zeus.optimizer.power_limit.optimizer import GlobalPowerLimitOptimizer
from zeus.utils.configured import Configured
from zeus.utils.warn import warn

P = ParamSpec("P")
AnyDriven = TypeVar("AnyDriven", bound="Driven")

_FIGURES_KEPT = 1000


def same_arguments(
    original: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Gives a constructor the signature of the one it forwards its arguments to, for people,
    `inspect.signature` and type checkers.
    """

    def decorate(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        vars(constructor)["__signature__"] = inspect.signature(original)
        return constructor

    return decorate


class Driven(Configured):
    """A power limit optimizer that a trainer's events drive, with the optimizer's attributes.

    As a context manager, it restores the limits at the end of the block.

    Attributes:
        optimizer: The optimizer.
    """

    optimizer: GlobalPowerLimitOptimizer
    _needs: tuple[str, str, bool]
    """The trainer's package, our extra that installs it, and whether it is installed."""

    @same_arguments(GlobalPowerLimitOptimizer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        package, extra, installed = self._needs
        if not installed:
            raise ImportError(
                f"The {package} package is not installed. Please install it to use the "
                f'{type(self).__name__}. Run `pip install "zeusd[{extra}]"`.'
            )
        self.optimizer = GlobalPowerLimitOptimizer(*args, **kwargs)
        self._closed = False
        self._logs = True
        self._in_step = False
        self._in_epoch = False
        self._figures: deque[dict[str, float]] = deque(maxlen=_FIGURES_KEPT)

    def __enter__(self: AnyDriven) -> AnyDriven:
        """Nothing happens before training begins."""
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the limits."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the optimizer: `state`, `measurements`, `report`, ..."""
        if name == "optimizer":  # the constructor failed, or has not been called
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def close(self) -> None:
        """Restores the limits. Never raises. The next training sets them again."""
        self._in_step = False
        self._closed = True
        self.optimizer.close()

    # ------------------------------------------------------------------------ for the subclasses

    def _begin_training(self) -> None:
        """Training begins, perhaps again: after an error, there was no event for its end."""
        self._drop_window()
        self._in_step = self._in_epoch = False
        self.optimizer.on_train_begin()
        self._closed = False

    def _begin_step(self) -> None:
        self._in_step = self._in_epoch = True
        self.optimizer.on_step_begin()

    def _end_step(self) -> None:
        self._in_step = False
        self.optimizer.on_step_end()

    def _end_epoch(self) -> None:
        if not self._in_epoch:
            return
        self._in_epoch = False
        if self._in_step:  # interrupted: it must not count as a step
            self._drop_window()
            self._in_step = False
        self.optimizer.on_epoch_end()

    def _end_training(self) -> None:
        if not self._closed:
            self._in_step = False
            self._closed = True
            self.optimizer.close()

    def _drop_window(self) -> None:
        """Something other than training happened, perhaps unexpectedly."""
        self.optimizer.on_evaluate(math.nan)

    def _collect_metrics(self) -> None:
        """Keeps the optimizer's figures for `_log`, as they arrive at times that do not suit the
        log.
        """
        self.optimizer.on_metrics = self._figures.append

    def _log(self, send: Callable[[dict[str, float]], object] | None) -> None:
        """Logs the figures kept; None: another process does. An error ends only the logging."""
        while self._figures:
            figures = self._figures.popleft()
            if send is None or not self._logs:
                continue
            try:
                send(dict(figures))
            except Exception as error:  # noqa: BLE001 - a logger's, of which there are many
                self._logs = False
                warn(f"The power limit optimizer goes on, but logs no more: {error!r}")

    def _failed(self, error: Exception) -> None:
        """An error in a callback ends the search: the optimizer reports it, and the limit in
        force.
        """
        self._in_step, self._closed = False, True
        self.optimizer.give_up(error)
