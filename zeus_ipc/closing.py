"""`with` for anything that has a `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """A context manager that calls `close` at the end."""

    @abstractmethod
    def close(self) -> None:
        """Closes it."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
