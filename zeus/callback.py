"""What a training loop calls, and what optimizers override."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
Self = TypeVar("Self", bound="Callback")


class Callback:
    """Does nothing at each point of a training run; subclasses override what they need.

    A hand-written loop needs none of the calls but these:

        with callback:
            for epoch in range(epochs):
                for batch in callback.steps(loader):
                    train(batch)
                with callback.paused():
                    evaluate()
    """

    def __enter__(self: Self) -> Self:
        """Training begins."""
        self.on_train_begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Training has ended, in order or by an error, which passes through."""
        self.on_train_end()

    def steps(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Passes an epoch's batches on; each is one training step, and all of them one epoch."""
        self.on_epoch_begin()
        for batch in batches:
            self.on_step_begin()
            yield batch
            self.on_step_end()
        self.on_epoch_end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the block does is no training: an evaluation, a checkpoint."""
        self.on_pause()
        yield

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

    def on_pause(self) -> None:
        """Between two steps something else begins, such as an evaluation or a checkpoint.

        It ends where the next step begins.
        """

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

    def on_pause(self) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_pause()

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
