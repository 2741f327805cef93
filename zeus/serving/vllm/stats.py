"""A stat logger, found by vLLM through its entry point `vllm.stat_logger_plugins`.

It records nothing unless `ZEUS_SERVING=stats`; with `ZEUS_SERVING_METRICS` it adds the ledger's
metrics to vLLM's. It works without the probe in the scheduler, with the larger error that
`zeus.serving.vllm.front_end` explains. Written against vLLM 0.32 and 0.33, whose statistics may
change: missing values count as 0.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from zeus.serving.recorder import EngineProbe, Recorder
from zeus.serving.relay import URL_ENV, register
from zeus.serving.vllm.front_end import Finished, FrontEnd
from zeus.serving.vllm.probe import MODE_ENV

log = logging.getLogger(__name__)


def _base() -> Any:
    try:
        return importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    except (ImportError, AttributeError):
        return object


class EnergyStatLogger(_base()):  # type: ignore[misc]  # vLLM's, if there
    """Records one engine's steps from the front end's statistics."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._probe = EngineProbe("vLLM's statistics")
        self._front_end = FrontEnd()
        self._recorder: Recorder | None = None
        if url := os.environ.get(URL_ENV):
            register(url)
        if os.environ.get(MODE_ENV) != "stats":
            return
        servers = getattr(getattr(vllm_config, "parallel_config", None), "_api_process_count", 1)
        if isinstance(servers, int) and servers > 1:
            log.warning(
                "no energy of requests: each of the %d API servers sees only its own requests; "
                "set %s=steps, or --api-server-count 1",
                servers,
                MODE_ENV,
            )
            return
        self._recorder = Recorder(str(engine_index))

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **more: Any,
    ) -> None:
        """Called by vLLM after each step."""
        if self._recorder is not None:
            self._probe.silent(self._record, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once."""
        if self._recorder is not None:
            log.info("steps are recorded from the front end's statistics")

    def log(self) -> None:
        """Called by vLLM periodically; prints nothing."""

    def _record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if iteration_stats is None or self._recorder is None:
            return
        finished = [_finished(one) for one in getattr(iteration_stats, "finished_requests", ())]
        ended = [one for one in finished if one is not None]
        now_ns = self._probe.now_ns()
        # The scheduler no longer counts requests of the step that it ended.
        running = int(getattr(scheduler_stats, "num_running_reqs", 0) or 0) + len(ended)
        self._front_end.iteration(now_ns, running, ended)
        for step, names in self._front_end.ready(now_ns):
            self._recorder.step(*step)
            for name in names:
                self._recorder.finish(name)


def _finished(one: Any) -> Finished | None:
    name = getattr(one, "request_id", None)
    if not name:
        return None
    prompt = int(getattr(one, "num_prompt_tokens", 0) or 0)
    cached = int(getattr(one, "num_cached_tokens", 0) or 0)
    return Finished(
        str(name),
        float(getattr(one, "prefill_time", 0.0) or 0.0),
        float(getattr(one, "decode_time", 0.0) or 0.0),
        max(0, prompt - cached),
        cached,
        int(getattr(one, "num_generation_tokens", 0) or 0),
    )
