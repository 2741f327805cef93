"""What a training loop calls, and what optimizers override."""

from __future__ import annotations

from collections.abc import Sequence


class Callback:
    """Does nothing at each point of a training run; subclasses override what they need."""

    def on_train_begin(self) -> None:
        """Training begins."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def on_epoch_begin(self) -> None:
        """An epoch begins."""

    def on_epoch_end(self) -> None:
        """An epoch has ended."""

    def on_step_begin(self) -> None:
        """A training step begins."""

    def on_step_end(self) -> None:
        """A training step has ended."""

    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated.

        Args:
            metric: The validation metric.
        """

    def on_instruction_begin(self, name: str) -> None:
        """A pipeline instruction begins.

        Args:
            name: Such as `forward`.
        """

    def on_instruction_end(self, name: str) -> None:
        """A pipeline instruction has ended.

        Args:
            name: Such as `forward`.
        """


class CallbackSet(Callback):
    """Calls several callbacks, in order.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_train_begin(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_train_begin()

    def on_train_end(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_train_end()

    def on_epoch_begin(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_epoch_end()

    def on_step_begin(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_step_begin()

    def on_step_end(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_step_end()

    def on_evaluate(self, metric: float) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_evaluate(metric)

    def on_instruction_begin(self, name: str) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_instruction_begin(name)

    def on_instruction_end(self, name: str) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_instruction_end(name)
