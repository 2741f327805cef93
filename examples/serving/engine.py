"""An inference engine of one file, on a simulated GPU: continuous batching without a model.

A step reads the weights once, computes prompts in pieces of 4 tokens, and decodes one token of each
running sequence. What each of these costs is in profile.csv, and the node reports the true energy
of a step. So the energy of every request is known: its own pieces and tokens, and its share of the
rest by head.
"""

from __future__ import annotations

import csv
import random
import time
from dataclasses import dataclass
from pathlib import Path

from zeus.serving import Recorder
from zeus_common.simulation import SimulatedNode, SimulatedWork

PROFILE = Path(__file__).with_name("profile.csv")
PIECE = 4
"""Prompt tokens of one `prefill` instruction."""
MOST_TOKENS = 512
"""Of a step."""


@dataclass
class Request:
    """What a client asked for."""

    name: str
    arrives_s: float
    prompt: int
    output: int
    computed: int = 0
    true_j: float = 0.0


def load(seconds: float, rate: float, seed: int) -> list[Request]:
    """Requests that arrive at random."""
    generator = random.Random(seed)
    found: list[Request] = []
    at = 0.0
    while (at := at + generator.expovariate(rate)) < seconds:
        prompt, output = generator.randrange(20, 600), generator.randrange(10, 120)
        found.append(Request(f"request-{len(found)}", at, prompt, output))
    return found


class Engine:
    """Runs requests, and records its steps.

    Args:
        devices: Socket of the simulated node's devices.
        gpu: UUID.
        recorder: Where steps go.
    """

    def __init__(self, devices: str, gpu: str, recorder: Recorder) -> None:
        self._work = SimulatedWork(devices, [gpu], f"profile:{PROFILE}#stage=0&blocking_w=60")
        self._recorder = recorder
        self._node = SimulatedNode(devices)
        with PROFILE.open() as file:
            rows = list(csv.DictReader(file))
        self._joules = {row["instruction"]: float(row["energy"]) for row in rows}

    def run(self, requests: list[Request]) -> None:
        """Serves requests until all are done."""
        begin_s = time.monotonic()
        waiting, running = list(requests), []
        while waiting or running:
            now_s = time.monotonic() - begin_s
            while waiting and waiting[0].arrives_s <= now_s:
                running.append(waiting.pop(0))
            if running:
                running = self._step(running)
            else:
                time.sleep(max(0.0, waiting[0].arrives_s - now_s))
        self._work.close()

    def _step(self, running: list[Request]) -> list[Request]:
        before_j = self._node.true_energy_j(0)
        begin_ns = time.monotonic_ns()
        budget = MOST_TOKENS
        plan: list[tuple[Request, bool, int]] = []
        for one in running:
            prefill = one.computed < one.prompt
            tokens = min(one.prompt - one.computed, budget) if prefill else 1
            if tokens > 0:
                plan.append((one, prefill, tokens))
                budget -= tokens
        pieces = sum(tokens for _, prefill, tokens in plan if prefill) / PIECE
        self._work.launch(1, "weights")
        if pieces:
            self._work.launch(pieces, "prefill")
        decoding = sum(not prefill for _, prefill, _ in plan)
        if decoding:
            self._work.launch(decoding, "decode")
        self._work.synchronize()
        self._recorder.step(
            begin_ns,
            time.monotonic_ns(),
            [one.name for one, _, _ in plan],
            [prefill for _, prefill, _ in plan],
            [tokens for _, _, tokens in plan],
            [one.computed for one, _, _ in plan],
        )
        own_j = [
            tokens / PIECE * self._joules["prefill"] if prefill else self._joules["decode"]
            for _, prefill, tokens in plan
        ]
        shared_j = self._node.true_energy_j(0) - before_j - sum(own_j)
        for (one, _, tokens), own in zip(plan, own_j, strict=True):
            one.true_j += own + shared_j / len(plan)
            one.computed += tokens
            if one.computed >= one.prompt + one.output:
                self._recorder.finish(one.name)
        return [one for one in running if one.computed < one.prompt + one.output]
