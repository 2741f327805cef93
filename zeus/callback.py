"""The callback interface between training loops and optimizers."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Self = TypeVar("Self", bound="Callback")


class Callback:
    """A callback that does nothing; subclasses override what they need. A hand-written loop needs
    only these calls:

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

    def __exit__(self, *error: object) -> None:
        """A block of training. An exception passes through, after the callback's end."""
        self.on_train_end()

    def steps(self, batches: Iterable[Item]) -> Steps[Item]:
        """Passes an epoch's batches on; each is one training step, and all of them one epoch.

        It has a `len` if the batches have one. It may be iterated again, for another epoch.
        """
        return Steps(self, batches)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is not training, such as an evaluation or a checkpoint."""
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
        """Something else begins between two steps, such as an evaluation or a checkpoint. It ends
        when the next step begins.
        """

    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated."""

    def on_instruction_begin(self, name: str) -> None:
        """A pipeline instruction begins."""

    def on_instruction_end(self, name: str) -> None:
        """A pipeline instruction has ended."""


class Steps(Iterator[Item]):
    """The batches of an epoch, as `Callback.steps` passes them on."""

    def __init__(self, callback: Callback, batches: Iterable[Item]) -> None:
        self._callback = callback
        self._batches = batches
        self._epoch: Generator[Item, None, None] | None = None

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            TypeError: The batches have no length.
        """
        return len(cast("Sized", self._batches))

    def __length_hint__(self) -> int:
        """The length for `list` and progress bars, if there is one."""
        return operator.length_hint(self._batches)

    def __iter__(self) -> Iterator[Item]:
        return self._run()

    def __next__(self) -> Item:
        if self._epoch is None:
            self._epoch = self._run()
        return next(self._epoch)

    def _run(self) -> Generator[Item, None, None]:
        self._callback.on_epoch_begin()
        try:
            for batch in self._batches:
                self._callback.on_step_begin()
                yield batch
                self._callback.on_step_end()
        finally:  # after `break`, too
            self._callback.on_epoch_end()


class CallbackSet(Callback):
    """Calls several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)


def _of_each(event: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(event)
    def call(self: CallbackSet, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event.__name__)(*args, **kwargs)

    return call


for _name, _event in [*vars(Callback).items()]:
    if _name.startswith("on_"):
        setattr(CallbackSet, _name, _of_each(_event))
