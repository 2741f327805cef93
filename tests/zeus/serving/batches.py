"""Doubles of what engines and zeusd send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus.serving.wire import Batch, EngineStep, pack, packet, unpack
from zeus_ipc.replies import Sample


def published(
    gpu: str, t_ns: int, energy_uj: int, number: int, mhz: int | None, seen_ns: int | None = None
) -> Sample:
    """A sample as zeusd publishes it."""
    return Sample(
        gpu=gpu,
        t_ns=t_ns,
        number=number,
        energy_uj=energy_uj,
        power_mw=0,
        average_mw=None,
        memory_mw=None,
        gpu_clock_mhz=mhz,
        memory_clock_mhz=None,
        temperature_c=None,
        throttle_reasons=None,
        seen_ns=seen_ns,
    )


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
        one = Batch("0", 1, [begin_ns, end_ns], *self._batch, self._ahead)
        (found,) = unpack(packet([pack(one)]))
        assert isinstance(found, EngineStep)
        self.step(begin_ns, end_ns, found.ids, found.prefill, found.tokens, found.context)

    def flush(self) -> None:
        """As `Recorder.flush`."""
