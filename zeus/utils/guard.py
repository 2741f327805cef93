"""Handlers of a training loop's events, whose errors must not end the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Event = TypeVar("Event", bound=Callable[..., None])


def guarded(event: Event) -> Event:
    """A method that never raises: its object's `_failed` gets the error instead.

    Args:
        event: Method of a class that has `_failed(error: Exception) -> None`.
    """

    @functools.wraps(event)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training must go on
            self._failed(error)

    return cast("Event", call)
