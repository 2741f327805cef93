"""What a recorder's double does with a batch: what the receiver would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus.serving.wire import Step, pack_batch, unpack


class TakesBatches:
    """Hands batches to `step`."""

    step: Any

    def batch(
        self,
        begin_ns: int,
        end_ns: int,
        roster: bytes,
        tokens: Sequence[int],
        computed: Sequence[int],
    ) -> None:
        """As `Recorder.batch`."""
        found = unpack(pack_batch("0", 1, begin_ns, end_ns, roster, tokens, computed))
        assert isinstance(found, Step)
        self.step(begin_ns, end_ns, found.ids, found.prefill, found.tokens, found.context)
