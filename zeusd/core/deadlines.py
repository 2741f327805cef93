"""Due times by key: a map that knows its earliest time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Deadlines(Generic[K]):
    """Times by key. The earliest is searched for only after it has changed."""

    __slots__ = ("_earliest_ns", "_times_ns")

    def __init__(self) -> None:
        self._times_ns: dict[K, int] = {}
        self._earliest_ns: int | None = None

    def __setitem__(self, key: K, due_ns: int) -> None:
        before_ns = self._times_ns.get(key)
        self._times_ns[key] = due_ns
        earliest_ns = self._earliest_ns
        if earliest_ns is not None:
            if due_ns <= earliest_ns:
                self._earliest_ns = due_ns
            elif before_ns == earliest_ns:
                self._earliest_ns = None

    def __bool__(self) -> bool:
        return bool(self._times_ns)

    def get(self, key: K) -> int | None:
        """Due time of a key; None: never."""
        return self._times_ns.get(key)

    def pop(self, key: K) -> int | None:
        """Removes a key. Returns its due time; None: never."""
        before_ns = self._times_ns.pop(key, None)
        if before_ns is not None and before_ns == self._earliest_ns:
            self._earliest_ns = None
        return before_ns

    def earliest_ns(self) -> int | None:
        """The earliest due time; None: there is none."""
        if self._earliest_ns is None and self._times_ns:
            self._earliest_ns = min(self._times_ns.values())
        return self._earliest_ns

    def due(self, now_ns: int) -> Iterator[K]:
        """The keys that are due at the time of the call."""
        return iter([key for key, due_ns in self._times_ns.items() if due_ns <= now_ns])
