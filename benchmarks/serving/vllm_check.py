"""Compares the records of the probe in the scheduler with vLLM's own statistics."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine

from zeus.serving.receiver import Receiver
from zeus.serving.vllm.probe import MODE_ENV
from zeus.serving.vllm.stats import FrontEnd
from zeus.serving.wire import SOCKET_ENV, Arrival, EngineStep, Finish, Message

BLOCKS = 32
"""Of the KV cache, of 128 tokens: few enough for preemptions."""


@dataclass
class Listened:
    """Messages that a recorder sent."""

    steps: list[EngineStep] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def take(self, message: Message) -> bool:
        if isinstance(message, EngineStep):
            self.steps.append(message)
        elif isinstance(message, Arrival):
            self.arrivals.append(message)
        elif isinstance(message, Finish):
            self.finished.append(message.request)
        return True


@dataclass
class Said:
    """Statistics of vLLM's front end."""

    details: list[Any] = field(default_factory=list)
    finished: dict[str, Any] = field(default_factory=dict)
    front: FrontEnd = field(default_factory=FrontEnd)
    rows: list[Any] = field(default_factory=list)
    generated: int = 0
    computed: int = 0


def check(home: Path, *, ahead: bool) -> None:
    """Prints the comparison. Exits with 1 if something differs."""
    os.environ[MODE_ENV] = "steps"
    os.environ[SOCKET_ENV] = str(home / "steps.sock")
    listened, ended = Listened(), threading.Event()
    receiver = Receiver(str(home / "steps.sock"), listened.take)

    def receive() -> None:
        while not ended.wait(0.05):
            receiver.receive()

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        said, outputs = asyncio.run(_drive(home, ahead=ahead))
        time.sleep(0.5)
    finally:
        ended.set()
        thread.join()
        receiver.close()
    wrong = list(_compare(listened, said, outputs))
    print("\n".join(wrong) or "all agree")
    raise SystemExit(bool(wrong))


async def _drive(home: Path, *, ahead: bool) -> tuple[Said, dict[str, tuple[int, int, int]]]:
    """Serves several kinds of load; returns statistics, and prompt, output and cached tokens."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    from zeus.serving.vllm.stats import EnergyStatLogger

    said = Said()

    class Logger(StatLoggerBase):
        """Keeps the statistics, and builds steps from them as the plugin does."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.plugin = EnergyStatLogger(vllm_config, engine_index)
            self.plugin._recorder = _Rows(said.rows)
            said.front = self.plugin._front_end

        def record(self, scheduler_stats=None, iteration_stats=None, *more, **named) -> None:
            self.plugin.record(scheduler_stats, iteration_stats)
            if scheduler_stats is not None and scheduler_stats.iteration_details is not None:
                said.details.append(scheduler_stats.iteration_details)
            if iteration_stats is not None:
                said.generated += iteration_stats.num_generation_tokens
                said.computed += iteration_stats.prompt_token_stats.computed
                said.finished.update({r.request_id: r for r in iteration_stats.finished_requests})

        def log_engine_initialized(self) -> None:
            pass

    began = time.monotonic()
    arguments = vllm_engine.options(
        vllm_engine.model(home),
        async_scheduling=ahead,
        num_gpu_blocks_override=BLOCKS,
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Logger])
    scheduler = engine.vllm_config.scheduler_config
    print(
        f"vLLM started in {time.monotonic() - began:.0f} s, asynchronous scheduling: "
        f"{scheduler.async_scheduling}"
    )
    outputs: dict[str, tuple[int, int, int]] = {}

    async def one(name: str, length: int, new: int, stop_at: int = 0, n: int = 1, seed=0) -> None:
        how = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, n=n)
        tokens, last = Counter(), None
        stream = engine.generate(
            vllm_engine.prompt(length, seed or hash(name)), how, request_id=name
        )
        async for last in stream:
            for output in last.outputs:
                tokens[output.index] = len(output.token_ids)
            if stop_at and tokens[0] >= stop_at:
                await engine.abort(name)
                break
        for index, count in tokens.items():
            outputs[name if n == 1 else f"{index}_{name}"] = (
                -1 if stop_at else length,
                count,
                last.num_cached_tokens or 0,
            )

    await asyncio.gather(*[one(f"mixed-{i}", 20 + 31 * i, 4 + 9 * i) for i in range(10)])
    await one("cold", 600, 5, seed=7)
    await one("warm", 600, 5, seed=7)
    await asyncio.gather(*[one(f"aborted-{i}", 100, 200, stop_at=3 + i) for i in range(5)])
    await one("twice", 80, 12, n=2)
    await asyncio.gather(*[one(f"long-{i}", 400, 300) for i in range(12)])  # more than fits
    same = [one("same", 50, 20), one("same", 60, 25)]
    await asyncio.gather(*same)
    await asyncio.sleep(0.5)
    engine.shutdown()
    said.rows += [
        row for row, _ in said.front.ready(2**62)
    ]  # also steps that wait for aborted requests
    return said, outputs


class _Rows:
    """Receives the messages that the front end's plugin would send."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def step(self, *row: Any) -> None:
        self._rows.append(row)

    def finish(self, request: str, tenant: str = "") -> None:
        pass


def _compare(listened: Listened, said: Said, outputs: dict[str, tuple[int, int, int]]):
    """Yields a sentence for each difference."""
    steps = listened.steps
    numbers = [one.number for one in steps]
    if numbers != list(range(1, len(steps) + 1)):
        yield "steps are missing"
    if any(one.begin_ns > one.end_ns for one in steps):
        yield "a step ends before it begins"
    ends = [one.end_ns for one in steps]
    if ends != sorted(ends):
        yield "steps are out of order"

    details = [one for one in said.details if not one.is_dummy]
    differing = 0
    for step, detail in zip(steps, details, strict=False):
        prompts = sum(t for t, p in zip(step.tokens, step.prefill, strict=True) if p)
        decodes = sum(t for t, p in zip(step.tokens, step.prefill, strict=True) if not p)
        theirs = detail.num_ctx_tokens + detail.num_generation_tokens
        differing += prompts + decodes != theirs or len(step.ids) != (
            detail.num_ctx_requests + detail.num_generation_requests
        )
    print(f"steps: {len(steps)} by the probe, {len(details)} by vLLM's details, {differing} differ")
    if len(steps) != len(details) or differing:
        yield "steps differ from vLLM's details"

    prefilled, decoded, reached, again = Counter(), Counter(), {}, Counter()
    for step in steps:
        rows = zip(step.ids, step.prefill, step.tokens, step.context, strict=True)
        for name, prefill, tokens, context in rows:
            (prefilled if prefill else decoded)[name] += tokens
            if context < reached.get(name, 0):
                again[name] += 1  # preempted: computed once more
            reached[name] = context + tokens
    preempted = {n for n, r in said.finished.items() if r.num_preemptions}
    print(f"requests: {len(reached)}, preempted: {len(preempted)} by vLLM, {len(again)} by rows")
    if not set(again) >= preempted & set(reached):
        yield f"vLLM preempted {sorted(preempted - set(again))}, the rows do not show it"
    for name, (length, new, cached) in sorted(outputs.items()):
        if name == "same":  # two at once: one keeps the name
            continue
        if name not in reached:
            yield f"{name} is in no step"
        elif length < 0 or name in again:
            continue  # aborted, or computed twice
        elif (prefilled[name], decoded[name]) != (length - cached, new - 1):
            yield (
                f"{name}: {prefilled[name]} + {decoded[name]} tokens by rows, "
                f"{length - cached} + {new - 1} by vLLM"
            )
    same = [name for name in reached if name.startswith("same")]
    if len(same) != 2 or "same" not in same:
        yield f"two requests of one id are {same}"
    print(f"cached of the repeated prompt: {outputs['warm'][2]} tokens")
    if not outputs["warm"][2]:
        yield "the prefix cache was not hit"
    if sorted(listened.finished) != sorted(reached):
        yield f"ends: {sorted(set(reached) ^ set(listened.finished))} differ"
    if sorted(one.request for one in listened.arrivals) != sorted(reached):
        yield "arrivals differ from requests"
    lengths = {one.request: one.prompt for one in listened.arrivals}
    if any(
        length >= 0 and lengths[n] != length for n, (length, _, _) in outputs.items() if n != "same"
    ):
        yield "arrivals have other prompts"

    front: Counter[str] = Counter()
    for _, _, names, _, tokens, _ in said.rows:
        for name, count in zip(names, tokens, strict=True):
            front[name] += count
    # Their names are callers' ids, without the number of a sequence.
    known = [n for n in front if n in reached and n not in again and n != "same"]
    apart = [n for n in known if abs(front[n] - prefilled[n] - decoded[n]) > 1.5]
    print(f"front end alone: {len(said.rows)} steps, tokens of {len(known)} requests compared")
    if apart:
        yield f"the front end's tokens differ: {apart}"
