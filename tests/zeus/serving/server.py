"""A small server with a known energy of every request, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeus.serving.columns import Floats, Ints, StepColumns, Updates
from zeus.serving.wire import EngineStep

STEP_NS = 10_000_000
IDLE_W = 60.0
PRIOR = {0.0: [2.0, 0.0, 0.03, 0.0, 2.0, 10.0, *[0.0] * 5, IDLE_W]}
"""Weights of `serve`'s prices, with which twenty updates are enough."""


def step_of(steps: StepColumns, names: list[str], n: int, engine: str = "0") -> EngineStep:
    """One of the steps, as an engine sends it."""
    rows = slice(steps.first_row[n], steps.first_row[n + 1])
    return EngineStep(
        engine,
        n + 1,
        int(steps.begin_ns[n]),
        int(steps.end_ns[n]),
        [names[request] for request in steps.request[rows]],
        steps.prefill[rows].tolist(),
        steps.tokens[rows].tolist(),
        steps.context[rows].tolist(),
    )


@dataclass
class Served:
    steps: StepColumns
    names: list[str]
    updates: Updates
    true_j: Floats
    """Of each request."""
    row_j: Floats

    @property
    def measured_j(self) -> float:
        return float(self.updates.joules.sum())


def serve(
    seed: int,
    *,
    seconds: float = 60.0,
    rate: float = 3.0,
    seen: float = 1.0,
    noise: float = 0.02,
    cost_step_at_s: float | None = None,
    clocks: tuple[float, ...] = (),
    begin_ns: int = 10**15,
) -> Served:
    """Requests of one prefill step and some tens of decode steps, in steps of 10 ms.

    A step costs 2 J by head, 2 mJ per prefill token, 30 mJ per sequence in decode and 10 uJ per
    token of context; idle seconds cost `IDLE_W`. With `clocks` every price is multiplied by each of
    them in turn, for 5 s, and the clock is 1000 MHz times it.
    """
    generator = np.random.default_rng(seed)
    total = int(seconds / (STEP_NS / 1e9))
    count = int(rate * seconds)
    start = np.sort(generator.integers(0, total - 300, count))
    length = generator.integers(2, 200, count)
    prompt = generator.integers(20, 1500, count)
    slot = np.concatenate([np.arange(s, s + n) for s, n in zip(start, length, strict=True)])
    request = np.repeat(np.arange(count), length)
    age = slot - np.repeat(start, length)
    prefill = age == 0
    tokens = np.where(prefill, np.repeat(prompt, length), 1).astype(float)
    context = np.where(prefill, 0, np.repeat(prompt, length) + age).astype(float)
    order = np.lexsort((request, slot))
    slot, request, prefill = slot[order], request[order], prefill[order]
    tokens, context = tokens[order], context[order]
    used, first, sizes = np.unique(slot, return_index=True, return_counts=True)
    head = np.repeat(1.0 / sizes, sizes)
    row_j = 2.0 * head + 2e-3 * tokens * prefill + ~prefill * (0.03 + 1e-5 * context)
    price = np.ones(total)
    if cost_step_at_s is not None:
        price[int(cost_step_at_s * 100) :] = 1.6
    if clocks:
        price = np.array(clocks)[(np.arange(total) // 500) % len(clocks)]
    row_j = row_j * price[slot]
    steps = StepColumns(
        begin_ns + used * STEP_NS,
        begin_ns + (used + 1) * STEP_NS,
        np.concatenate([first, [slot.size]]).astype(np.int64),
        request,
        prefill,
        tokens,
        context,
    )
    by_slot = np.full(total, IDLE_W * STEP_NS / 1e9)
    by_slot[used] = np.add.reduceat(row_j, first)
    updates = _updates(by_slot, seen, noise, generator, begin_ns)
    if clocks:
        mhz = 1000 * price[::10]
        updates = Updates(*list(vars(updates).values())[:5], mhz)
    true_j = np.bincount(request, row_j, count)
    return Served(steps, [f"r{n}" for n in range(count)], updates, true_j, row_j)


def _updates(
    by_slot: Floats, seen: float, noise: float, generator: np.random.Generator, begin_ns: int
) -> Updates:
    """Of 100 ms each; the sensor sees the last part of each."""
    some = max(1, round(10 * seen))
    mean = by_slot.reshape(-1, 10)[:, -some:].mean(axis=1)
    joules = 10 * mean * (1 + generator.normal(0, noise, mean.size))
    begin: Ints = begin_ns + np.arange(mean.size) * 10 * STEP_NS
    end = begin + 10 * STEP_NS
    return Updates(begin, end, joules, end - some * STEP_NS, end, np.full(mean.size, np.nan))
