"""Records which requests were in each step of transformers' continuous batching.

    from zeus.serving.transformers import install

    install()
    model.generate_batch(...)

Its internals still change: this is written against 5.23. Missing parts are tolerated and logged
once.
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

from zeus.serving.recorder import EngineProbe, Recorder, wrap

log = logging.getLogger(__name__)


def install(recorder: Any = None) -> bool:
    """Records every batch of continuous batching in this process.

    Args:
        recorder: Has `arrived`, `step` and `finish` as `Recorder`; None: a `Recorder`.

    Returns:
        Whether this version of transformers has the wrapped methods.
    """
    home = "transformers.generation.continuous_batching.continuous_api"
    target = Recorder() if recorder is None else recorder
    try:
        processor = importlib.import_module(home).ContinuousBatchProcessor
        for name, before, after in (
            ("prepare_next_batch", "", "prepared"),
            ("update_batch", "ended", "updated"),
        ):
            wrap(processor, name, lambda one: BatchProbe(one, target), before, after)
    except (ImportError, AttributeError) as error:
        log.warning("no energy of requests: continuous batching is not as expected (%s)", error)
        return False
    return True


class BatchProbe(EngineProbe):
    """Records one processor's batches."""

    def __init__(self, processor: Any, recorder: Any) -> None:
        super().__init__("transformers")
        self._processor = processor
        self._recorder = recorder
        self._states: list[Any] = []
        self._known: set[str] = set()

    def prepared(self, begin_ns: int, ready: bool) -> None:
        """Handles a composed batch."""
        if not ready:
            return
        processor = self._processor
        self._meet(processor)
        names, prefill, tokens, context, states = [], [], [], [], []
        for one in processor.inputs_and_outputs.requests_in_batch:
            state, length = one.state, one.query_length
            before = max(0, state.position_offset - length)
            names.append(state.request_id)
            prefill.append(before < len(state.initial_tokens))
            tokens.append(length)
            context.append(before)
            states.append(state)
        self.begin(begin_ns, (names, prefill, tokens, context, states))

    def ended(self, *more: object) -> None:
        """Handles the tokens of a batch."""
        step = self.end()
        self._states = []
        if step is not None:
            begin_ns, end_ns, (names, prefill, tokens, context, self._states) = step
            self._recorder.step(begin_ns, end_ns, names, prefill, tokens, context)

    def updated(self, *more: object) -> None:
        """Handles updated requests of the batch."""
        for state in self._states:
            if getattr(state.status, "name", "") in ("FINISHED", "FAILED"):
                self._known.discard(state.request_id)
                self._recorder.finish(state.request_id)
        self._states = []

    def _meet(self, processor: Any) -> None:
        """Adds new requests, in the batch or waiting."""
        waiting = getattr(getattr(processor, "scheduler", None), "waiting_requests", None) or {}
        batch = [one.state for one in processor.inputs_and_outputs.requests_in_batch]
        for state in (*batch, *waiting.values()):
            if state.request_id not in self._known:
                self._known.add(state.request_id)
                created_s = getattr(state, "created_time", None) or time.monotonic()
                prompt = len(state.initial_tokens)
                self._recorder.arrived(state.request_id, round(created_s * 1e9), prompt)
