"""`search="exhaustive"` spends each step as ml-energy/zeus's optimizer, also where it is cut short.

Its published test ends epochs in a warm-up, in a profile, and at a profile's very last step: a
limit whose window is cut is tried again, from its warm-up, in the next epoch. The 241 cases of that
test are in test_published_profiles.py: all of 1 step to wait, 10 to warm up and 40 measured. These
are other lengths, by the same rule; a pause or an evaluation interrupts like the end of an epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.zeus.node import VirtualNode
from zeus.optimizer.power_limit import Energy, GlobalPowerLimitOptimizer, Profiling, Warmup

LIMITS_W = [250, 200, 150, 100]
STEP_S = 0.05

Step = tuple[str, int]
"""What a step is spent on, and the limit, W."""


@dataclass(frozen=True)
class Case:
    """Lengths in steps."""

    wait: int
    warmup: int
    profile: int
    epoch: int


def _cases() -> Iterator[Case]:
    for wait, warmup, profile in itertools.product((0, 1), (1, 3), (1, 2, 5)):
        limit = warmup + profile
        # From the shortest epoch that has room for a limit to one that has room for all: ends amid
        # a warm-up or a profile, at a profile's last step, and right after it.
        for epoch in {limit + 1, 2 * limit, 2 * limit + wait, 3 * limit - 1, 4 * limit + wait + 1}:
            yield Case(wait, warmup, profile, epoch)


CASES = list(_cases())


def published(case: Case) -> list[list[Step]]:
    """The kind of each step of each epoch, until all limits are measured, as published."""
    epochs: list[list[Step]] = []
    index = 0  # of the limit
    wait = case.wait
    while index < len(LIMITS_W):
        steps: list[Step] = []
        kept = index
        while len(steps) < case.epoch:
            if wait:
                wait -= 1
                steps.append(("Ready", 0))
                continue
            if kept == len(LIMITS_W):
                steps.append(("Done", 0))
                continue
            limit = LIMITS_W[kept]
            trial = [("Warmup", limit)] * case.warmup + [("Profiling", limit)] * case.profile
            room = case.epoch - len(steps)
            steps += trial[:room]
            # The window ends where a step after it begins.
            if room > len(trial):
                kept += 1
        index = kept
        epochs.append(steps)
    return epochs


def trained(case: Case, node: VirtualNode, epochs: int, between: str) -> list[Step]:
    """The kind of each step here, where something interrupts training between epochs."""
    plo = GlobalPowerLimitOptimizer(
        node.monitor(),
        Energy(),
        wait_steps=case.wait,
        warmup_steps=case.warmup,
        profile_steps=case.profile,
        pl_step=50,
        search="exhaustive",
    )
    found: list[Step] = []
    interrupt: dict[str, Callable[[], None]] = {
        "epoch": plo.on_epoch_end,
        "pause": plo.on_pause,
        "evaluation": lambda: plo.on_evaluate(0.5),
    }
    plo.on_epoch_begin()
    for _ in range(epochs):
        for _ in range(case.epoch):
            plo.on_step_begin()
            state = plo.state
            under_way = isinstance(state, (Warmup, Profiling))
            limit = state.current_power_limit // 1000 if under_way else 0
            if under_way:
                assert node.limit_w() == limit
            found.append((type(state).__name__, limit))
            node.clock.sleep(STEP_S)
            plo.on_step_end()
        interrupt[between]()
        if between == "epoch":
            plo.on_epoch_begin()
    assert [one.power_limit for one in plo.measurements] == LIMITS_W
    for one in plo.measurements[:-1]:
        assert one.time == pytest.approx(case.profile * STEP_S, rel=1e-3), "measured in one piece"
    plo.close()
    return found


def test_every_step_is_spent_as_published(node: VirtualNode) -> None:
    """Its monitor knows the energy of a window when it ends; where it comes later, that only
    prolongs the last limit.
    """
    assert len(CASES) > 40
    interrupted = 0
    for number, case in enumerate(CASES):
        epochs = published(case)
        interrupted += len(epochs) > 1
        expected = [step for epoch in epochs for step in epoch if step[0] != "Done"]
        between = ("epoch", "pause", "evaluation")[number % 3]
        found = trained(case, node, len(epochs) + 2, between)
        assert found[: len(expected)] == expected, (case, between)
        assert found[-1] == ("Done", 0)
        rest = found[len(expected) : found.index(("Done", 0))]
        assert {limit for _, limit in rest} <= {LIMITS_W[-1]}, (case, between)
        assert len(rest) * STEP_S < 0.3, (case, between)
    assert interrupted > 30
