"""Twenty-four loads on invented GPUs and models, for `serving_clocks.py`.

The first twelve are those of the reference table: its scenarios, with lengths of prompts and
outputs chosen so that static clocks give about its figures. Twelve more have other GPUs, models and
loads. Settings were tuned on those marked `tuned`, with other seeds than those reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving_clocks_world import Lengths, Load, Truth, make_load

H100 = Truth("8B on an H100")
CLOCK_BOUND = Truth("8B, decode bound by clock", memory_knee=1.0, clock_w=190.0, overhead_clock=0.5)
CARD_400W = Truth(
    "30B, decode bound by clock, 400 W card",
    max_mhz=2400,
    overhead_s=0.002,
    weights_gb=32.0,
    first_expert=0.2,
    experts=30.0,
    kv_bytes=98e3,
    kv_gb=30.0,
    bandwidth_gb_s=1400.0,
    flops=200e12,
    parameters=3.3e9,
    memory_knee=1.0,
    idle_w=40.0,
    active_w=40.0,
    clock_w=170.0,
    limit_w=400.0,
)
BANDWIDTH = Truth(
    "32B, bandwidth bound",
    max_mhz=1410,
    overhead_s=0.0015,
    weights_gb=32.0,
    kv_bytes=131e3,
    kv_gb=40.0,
    bandwidth_gb_s=1600.0,
    flops=190e12,
    parameters=16e9,
    memory_knee=0.42,
    idle_w=60.0,
    active_w=50.0,
    clock_w=110.0,
    limit_w=400.0,
)
SMALL = Truth(
    "1B model, overhead of the host",
    overhead_s=0.003,
    weights_gb=2.5,
    kv_bytes=33e3,
    parameters=1.24e9,
    clock_w=160.0,
)
EXPERTS = Truth(
    "mixture of experts",
    weights_gb=60.0,
    first_expert=0.08,
    experts=24.0,
    kv_bytes=98e3,
    kv_gb=60.0,
    bandwidth_gb_s=3800.0,
    parameters=3.3e9,
    memory_knee=0.55,
    overhead_s=0.002,
)
PAIR = Truth(
    "70B on a tensor-parallel pair",
    overhead_s=0.0035,
    weights_gb=70.0,
    kv_bytes=164e3,
    kv_gb=60.0,
    flops=560e12,
    parameters=35e9,
    memory_knee=0.7,
    gpus=2,
)
DEAR_SECONDS = Truth(
    "seconds are expensive",
    memory_knee=1.0,
    idle_w=50.0,
    active_w=230.0,
    clock_w=45.0,
    pj_byte=20.0,
    volts_low=0.8,
)

CHAT = Lengths()


@dataclass(frozen=True)
class Scenario:
    """One load on one GPU.

    Attributes:
        page: The reference table's saving of the policy, percent; None: none of its scenarios.
        changing: Bursts, spikes and drift: where no static clock can be right.
        top: Nothing can be saved, or an objective is lost at any clock.
        options: Further arguments of `simulate`.
    """

    name: str
    truth: Truth
    load: Callable[[int], Load]
    ttft_s: float = 0.5
    tpot_s: float = 0.025
    page: float | None = None
    changing: bool = False
    top: bool = False
    tuned: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def steady(
    rate: float, lengths: Lengths = CHAT, cv: float = 1.0, duration_s: float = 300.0
) -> Callable[[int], Load]:
    return lambda seed: make_load(seed, lambda t: rate, rate, duration_s, lengths, cv)


def varying(
    rate: Callable[[float], float], highest: float, lengths: Lengths = CHAT, **more: Any
) -> Callable[[int], Load]:
    return lambda seed: make_load(seed, rate, highest, 300.0, lengths, **more)


def day(low: float, high: float, period_s: float = 300.0) -> Callable[[float], float]:
    return lambda t: low + (high - low) * 0.5 * (1 - math.cos(2 * math.pi * t / period_s))


def spike(low: float, high: float) -> Callable[[float], float]:
    return lambda t: high if 140.0 <= t < 160.0 else low


def in_turn(t: float) -> tuple[float, float]:
    """Long prompts and short outputs, then the other way round."""
    return (2.0, 0.3) if int(t / 40.0) % 2 else (0.5, 1.7)


PAGE = [
    Scenario("0.2/s", H100, steady(0.2), page=-16.6, tuned=True),
    Scenario("3/s", H100, steady(3.0), page=-30.4, tuned=True),
    Scenario("10/s", H100, steady(10.0), page=-32.9),
    Scenario("18/s, near saturation", H100, steady(18.0), page=-16.7, tuned=True),
    Scenario("bursty, CV 3, 6/s", H100, steady(6.0, cv=3.0), page=-26.9, changing=True, tuned=True),
    Scenario("day 1..14/s", H100, varying(day(1, 14), 14), page=-30.4),
    Scenario("spike 4 -> 24/s", H100, varying(spike(4, 24), 24), page=-27.9, changing=True),
    Scenario(
        "drift: prompts x 4",
        H100,
        varying(lambda t: 7.6, 7.6, scales=lambda t: (1 + 3 * t / 300, 1.0)),
        page=-11.4,
        changing=True,
        tuned=True,
    ),
    Scenario(
        "drift: compute 1.6x slower",
        H100,
        steady(10.0),
        page=-28.2,
        changing=True,
        options={"slower": lambda t: 1.6 if t > 150 else 1.0},
    ),
    Scenario(
        "thermal: 1300 MHz for 50 s",
        H100,
        steady(8.0),
        page=-28.8,
        options={"cap_mhz": lambda t: 1300.0 if 120 < t < 170 else math.inf},
    ),
    Scenario("decode bound by clock, 6/s", CLOCK_BOUND, steady(6.0), page=-36.6, tuned=True),
    Scenario(
        "same, spike 3 -> 16/s",
        CLOCK_BOUND,
        varying(spike(3, 16), 16),
        page=-32.9,
        changing=True,
    ),
]

OWN = [
    Scenario("400 W card, 2/s", CARD_400W, steady(2.0), tpot_s=0.04, ttft_s=1.0),
    Scenario(
        "400 W card, CV 4, 2/s",
        CARD_400W,
        steady(2.0, cv=4.0),
        tpot_s=0.04,
        ttft_s=1.5,
        changing=True,
    ),
    Scenario("bandwidth bound, 1.2/s", BANDWIDTH, steady(1.2), tpot_s=0.045, ttft_s=1.5),
    Scenario("1B model, 30/s", SMALL, steady(30.0), tpot_s=0.012, ttft_s=0.25, tuned=True),
    Scenario("experts, bursts CV 3.5", EXPERTS, steady(6.0, cv=3.5), changing=True, tuned=True),
    Scenario(
        "tensor-parallel pair, day 0.5..3/s",
        PAIR,
        varying(day(0.5, 3), 3),
        tpot_s=0.06,
        ttft_s=1.5,
    ),
    Scenario(
        "statistics stop, 6/s",
        H100,
        steady(6.0),
        options={"silent": lambda t: t % 60 > 54},
    ),
    Scenario(
        "prefill-heavy, decode-heavy in turn",
        H100,
        varying(lambda t: 6.0, 6.0, scales=in_turn),
        changing=True,
    ),
    Scenario("TTFT cannot be met", H100, steady(6.0), ttft_s=0.015, top=True, tuned=True),
    Scenario("TPOT cannot be met", H100, steady(10.0), tpot_s=0.007, top=True),
    Scenario("nothing to save: TPOT just met", CLOCK_BOUND, steady(1.0), tpot_s=0.0088, top=True),
    Scenario(
        "nothing to save: seconds are expensive",
        DEAR_SECONDS,
        steady(0.3),
        top=True,
        tuned=True,
    ),
]

SCENARIOS = [*PAGE, *OWN]
