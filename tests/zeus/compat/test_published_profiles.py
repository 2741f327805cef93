"""`search="exhaustive"` in the 241 cases of ml-energy/zeus's own test of the power limit optimizer.

Its tests/optimizer/test_power_limit_optimizer.py, the same from v0.8.1 to v0.16.0, has 12 recorded
profiles x 4 ways in which epochs end x 5 knobs of ZeusCost = 240 cases, and one of signatures (here
in tests/zeus/power_limit/test_huggingface.py). The 240 have one step to wait, 10 to warm up and 40
measured; what differs is the length of an epoch:

    never         all limits fit in, and 10 steps more; 3 epochs
    warming up    half of the limits, and 5 steps of the next one's warm-up; 4 epochs
    measuring     a third, and 15 steps: 5 into the next one's window; 5 epochs
    every time    one, and 50 steps: all of the next one, whose window is still open; 2 epochs more
                  than limits

Limits are held in the published order, a cut one again after the highest; the choice is that of the
profile; Energy, Time and eight slowdowns choose from the file that is left, and an optimizer that
finds the file runs no profiling. The knob decides nothing before the choice: each of 48 searches
has one, and all five choose from what it measured. Only the numbers are theirs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from zeus.compat.replay import ReplayZeusMonitor
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    Ready,
    Time,
    ZeusCost,
)
from zeus.utils.metric import zeus_cost
from zeusd.devices.simulated.workloads import MeasuredTable, catalog

PROFILES = sorted(
    (name for name in catalog() if name.startswith("profiles/")),
    key=lambda name: (name.split("+")[0], catalog()[name].gpus),  # those of one node together
)
KNOBS = [0.0, 0.25, 0.5, 0.75, 1.0]
SLOWDOWNS = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 100.0]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of slowdowns that hardly anyone means
    OTHERS = [Energy(), Time(), *map(MaxSlowdownConstraint, SLOWDOWNS)]
WAIT, WARMUP, MEASURED = 1, 10, 40
TRIAL = WARMUP + MEASURED
INTERRUPTED = ["never", "warming up", "measuring", "every time"]


def gpus_of(name: str) -> str:
    """The GPUs of a profile, as `--simulate` has them."""
    return f"{catalog()[name].gpus}x{name.removeprefix('profiles/').split('+')[0].lower()}"


def recorded(name: str, path: Path) -> dict[int, tuple[float, float]]:
    """Writes a monitor's file of a profile. Returns time and energy by limit, W, descending."""
    table = catalog()[name]
    assert isinstance(table, MeasuredTable)
    rows = {}
    gpus = range(table.gpus)
    lines = [",".join(["start_time,window_name,elapsed_time", *(f"gpu{i}_energy" for i in gpus)])]
    for at in reversed(range(len(table.limits_w))):
        time_s = table.unit_s[at] * MEASURED
        joules = [time_s * power_w[at] for power_w in table.power_w]
        limit = int(table.limits_w[at])
        rows[limit] = time_s, sum(joules)
        window = f"__GlobalPowerLimitOptimizer_{limit}"
        lines.append(",".join([f"0,{window},{time_s!r}", *map(repr, joules)]))
    path.write_text("\n".join(lines) + "\n")
    return rows


def published(limits: list[int], per_epoch: int) -> list[int]:
    """The limits in the published order, from the first on, each once for as long as it is held.

    Args:
        limits: Of the profile, W, descending.
        per_epoch: How many are measured in an epoch; the next one's window is cut, and the limit
            tried again.
    """
    found: list[int] = []
    index = 0
    while True:
        tried = limits[index : index + per_epoch + 1]
        found += tried
        if len(tried) <= per_epoch:
            return _without_repeats(found)
        found.append(limits[0])
        index += per_epoch


def _without_repeats(limits: list[int]) -> list[int]:
    return [one for at, one in enumerate(limits) if at == 0 or one != limits[at - 1]]


def epochs(interrupted: str, limits: int) -> tuple[int, int, int]:
    """How many limits fit into an epoch, how many steps it has, and how many epochs there are."""
    fit, rest, count = {
        "never": (limits, 10, 3),
        "warming up": (limits // 2, 5, 4),
        "measuring": (limits // 3, 15, 5),
        "every time": (1, 50, limits + 2),
    }[interrupted]
    return fit, TRIAL * fit + rest, count


def best(rows: dict[int, tuple[float, float]], selector: OptimumSelector, gpus: int) -> int:
    """The choice, W, from the table itself: of equals, the highest limit."""
    highest = max(rows)
    if isinstance(selector, MaxSlowdownConstraint):
        longest_s = rows[highest][0] * selector.factor
        return min(limit for limit, (time_s, _) in rows.items() if time_s <= longest_s)
    if isinstance(selector, ZeusCost):
        knob, power_w = selector.eta_knob, highest * gpus
        return min(rows, key=lambda one: zeus_cost(rows[one][1], rows[one][0], knob, power_w))
    return min(rows, key=lambda one: rows[one][isinstance(selector, Energy)])


class Replayed:
    """Optimizers that train on one recorded profile.

    Args:
        name: Of the profile.
        node: A node of its GPUs.
        folder: For files.
    """

    def __init__(self, name: str, node: VirtualNode, folder: Path) -> None:
        self.node = node
        self.gpus = catalog()[name].gpus
        self._log = folder / "recorded.csv"
        self.rows = recorded(name, self._log)
        self._profile = folder / "profile.json"
        self._profile.unlink(missing_ok=True)

    def optimizer(self, selector: OptimumSelector) -> GlobalPowerLimitOptimizer:
        return GlobalPowerLimitOptimizer(
            ReplayZeusMonitor(
                log_file=self._log, ignore_sync_execution=True, match_window_name=False
            ),
            selector,
            wait_steps=WAIT,
            warmup_steps=WARMUP,
            profile_steps=MEASURED,
            pl_step=25,
            profile_path=self._profile,
            search="exhaustive",
        )

    def best_mw(self, selector: OptimumSelector) -> int:
        return 1000 * best(self.rows, selector, self.gpus)

    def search(self, knob: float, interrupted: str) -> None:
        """Trains as published until the choice."""
        selector = ZeusCost(knob, world_size=self.gpus)
        plo = self.optimizer(selector)
        fit, steps, count = epochs(interrupted, len(self.rows))
        held: list[int] = []
        for epoch in range(count):
            plo.on_epoch_begin()
            for step in range(steps):
                plo.on_step_begin()
                assert epoch or step >= WAIT or isinstance(plo.state, Ready)
                held.append(round(self.node.limit_w()))
                plo.on_step_end()
                if isinstance(plo.state, Done):
                    break  # nothing changes any more: `load` trains an epoch after the choice
            plo.on_epoch_end()
            held.append(round(self.node.limit_w()))
        assert plo.state == Done(optimal_power_limit=self.best_mw(selector))
        for other in (ZeusCost(knob, world_size=self.gpus) for knob in KNOBS):
            assert 1000 * other.select(plo.measurements) == self.best_mw(other)
        order = [*published(list(self.rows), fit), best(self.rows, selector, self.gpus)]
        assert _without_repeats(held) == _without_repeats(order)
        plo.close()

    def load(self, selector: OptimumSelector, steps: int = 0) -> None:
        """An optimizer that finds the file has its choice at once, and keeps it in training; other
        selectors choose from what it read.
        """
        plo = self.optimizer(selector)
        for other in OTHERS:
            assert 1000 * other.select(plo.measurements) == self.best_mw(other)
        for _ in range(steps):
            plo.on_step_begin()
            plo.on_step_end()
        assert plo.state == Done(optimal_power_limit=self.best_mw(selector))
        assert 1000 * self.node.limit_w() == self.best_mw(selector)
        plo.close()


def test_there_are_as_many_cases_as_published() -> None:
    assert len(PROFILES) == 12
    assert len(PROFILES) * len(INTERRUPTED) * len(KNOBS) == 241 - 1


@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_limits_and_choices_are_the_published_ones(
    virtual_node: Callable[[str], VirtualNode], tmp_path: Path, interrupted: str
) -> None:
    knobs, others = itertools.cycle(KNOBS), itertools.cycle(OTHERS)
    for spec, names in itertools.groupby(PROFILES, gpus_of):
        node = virtual_node(f"{spec}:setter_ms=0")
        for name in names:
            print(name)
            replayed, knob = Replayed(name, node, tmp_path), next(knobs)
            replayed.search(knob, interrupted)
            replayed.load(next(others))
            _, steps, _ = epochs(interrupted, len(replayed.rows))
            replayed.load(ZeusCost(knob, world_size=replayed.gpus), steps)
        node.close()
