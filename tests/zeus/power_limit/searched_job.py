"""A job of arithmetic, and searches that run on it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.estimates import SettingSample
from zeus.optimizer.power_limit.planner import costs_of
from zeus.optimizer.power_limit.search import Search
from zeus.optimizer.power_limit.selectors import OptimumSelector, best

LIMITS = [300_000, 275_000, 250_000, 225_000, 200_000, 175_000, 150_000, 125_000, 100_000]
WARMUP, STEPS = 10, 40


@dataclass
class Job:
    """Steps of a job that draws its own power unless it is capped.

    Attributes:
        seed: For the noise.
        noise: Standard deviation of the logarithm of a step's time.
        unit_s: Time of a step at the highest limit, s.
        draws_w: What it draws by itself, W.
        steep: Time that a limit below that costs: the factor's logarithm, by the square of the
            limit's.
        start: By what share the first 25 steps are slower.
        drift: By what share it gets slower, and draws more, as it warms up.
        interruption_s: How long one of the first 100 steps stands still, s.
    """

    seed: int
    noise: float = 0.02
    unit_s: float = 0.3
    draws_w: float = 260.0
    steep: float = 0.8
    start: float = 0.0
    drift: float = 0.0
    interruption_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.interrupted = self.random.randrange(100) if self.interruption_s else None
        self.position = 0

    def time_s(self, limit_mw: int) -> float:
        below = max(0.0, math.log(1000 * self.draws_w / limit_mw))
        return self.unit_s * math.exp(0.25 * below + self.steep * below**2)

    def power_w(self, limit_mw: int) -> float:
        return min(self.draws_w, 0.97 * limit_mw / 1000)

    def energy_j(self, limit_mw: int) -> float:
        return self.time_s(limit_mw) * self.power_w(limit_mw)

    def run(self, limit_mw: int, steps: int) -> SettingSample:
        seconds = joules = 0.0
        begin = self.position
        for _ in range(steps):
            warmer = 1 + self.drift * (1 - math.exp(-self.position / 150))
            slower = 1 + self.start if self.position < 25 else 1.0
            off = warmer * slower * math.exp(self.random.gauss(0, self.noise))
            seconds += self.time_s(limit_mw) * off
            joules += self.energy_j(limit_mw) * off * warmer
            if self.position == self.interrupted:
                seconds += self.interruption_s
                joules += 50 * self.interruption_s
            self.position += 1
        return SettingSample(limit_mw, steps, joules, seconds, 0.5, begin + steps / 2)


def adaptive(
    selector: OptimumSelector,
    limits: list[int] = LIMITS,
    warmup_steps: int = WARMUP,
    profile_steps: int = STEPS,
) -> Adaptive:
    """The adaptive search by a selector."""
    searching = Adaptive(
        list(limits),
        warmup_steps,
        profile_steps,
        lambda curve: costs_of(selector, searching.limits_mw, curve),
        lambda estimates, cautious: best(selector, estimates, STEPS, cautious=cautious),
        gpus=1,
    )
    return searching


def search(searching: Search, job: Job, late: int = 0) -> list[int]:
    """Runs a search to its end; samples come `late` pieces after they were run. Returns the limits
    in the order they were held.
    """
    held: list[int] = []
    waiting: list[SettingSample] = []
    current = 0
    trial = searching.next(current, job.position, {})
    while trial is not None or waiting:
        assert job.position < 2000, "the search does not end"
        if trial is not None:
            if trial.power_limit_mw != current:
                held.append(trial.power_limit_mw)
                job.run(trial.power_limit_mw, max(1, trial.warmup_steps))
            current = trial.power_limit_mw
            waiting.append(job.run(current, trial.steps))
        if len(waiting) > late or trial is None:
            searching.add(waiting.pop(0))
        outstanding: Counter[int] = Counter()
        for one in waiting:
            outstanding[one.power_limit_mw] += one.steps
        trial = searching.next(current, job.position, outstanding)
    return held
