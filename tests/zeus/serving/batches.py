"""Doubles of what engines and zeusd send."""

from __future__ import annotations

from typing import Any

from zeus.serving.wire import Batch, EngineStep, Unpacker, pack, packet
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
    starts = False
    _number = 0

    def batch(
        self,
        begin_ns: int,
        end_ns: int,
        left: Any = (),
        roster: bytes = b"",
        computed: Any = (),
        tokens: Any = (),
        whole: bool = False,
    ) -> None:
        """As `Recorder.batch`."""
        if not self._number:
            self._unpack = Unpacker()
        self._number += 1
        one = Batch("0", self._number, [begin_ns, end_ns], whole, left, roster, computed, tokens)
        (found,) = self._unpack(packet([pack(one)]))
        assert isinstance(found, EngineStep)
        self.step(begin_ns, end_ns, found.ids, found.prefill, found.tokens, found.context)

    def flush(self) -> None:
        """As `Recorder.flush`."""


class Recorded(TakesBatches):
    """Records what an engine sends."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[str], list[bool], list[int], list[int]]] = []
        """Ids, whether they are prefill, tokens, and contexts."""
        self.instants: list[tuple[int, int]] = []
        self.finished: list[str] = []
        self.arrivals: dict[str, int] = {}
        """Lengths of prompts."""

    def step(self, begin_ns, end_ns, ids, prefill, tokens, context) -> None:
        """As `Recorder.step`."""
        assert begin_ns <= end_ns
        self.instants.append((begin_ns, end_ns))
        self.steps.append((list(ids), list(prefill), list(tokens), list(context)))

    def arrived(self, request: str, at_ns: int, prompt: int, trace: str = "") -> None:
        """As `Recorder.arrived`."""
        self.arrivals[request] = prompt

    def finish(self, request: str, tenant: str = "") -> None:
        """As `Recorder.finish`."""
        self.finished.append(request)
