"""Records what a real vLLM's scheduler and front end pass to the plugins, for CI to replay.

One line of JSON per event, in order, with instants of CLOCK_MONOTONIC from the first: `arrived`,
`scheduled` (requests, tokens, what is computed after it, finished requests), `updated` (removed
requests),
`iteration` (running requests, finished ones) and, at the end, the engine's own statistics of each
step and request.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import vllm_engine

BLOCKS = 10


def record(home: Path, file: Path) -> None:
    """Serves eleven requests, two of which are aborted, and writes what happened."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams, __version__
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    events: list[dict[str, Any]] = []
    steps: list[list[int]] = []
    began_ns = time.monotonic_ns()

    def note(what: str, **more: Any) -> None:
        events.append({"event": what, "at_ns": time.monotonic_ns() - began_ns, **more})

    schedule, update, add = Scheduler.schedule, Scheduler.update_from_output, Scheduler.add_request

    def scheduled(self: Any, *arguments: Any) -> Any:
        begin_ns = time.monotonic_ns() - began_ns
        output = schedule(self, *arguments)
        tokens = output.num_scheduled_tokens
        after = {one: self.requests[one].num_computed_tokens for one in tokens}
        finished = sorted(output.finished_req_ids)
        note("scheduled", begin_ns=begin_ns, tokens=tokens, after=after, finished=finished)
        return output

    def updated(self: Any, *arguments: Any) -> Any:
        at_ns = time.monotonic_ns() - began_ns
        before = set(self.requests)
        outputs = update(self, *arguments)
        note("updated", ended_ns=at_ns, gone=sorted(before - set(self.requests)))
        return outputs

    def added(self: Any, request: Any) -> Any:
        note(
            "arrived",
            request=request.request_id,
            prompt=request.num_prompt_tokens,
            external=hasattr(request, "external_req_id"),
        )
        return add(self, request)

    Scheduler.schedule, Scheduler.update_from_output = scheduled, updated
    Scheduler.add_request = added

    class Logger(StatLoggerBase):
        """Keeps the statistics."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats=None, iteration_stats=None, *more, **named) -> None:
            if scheduler_stats is None or iteration_stats is None:
                return
            said = scheduler_stats.iteration_details
            if said is not None:
                contexts, decodes = said.num_ctx_requests, said.num_generation_requests
                steps.append([contexts, said.num_ctx_tokens, decodes, said.num_generation_tokens])
            names = (
                "request_id",
                "num_prompt_tokens",
                "num_cached_tokens",
                "num_generation_tokens",
                "prefill_time",
                "decode_time",
                "num_preemptions",
            )
            finished = [
                {name: getattr(one, name) for name in names}
                for one in iteration_stats.finished_requests
            ]
            note("iteration", running=scheduler_stats.num_running_reqs, finished=finished)

        def log_engine_initialized(self) -> None:
            pass

    arguments = vllm_engine.options(
        vllm_engine.model(home), num_gpu_blocks_override=BLOCKS, async_scheduling=False
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[Logger])
    events.clear()
    requests: dict[str, dict[str, int]] = {}

    def send(name: str, length: int, new: int, seed: int, n: int = 1) -> None:
        how = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, n=n)
        engine.add_request(name, vllm_engine.prompt(length, seed), how)
        requests[name] = {"prompt": length, "asked": new, "sequences": n, "aborted": 0}

    sent = {
        0: [("a", 30, 8, 1, 1), ("b", 300, 20, 2, 1), ("c", 120, 40, 3, 1)],
        5: [("d", 500, 6, 4, 1), ("twice", 60, 10, 5, 2)],
        12: [("gone-1", 200, 90, 6, 1), ("e", 90, 1, 7, 1)],
        10: [("again", 500, 6, 4, 1)],
        34: [("f", 350, 40, 8, 1), ("g", 350, 40, 9, 1), ("h", 350, 40, 10, 1)],
        50: [("gone-2", 250, 60, 11, 1)],
    }
    number = 0
    while engine.has_unfinished_requests() or number <= max(sent):
        for one in sent.get(number, ()):
            send(*one)
        if number in (30, 52):
            name = "gone-1" if number == 30 else "gone-2"
            engine.abort_request([name])
            requests[name]["aborted"] = 1
        engine.step()
        number += 1
    events.append({"event": "said", "version": __version__, "steps": steps, "requests": requests})
    file.write_text("".join(json.dumps(one) + "\n" for one in events))
    print(f"{len(events)} events of {len(steps)} steps in {file}, {file.stat().st_size} bytes")
