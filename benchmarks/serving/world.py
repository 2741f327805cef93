"""A simulated inference server whose true energy of every request is known.

Continuous batching with chunked prefill on one GPU. A step's time and energy follow a roofline in
its FLOPs and bytes. The truth of one request is its Shapley value in the energy of each of its
steps: rotated random orders and the same reversed, so that each request stands at every position.
All constants are invented after public figures of an 8B model on an H100. They order methods and
promise nothing about a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class World:
    """One server under one load.

    Attributes:
        name: Its name in tables.
        rate: Requests per second.
        seconds: Length of the run.
        seed: Of arrivals, lengths and noise.
        weights_gb: Read by every step.
        flops_per_token: GFLOP of a token through the model.
        kv_kb: KV cache of one token.
        experts: Active and all experts of a layer, and GB of all of them; None: a dense model.
        draft_tokens: Tokens per decode step with speculative decoding, the accepted one included.
        compute: Relative speed of arithmetic, such as 2 for FP8.
        prompt_mean, output_mean: Tokens.
        cached: Share of the prompt found in the prefix cache.
        clocks: Relative clocks, in turn, each for `clock_s`.
        cost_step_at_s: From then on, bytes and FLOPs of the model cost `cost_factor` times as much.
        burst: Coefficient of variation of the time between arrivals; 1: Poisson.
        tile: Tokens of a step are padded to a multiple of it, up to 256.
        lost: Share of the sensor's updates that are lost, in runs of ten.
        abort: Share of requests that are aborted half way.
        drift: Slow change of power, relative (one sigma).
    """

    name: str
    rate: float
    seconds: float = 200.0
    seed: int = 1
    weights_gb: float = 16.1
    flops_per_token: float = 16.0
    kv_kb: float = 131.0
    experts: tuple[int, int, float] | None = None
    draft_tokens: int = 1
    compute: float = 1.0
    prompt_mean: float = 600.0
    output_mean: float = 220.0
    cached: float = 0.0
    clocks: tuple[float, ...] = (1.0,)
    clock_s: float = 7.0
    cost_step_at_s: float | None = None
    cost_factor: float = 1.5
    burst: float = 1.0
    tile: int = 1
    lost: float = 0.0
    abort: float = 0.0
    drift: float = 0.03
    norm: float = 4.0
    """How much arithmetic hides behind memory traffic: 1 not at all, large ones wholly."""
    static_w: float = 150.0
    """Of the clock, while busy."""
    hard: bool = field(default=False, compare=False)
    """Held to the goals for mixtures, speculation, drift, changing clocks and large batches."""


@dataclass
class Run:
    """The steps of a server, and their true energy.

    Rows are of one request in one step, in the order of the steps.
    """

    world: World
    begin_ns: Ints
    end_ns: Ints
    first_row: Ints
    """Of each step; one more at the end."""
    request: Ints
    prefill: NDArray[np.bool_]
    tokens: Ints
    context: Ints
    clock: Floats
    """Of each step, relative."""
    step_j: Floats
    true_row_j: Floats
    idle_w: float = 75.0

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return int(self.request.max()) + 1

    @property
    def batch(self) -> float:
        """Mean number of requests in a step, over the busy time."""
        length = self.end_ns - self.begin_ns
        return float((np.diff(self.first_row) * length).sum() / length.sum())


@dataclass
class Sensor:
    """A sensor's updates."""

    begin_ns: Ints
    end_ns: Ints
    joules: Floats
    seen_begin_ns: Ints
    seen_end_ns: Ints
    clock_mhz: Floats
    kept: NDArray[np.bool_]
    """Whether the update was received."""


def _cost(world: World) -> Callable[..., tuple[Floats, Floats]]:
    """Seconds and joules of a step as a function of its sums: tokens, attention, KV, logits."""
    active, total, expert_gb = world.experts or (1, 1, 0.0)

    def cost(
        tokens: Floats, attention: Floats, kv: Floats, out: Floats, clock: Floats, price: Floats
    ) -> tuple[Floats, Floats]:
        some = tokens > 0
        run = tokens
        if world.tile > 1:
            run = np.where(tokens <= 256, np.ceil(tokens / world.tile) * world.tile, tokens)
        touched = 1 - (1 - active / total) ** tokens if world.experts else 0.0
        moved = price * (world.weights_gb * 1e9 * some + expert_gb * 1e9 * touched)
        moved = moved + kv * world.kv_kb * 1e3 + tokens * 1.5e5
        flops = price * (run * world.flops_per_token * 1e9) + attention * 5.2e5 + out * 1.0e9
        memory_s = moved / (3.35e12 * 0.8 * np.minimum(1.0, 0.38 + clock))
        compute_s = flops / (989e12 * 0.6 * world.compute * clock)
        length_s = some * 1.2e-3 + (memory_s**world.norm + compute_s**world.norm) ** (
            1 / world.norm
        )
        volt = np.maximum(clock, 1100 / 1980) ** 0.5
        joules = (75 + 60 + world.static_w * clock * volt**2) * length_s
        joules = joules + 45e-12 * moved + 0.78e-12 / world.compute**0.5 * volt**2 * flops
        cap = np.maximum(1.0, joules / np.maximum(length_s, 1e-9) / 700.0)
        return length_s * cap**0.7, joules * cap**-0.3

    return cost


def _lengths(generator: np.random.Generator, mean: float, sigma: float, n: int) -> Ints:
    drawn = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, n)
    return np.clip(drawn, 2, 6000).astype(np.int64)


def serve(world: World, *, chunk: int = 2048, most: int = 256) -> Run:
    """Runs a server over its load."""
    generator = np.random.default_rng(world.seed)
    cost = _cost(world)
    count = int(world.rate * world.seconds * 1.3) + 20
    shape = 1 / world.burst**2
    gaps = generator.gamma(shape, 1 / (shape * world.rate), count)
    arrive = np.cumsum(gaps)
    prompts = _lengths(generator, world.prompt_mean, 0.9, count)
    outputs = _lengths(generator, world.output_mean, 0.8, count)
    cached = np.where(generator.random(count) < 0.8, world.cached, 0.0) * prompts // 16 * 16
    aborted = generator.random(count) < world.abort
    outputs = np.where(aborted, np.maximum(1, outputs // 2), outputs)
    now, following = 0.0, 0
    waiting: list[int] = []
    computed = cached.astype(np.int64)
    running = np.zeros(0, np.int64)  # decoding
    left = outputs.astype(np.float64)
    columns: dict[str, list[Ints]] = {"request": [], "prefill": [], "tokens": [], "context": []}
    begins, ends, counts, clocks, energies = [], [], [], [], []
    drift_knots = generator.normal(0, world.drift, int(world.seconds / 20) + 4)
    while now < world.seconds:
        while following < count and arrive[following] <= now:
            waiting.append(following)
            following += 1
        if not waiting and not running.size:
            if following >= count:
                break
            now = float(arrive[following])
            continue
        drafted = world.draft_tokens
        ids, flags = [running], [np.zeros(running.size, bool)]
        tokens = [np.full(running.size, drafted, np.int64)]
        context = [computed[running]]
        budget, done = chunk - running.size * drafted, []
        for one in list(waiting):
            if budget <= 0 or running.size + len(ids) - 1 >= most:
                break
            part = int(min(budget, prompts[one] - computed[one]))
            ids.append(np.array([one]))
            flags.append(np.array([True]))
            tokens.append(np.array([max(part, 1)]))
            context.append(np.array([computed[one]]))
            computed[one] += part
            budget -= part
            if computed[one] >= prompts[one]:
                waiting.remove(one)
                done.append(one)
        all_ids, all_flags = np.concatenate(ids), np.concatenate(flags)
        all_tokens, all_context = np.concatenate(tokens), np.concatenate(context)
        clock = world.clocks[int(now / world.clock_s) % len(world.clocks)]
        stepped = world.cost_step_at_s is not None and now >= world.cost_step_at_s
        price = world.cost_factor if stepped else 1.0
        attention, kv = _own(all_tokens, all_context)
        out = all_ids.size
        length_s, joules = cost(
            np.array([all_tokens.sum()], float),
            np.array([attention.sum()]),
            np.array([kv.sum()]),
            np.array([out], float),
            np.array([clock]),
            np.array([price]),
        )
        stretch = float(np.exp(generator.normal(0, 0.015)))
        slow = 1 + np.interp(now / 20, np.arange(drift_knots.size), drift_knots)
        length = float(length_s[0]) * stretch
        begins.append(now)
        ends.append(now + length)
        counts.append(all_ids.size)
        clocks.append(clock)
        energies.append(float(joules[0]) * stretch * slow * (1 + generator.normal(0, 0.02)))
        for name, values in zip(
            columns, (all_ids, all_flags, all_tokens, all_context), strict=True
        ):
            columns[name].append(values)
        if running.size:
            accepted = 1
            if drafted > 1:
                accepted = 1 + generator.binomial(drafted - 1, 0.65, running.size)
            computed[running] += accepted
            left[running] -= accepted
            running = running[left[running] > 0]
        if done:
            running = np.concatenate([running, np.array(done)])
            left[np.array(done)] -= 1
        now += length + (0.0003 if generator.random() < 0.05 else 0.0)
    run = Run(
        world,
        (np.array(begins) * 1e9).astype(np.int64),
        (np.array(ends) * 1e9).astype(np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate(columns["request"]),
        np.concatenate(columns["prefill"]).astype(bool),
        np.concatenate(columns["tokens"]),
        np.concatenate(columns["context"]),
        np.array(clocks),
        np.array(energies),
        np.zeros(0),
    )
    _, run.request = np.unique(run.request, return_inverse=True)
    run.true_row_j = shapley(run, cost)
    return run


def _own(tokens: Ints, context: Ints) -> tuple[Floats, Floats]:
    return tokens * (context + tokens / 2.0), (context + tokens).astype(np.float64)


def shapley(
    run: Run, cost: Callable[..., tuple[Floats, Floats]], orders: int | None = None
) -> Floats:
    """Each row's Shapley value of its step's energy, J.

    Args:
        run: The run; its `step_j` is divided.
        cost: Time and energy of a subset by its sums.
        orders: Orders per step; half are rotations of one random order per step, half reversed.
            None: enough for a sampling error below one percent.
    """
    generator = np.random.default_rng(run.world.seed + 1000)
    rows = run.request.size
    sizes = np.diff(run.first_row)
    step = np.repeat(np.arange(sizes.size), sizes)
    first, size = run.first_row[step], sizes[step]
    attention, kv = _own(run.tokens, run.context)
    own = np.stack([run.tokens.astype(float), attention, kv, np.ones(rows)])
    clock = run.clock[step]
    step_ns = np.inf if run.world.cost_step_at_s is None else run.world.cost_step_at_s * 1e9
    price = np.where(run.begin_ns >= step_ns, run.world.cost_factor, 1.0)[step]
    shuffled = np.lexsort((generator.random(rows), step))  # rows of a step stay together
    position = np.arange(rows) - first
    total = np.zeros(rows)
    if orders is None:
        orders = 120 if run.batch < 15 else 240
    half = max(1, orders // 2)
    for turn in range(half):
        shift = (turn * size) // half
        source = shuffled[first + (position + shift) % size]
        for order in (source, source[first + (size - 1 - position)]):
            sums = np.cumsum(own[:, order], axis=1)
            before_step = np.where(first > 0, 1, 0) * sums[:, np.maximum(first - 1, 0)]
            after = sums - before_step
            after = np.maximum(after, 0)
            _, joules = cost(*after, clock, price)
            gain = np.diff(joules, prepend=0.0)
            gain[run.first_row[:-1]] = joules[run.first_row[:-1]]
            total[order] += gain
    by_step = np.add.reduceat(total, run.first_row[:-1])
    share: Floats = total / by_step[step] * run.step_j[step]
    return share


def sense(run: Run, seen: float, *, period_s: float = 0.1, noise: float = 0.03) -> Sensor:
    """The readings of a sensor during a run.

    Args:
        run: The run.
        seen: Share of each update period that the sensor measures, at its end.
        period_s: Update period.
        noise: Of one update, relative.
    """
    generator = np.random.default_rng(run.world.seed + 2000)
    end_s = run.end_ns[-1] / 1e9 + 1.0
    edges = (np.arange(int(end_s / period_s) + 1) * period_s * 1e9).astype(np.int64)
    begin, end = edges[:-1], edges[1:]
    seen_begin = end - np.round((end - begin) * seen).astype(np.int64)
    knots = np.stack([run.begin_ns, run.end_ns], axis=1).ravel()
    gone = np.stack([np.zeros_like(run.step_j), run.step_j], axis=1)
    energy = (np.concatenate([[0], np.cumsum(run.step_j)])[:-1, None] + gone).ravel()
    length = (run.end_ns - run.begin_ns) / 1e9
    none = np.stack([np.zeros_like(length), length], axis=1)
    busy = (np.concatenate([[0], np.cumsum(length)])[:-1, None] + none).ravel()

    def between(a: Ints, b: Ints) -> Floats:
        joules = np.interp(b, knots, energy) - np.interp(a, knots, energy)
        busy_s = np.interp(b, knots, busy) - np.interp(a, knots, busy)
        return joules + run.idle_w * ((b - a) / 1e9 - busy_s)

    joules = between(seen_begin, end) * (end - begin) / (end - seen_begin)
    joules *= 1 + generator.normal(0, noise, joules.size)
    clock = np.array(run.world.clocks)
    which = (((begin + end) / 2e9) / run.world.clock_s).astype(int) % clock.size
    kept = np.ones(begin.size, bool)
    while kept.size and 1 - kept.mean() < run.world.lost:
        at = int(generator.integers(kept.size))
        kept[at : at + 10] = False
    return Sensor(begin, end, joules, seen_begin, end, clock[which] * 1980, kept)


def truth(run: Run, sensor: Sensor) -> Floats:
    """J of each request in the time that the received updates cover."""
    edges = np.concatenate([sensor.begin_ns, sensor.end_ns[-1:]])
    covered = np.concatenate([[0], np.cumsum(np.where(sensor.kept, np.diff(edges), 0))])
    length = np.maximum(run.end_ns - run.begin_ns, 1)
    share = (
        np.interp(run.end_ns, edges, covered) - np.interp(run.begin_ns, edges, covered)
    ) / length
    step = np.repeat(np.arange(share.size), np.diff(run.first_row))
    found: Floats = np.bincount(run.request, run.true_row_j * share[step], run.requests)
    return found
