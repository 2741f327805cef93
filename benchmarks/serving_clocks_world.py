"""A serving engine on an invented GPU: continuous batching, chunked prefill, clocks, power.

Used by `serving_clocks.py`. One step's time is overhead plus the 4-norm of memory time and compute
time; memory needs SM clock below a knee. The models are invented, except the first one, which
reproduces published decode times and powers of an 8B model on an H100. They can compare methods,
and say nothing about a real GPU.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zeus.serving.clock_load import Queue, Step

CHUNK = 2048
"""Tokens that one step schedules at most."""

MOST_SEQUENCES = 256

IDLE_CALL_S = 0.05
"""How often the controller is called while no step runs, or no statistics come."""

STALE_S = 0.3
"""Age of the effective clock that the controller sees."""


@dataclass(frozen=True)
class Truth:
    """A GPU and a model.

    `memory_knee`: share of the highest clock below which bandwidth falls with the clock; 1: at
    once. `experts`: token count at which 63 % of a mixture's weights are read; 0: a dense model.
    """

    name: str
    max_mhz: int = 1980
    overhead_s: float = 0.0012
    weights_gb: float = 16.1
    first_expert: float = 1.0  # share of the weights that one token reads
    experts: float = 0.0
    kv_bytes: float = 131e3
    kv_gb: float = 54.0
    bandwidth_gb_s: float = 2680.0
    flops: float = 593e12
    parameters: float = 8.03e9
    memory_knee: float = 0.626
    overhead_clock: float = 0.0  # share of the overhead that falls with the clock
    idle_w: float = 75.0
    active_w: float = 60.0
    clock_w: float = 150.0
    pj_byte: float = 45.0
    pj_flop: float = 0.78
    limit_w: float = 700.0
    volts_low: float = 0.70
    volts_from: float = 0.555  # voltage is flat below this share of the highest clock
    gpus: int = 1

    def clocks(self) -> list[int]:
        """Ten clocks from the highest down to 45 % of it."""
        return [round(self.max_mhz * (1 - 0.0606 * level) / 15) * 15 for level in range(10)]

    def volts2(self, r: float) -> float:
        """Voltage squared over that at the highest clock."""
        above = max(0.0, r - self.volts_from) / (1 - self.volts_from)
        return (self.volts_low + (1 - self.volts_low) * min(1.0, above)) ** 2


class Gpu:
    """A truth's step times and powers at one clock; made once per clock and slow-down."""

    def __init__(self, truth: Truth, mhz: float, slower: float = 1.0) -> None:
        r = mhz / truth.max_mhz
        self._truth = truth
        self._volts2 = truth.volts2(r)
        knee = max(1.0, truth.memory_knee / r)
        self._byte_s = knee / (truth.bandwidth_gb_s * 1e9)
        self._token_s = slower * 2 * truth.parameters / (truth.flops * r)
        self._overhead_s = truth.overhead_s * (1 - truth.overhead_clock + truth.overhead_clock / r)
        self._base_w = truth.idle_w + truth.active_w + truth.clock_w * r * self._volts2

    def step(self, sequences: int, context: float, prefill: int) -> tuple[float, float]:
        """Seconds and watts of one step."""
        truth = self._truth
        tokens = sequences + prefill
        read = truth.weights_gb * 1e9
        if truth.experts:
            touched = 1 - math.exp(-tokens / truth.experts)
            read *= truth.first_expert + (1 - truth.first_expert) * touched
        read += context * truth.kv_bytes
        compute = tokens * self._token_s
        memory = read * self._byte_s
        time_s = self._overhead_s + math.sqrt(math.sqrt(memory**4 + compute**4))
        work = (
            truth.pj_byte * read + truth.pj_flop * self._volts2 * 2 * truth.parameters * tokens
        ) * 1e-12
        power = self._base_w + work / time_s
        if power > truth.limit_w:
            time_s *= (power / truth.limit_w) ** 0.4
            power = truth.limit_w
        return time_s, power


@dataclass
class Load:
    """Requests: arrival s, prompt tokens, output tokens; in order of arrival."""

    arrivals: list[float]
    prompts: list[int]
    outputs: list[int]


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths, clipped."""

    prompt: float = 600.0
    output: float = 210.0
    prompt_sigma: float = 1.1
    output_sigma: float = 0.9
    longest_prompt: int = 8000
    shortest_output: int = 12
    longest_output: int = 1500

    def draw(self, rng: random.Random, prompt_scale: float = 1.0, output_scale: float = 1.0
             ) -> tuple[int, int]:  # fmt: skip
        """One request's."""
        prompt = rng.lognormvariate(
            math.log(self.prompt * prompt_scale) - self.prompt_sigma**2 / 2, self.prompt_sigma
        )
        output = rng.lognormvariate(
            math.log(self.output * output_scale) - self.output_sigma**2 / 2, self.output_sigma
        )
        longest = self.longest_prompt * max(1.0, prompt_scale)
        return (
            int(min(max(prompt, 16), longest)),
            int(min(max(output, self.shortest_output), self.longest_output)),
        )


def make_load(
    seed: int,
    rate: Callable[[float], float],
    highest_rate: float,
    duration_s: float,
    lengths: Lengths,
    cv: float = 1.0,
    scales: Callable[[float], tuple[float, float]] = lambda t: (1.0, 1.0),
) -> Load:
    """Arrivals with a rate over time, and gaps of this coefficient of variation (gamma)."""
    rng = random.Random(seed)
    shape = 1 / cv**2
    load = Load([], [], [])
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1 / (shape * highest_rate))
        if now >= duration_s:
            return load
        if rng.random() < rate(now) / highest_rate:
            prompt, output = lengths.draw(rng, *scales(now))
            load.arrivals.append(now)
            load.prompts.append(prompt)
            load.outputs.append(output)


class Controller(Protocol):
    """Chooses clocks."""

    def step(self, step: Step, queue: Queue) -> int: ...

    def finished(self, ttft_s: float, tpot_s: float) -> None: ...

    def idle(self, now_s: float) -> int: ...


@dataclass
class Outcome:
    """One run."""

    energy_j: float = 0.0
    violations: float = 0.0  # share of requests
    ttft_violations: float = 0.0
    tpot_violations: float = 0.0
    changes_per_minute: float = 0.0
    top_share: float = 0.0  # of busy time at the highest clock
    duration_s: float = 0.0
    busy_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0
    blind_s: float = 0.0  # longest wait for the highest clock after statistics stopped
    clocks: dict[int, float] = field(default_factory=dict)  # busy seconds by clock


def no_cap(now_s: float) -> float:
    """No thermal capping."""
    return math.inf


def simulate(  # one loop, for speed
    truth: Truth,
    load: Load,
    controller: Controller | int,
    *,
    ttft_s: float,
    tpot_s: float,
    seed: int,
    slower: Callable[[float], float] | None = None,
    cap_mhz: Callable[[float], float] | None = None,
    silent: Callable[[float], bool] | None = None,
    energy_every_s: float = 1.0,
) -> Outcome:
    """Serves all requests.

    Args:
        truth: GPU and model.
        load: Requests.
        controller: Chooses clocks; or one constant clock, MHz.
        ttft_s: Objective, s.
        tpot_s: Objective for each request's mean, s.
        seed: Of noise in step times, and in the time that changes take.
        slower: Factor on compute time over time.
        cap_mhz: Highest effective clock over time.
        silent: Whether statistics stop at a time.
        energy_every_s: Interval at which the controller gets the board's energy, as from clock
            control; 0: never.
    """
    rng = random.Random(seed)
    noise = [math.exp(rng.gauss(0.0, 0.03)) for _ in range(4096)]
    policy = None if isinstance(controller, int) else controller
    asked = truth.max_mhz if policy is not None else int(controller)
    arrivals, prompts, outputs = load.arrivals, load.prompts, load.outputs
    total = len(arrivals)
    prefix = [0]
    for prompt in prompts:
        prefix.append(prefix[-1] + prompt)
    gpus: dict[tuple[float, float], Gpu] = {}
    set_mhz: float = asked
    pending: list[tuple[float, int]] = []  # changes under way
    asked_at = -1.0
    now = arrived = head = head_done = 0
    now = 0.0
    sequences, context, count = 0, 0, 0
    ends: list[tuple[int, int]] = []  # step at which a request ends, request
    first: dict[int, float] = {}
    ttfts: list[float] = []
    tpots: list[float] = []
    late_first = late_mean = late = 0
    energy = busy = at_top = 0.0
    changes = 0
    by_clock: dict[int, float] = {}
    silent_since = -1.0
    blind = 0.0
    told_j, told_at = 0.0, 0.0
    idle_w = truth.idle_w
    top = truth.max_mhz

    def ask(clock: int) -> None:
        nonlocal asked, asked_at, changes
        if clock != asked:
            changes += 1
            takes = rng.uniform(0.01, 0.02) if rng.random() > 0.02 else rng.uniform(0.05, 0.2)
            pending.append((max(now + takes, pending[-1][0] if pending else 0.0), clock))
            asked, asked_at = clock, now

    while head < total or sequences:
        if head >= arrived and not sequences and arrivals[head] > now:
            until = arrivals[head]  # nothing to do
            while policy is not None and now + IDLE_CALL_S < until:
                now += IDLE_CALL_S
                energy += idle_w * IDLE_CALL_S
                while pending and pending[0][0] <= now:
                    set_mhz = pending.pop(0)[1]
                ask(policy.idle(now))
            energy += idle_w * (until - now)
            now = until
        while arrived < total and arrivals[arrived] <= now:
            arrived += 1
        # The work of this step.
        budget = CHUNK - sequences
        computed = 0
        joining = []
        while head < arrived and budget > 0:
            if sequences + len(joining) >= MOST_SEQUENCES:
                break
            if (context + prompts[head]) * truth.kv_bytes > truth.kv_gb * 1e9 and sequences:
                break
            part = min(budget, prompts[head] - head_done)
            computed += part
            budget -= part
            head_done += part
            if head_done < prompts[head]:
                break
            joining.append(head)
            head += 1
            head_done = 0
        began = now
        left = noise[count & 4095]
        slow = slower(now) if slower is not None else 1.0
        cap = cap_mhz(now) if cap_mhz is not None else math.inf
        while True:
            while pending and pending[0][0] <= now:
                set_mhz = pending.pop(0)[1]
            mhz = set_mhz if set_mhz < cap else cap
            gpu = gpus.get((mhz, slow))
            if gpu is None:
                gpu = gpus[mhz, slow] = Gpu(truth, mhz, slow)
            time_s, power = gpu.step(sequences, context, computed)
            time_s *= left
            if pending and pending[0][0] < now + time_s:
                part_s = pending[0][0] - now
                left *= 1 - part_s / time_s
                energy += power * part_s
                now = pending[0][0]
                if set_mhz == top:
                    at_top += part_s
                continue
            energy += power * time_s
            now += time_s
            if set_mhz == top:
                at_top += time_s
            break
        busy += now - began
        by_clock[int(set_mhz)] = by_clock.get(int(set_mhz), 0.0) + now - began
        count += 1
        decoded = sequences
        decoded_context = context
        done: list[int] = []
        context += sequences
        while ends and ends[0][0] == count:
            done.append(heapq.heappop(ends)[1])
        for request in done:
            sequences -= 1
            context -= prompts[request] + outputs[request]
        for request in joining:
            first[request] = now
            if outputs[request] > 1:
                sequences += 1
                context += prompts[request] + 1
                heapq.heappush(ends, (count + outputs[request] - 1, request))
            else:
                done.append(request)
        told = []
        for request in done:
            ttft = first[request] - arrivals[request]
            mean = (now - first.pop(request)) / max(1, outputs[request] - 1)
            ttfts.append(ttft)
            tpots.append(mean)
            late_first += ttft > ttft_s
            late_mean += mean > tpot_s
            late += ttft > ttft_s or mean > tpot_s
            told.append((ttft, mean))
        if policy is None:
            continue
        while arrived < total and arrivals[arrived] <= now:
            arrived += 1
        if silent is not None and silent(now):
            if silent_since < 0:
                silent_since = next_call = now
            if now >= next_call:
                next_call = now + IDLE_CALL_S
                ask(policy.idle(now))
            if asked != top:
                blind = max(blind, now - silent_since)
            continue
        silent_since = -1.0
        if energy_every_s and hasattr(policy, "energy") and now >= told_at + energy_every_s:
            policy.energy(told_at, now, energy - told_j)
            told_j, told_at = energy, now
        waiting = arrived - head
        queue = Queue(
            waiting,
            prefix[arrived] - prefix[head] - head_done,
            now - arrivals[head] if waiting else 0.0,
        )
        effective = float(asked) if now - asked_at < STALE_S else float(min(asked, cap))
        step = Step(began, now, computed, decoded, decoded_context, effective)
        if count & 1:  # just before or just after the step that ended the request
            for ttft, mean in told:
                policy.finished(ttft, mean)
            ask(policy.step(step, queue))
        else:
            clock = policy.step(step, queue)
            for ttft, mean in told:
                policy.finished(ttft, mean)
            ask(clock)
    number = max(1, len(ttfts))
    return Outcome(
        energy_j=energy * truth.gpus,
        violations=late / number,
        ttft_violations=late_first / number,
        tpot_violations=late_mean / number,
        changes_per_minute=60 * changes / max(now, 1.0),
        top_share=at_top / max(busy, 1e-9),
        duration_s=now,
        busy_s=busy,
        ttft_p99_s=_quantile(ttfts, 0.99),
        tpot_p99_s=_quantile(tpots, 0.99),
        blind_s=blind,
        clocks=by_clock,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
