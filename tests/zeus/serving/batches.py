"""A recorder's double: what the receiver would make of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus.serving.wire import EngineStep, pack_batches, unpack


class TakesBatches:
    """Hands each step of a batch to `step`, at once."""

    step: Any
    _batch: tuple[bytes, Sequence[int], Sequence[int]]
    _ahead: int

    def batch(
        self,
        begin_ns: int,
        end_ns: int,
        roster: bytes,
        tokens: Sequence[int],
        computed: Sequence[int],
    ) -> None:
        """As `Recorder.batch`."""
        self._batch, self._ahead = (roster, tokens, computed), -1
        self.again(begin_ns, end_ns)

    def again(self, begin_ns: int, end_ns: int) -> None:
        """As `Recorder.again`."""
        self._ahead += 1
        (found,) = unpack(pack_batches("0", 1, [begin_ns, end_ns], *self._batch, self._ahead))
        assert isinstance(found, EngineStep)
        self.step(begin_ns, end_ns, found.ids, found.prefill, found.tokens, found.context)

    def flush(self) -> None:
        """As `Recorder.flush`."""
