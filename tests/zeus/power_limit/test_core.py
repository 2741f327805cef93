"""The core alone: the commands that it gives its shell, for any outcome of them."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from zeus.optimizer.power_limit import actions as do
from zeus.optimizer.power_limit.actions import Action, Actions
from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.core import Core
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import Choose, Hello, Missing, Piece
from zeus.optimizer.power_limit.search import Exhaustive, Search
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, Warmup
from zeus.optimizer.power_limit.watch import SILENT_S

LIMITS = [300_000, 250_000, 200_000, 150_000]
HIGHEST = LIMITS[0]


class Shell:
    """Performs a core's actions on a GPU of arithmetic.

    Attributes:
        answers: Whether zeusd does.
        slow: Whether a limit is set only after the step that commands it.
        held: The limit of the GPU, mW; the highest if none is held.
    """

    def __init__(self, adaptive: bool = False, warmup_steps: int = 2) -> None:
        hello = Hello(gpus=["GPU"], min_mw=LIMITS[-1], max_mw=HIGHEST)
        self.core = Core(hello, 1, warmup_steps, 8, adaptive)
        self.adaptive = adaptive
        self.warmup_steps = warmup_steps
        self.leader: Leader | None = None
        self.answers = True
        self.slow = False
        self.leases_lost = 0
        self.held = HIGHEST
        self.wanted: int | None = None  # the unanswered command
        self.done: list[Action] = []
        self.unread: deque[tuple[do.Part | None, int, float, float]] = deque()
        self.open: tuple[int, float, set[int]] | None = None
        self.now_s = 0.0
        self.perform(self.core.begin())

    def step(self) -> None:
        core = self.core
        self.perform(core.begin_step(self.now_s, self.answers, self.leases_lost))
        self.perform(core.advance())
        self.perform(core.proceed())
        if self.open is not None:
            self.open[2].add(self.held)
        self.now_s += 1.0

    def perform(self, wanted: Actions) -> None:
        left = deque(wanted)
        while left:
            action = left.popleft()
            self.done.append(action)
            left.extendleft(reversed(self.result_of(action)))

    def result_of(self, action: Action) -> Actions:
        core = self.core
        if isinstance(action, do.Join):
            core.joining(1)
            self.leader = Leader(1, self.search, self.best, lambda *_: None)
            return core.joined(True)
        if isinstance(action, do.Tell):
            assert self.leader is not None
            self.leader.take(0, action.message)
        elif isinstance(action, do.Listen) and self.leader is not None and not core.over:
            self.leader.tick(self.now_s, core.step)
            return core.heard(self.leader.commands())
        elif isinstance(action, do.ForLeader):
            if self.leader is not None:
                action.reach(self.leader, self.now_s, core.step)
        elif isinstance(action, do.Leave):
            self.leader = None
        elif isinstance(action, (do.SetLimit, do.AskForLimit)):
            return self.set(action)
        elif isinstance(action, do.ReleaseLimits):
            self.held, self.wanted = HIGHEST, None
        else:
            return self.measure(action)
        return []

    def set(self, action: do.SetLimit | do.AskForLimit) -> Actions:
        if isinstance(action, do.SetLimit):
            self.wanted = action.power_limit_mw
            if self.slow:
                return self.core.unanswered()
        if self.wanted is None or not self.answers:
            return self.core.unanswered()
        self.held, self.wanted = self.wanted, None
        return self.core.limit_set(self.held)

    def measure(self, action: Action) -> Actions:
        if isinstance(action, do.OpenWindow):
            self.open = action.power_limit_mw, self.now_s, set()
        elif isinstance(action, do.DropWindow):
            self.open = None
        elif isinstance(action, do.CloseWindow):
            assert self.open is not None
            limit, since_s, held = self.open
            assert limit == action.power_limit_mw
            assert held <= {limit}, f"a window of {limit} was open while {held} was in force"
            seconds = self.now_s - since_s
            assert action.part is None or seconds >= action.part.steps, "a step takes a second"
            self.unread.append((action.part, limit, seconds, self.now_s))
            self.open = None
        elif isinstance(action, do.Forget):
            lost = [part for part, *_ in self.unread if part is not None]
            self.unread.clear()
            return [one for part in lost for one in self.core.unknown(part, "lost", False)]
        elif isinstance(action, do.Collect) and self.unread and self.answers:
            part, limit, seconds, ended_s = self.unread[0]
            if self.slow and ended_s == self.now_s:
                return []  # so is its energy
            self.unread.popleft()
            return self.core.measured(part, seconds * limit / 1000, 0.0, seconds)
        return []

    def search(self, participants: Any) -> Search:
        if not self.adaptive:
            return Exhaustive(LIMITS, self.warmup_steps, 8)
        return Adaptive(
            LIMITS,
            self.warmup_steps,
            8,
            lambda curve: list(curve.energy_j),
            lambda estimates, cautious: self.best(list(estimates), None).power_limit_mw,
            1,
        )

    def best(self, estimates: list[LimitEstimate], participants: Any) -> LimitEstimate:
        return min(estimates, key=lambda one: one.energy_j)

    def run(self, most: int = 500) -> int:
        for count in range(most):
            if isinstance(self.core.state, Done):
                return count
            self.step()
        raise AssertionError(f"no choice after {most} steps: {self.core.state}")

    def said(self) -> list[str]:
        return [one.text for one in self.done if isinstance(one, do.Say) and one.warn]

    def assert_chosen(self) -> None:
        assert isinstance(self.core.state, Done)
        assert self.core.state.chosen
        assert self.held == self.core.state.optimal_power_limit == LIMITS[-1]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_search_ends_at_the_choice(adaptive: bool) -> None:
    shell = Shell(adaptive)
    shell.run()
    shell.assert_chosen()
    assert shell.said() == []


@pytest.mark.parametrize("phase", [Ready, Warmup, Profiling, Done])
@pytest.mark.parametrize("lose", [False, True])
def test_a_search_waits_for_zeusd_and_then_continues(phase: type, lose: bool) -> None:
    shell = Shell()
    while not isinstance(shell.core.state, phase):
        shell.step()
    shell.answers = False
    for _ in range(20):
        shell.step()
    (said,) = shell.said()
    assert f"zeusd has not answered for {SILENT_S:g} s: training continues" in said
    if lose:  # it was stopped in order, and has restored everything
        shell.held = HIGHEST
        shell.leases_lost += 1
    shell.answers = True
    shell.step()
    shell.run()
    shell.assert_chosen()
    assert len(shell.said()) == 1


def test_a_short_silence_causes_no_warning() -> None:
    shell = Shell()
    for _ in range(5):
        shell.step()
    shell.answers = False
    shell.step()
    shell.answers = True
    shell.run()
    assert shell.said() == []


@pytest.mark.parametrize("phase", [Warmup, Profiling, Done])
def test_a_lease_that_was_lost_can_be_acquired_again(phase: type) -> None:
    shell = Shell()
    while not isinstance(shell.core.state, phase) or shell.held == HIGHEST:
        shell.step()
    held, shell.held = shell.held, HIGHEST
    shell.leases_lost += 1
    shell.open = None if shell.open is None else (shell.open[0], shell.open[1], set())
    shell.step()
    shell.step()
    assert shell.held == held
    shell.run()
    shell.assert_chosen()


def test_a_driver_that_does_not_return_delays_no_step() -> None:
    shell = Shell()
    shell.done.clear()
    shell.answers = False  # of the limits; zeusd itself answers
    for _ in range(30):
        core = shell.core
        shell.perform(core.begin_step(shell.now_s))
        shell.perform(core.advance())
        shell.perform(core.proceed())
        shell.now_s += 1
    assert sum(isinstance(one, do.SetLimit) for one in shell.done) == 1
    assert len(shell.said()) == 1
    shell.answers = True
    shell.run()
    shell.assert_chosen()


@pytest.mark.parametrize(("adaptive", "warmup_steps"), [(False, 0), (False, 2), (True, 2)])
def test_a_limit_that_takes_long_to_set_costs_a_step_and_no_measurement(
    adaptive: bool, warmup_steps: int
) -> None:
    quick, slow = Shell(adaptive, warmup_steps), Shell(adaptive, warmup_steps)
    slow.slow = True
    steps = quick.run(), slow.run()
    slow.step()
    slow.assert_chosen()
    sets = sum(isinstance(one, do.SetLimit) for one in slow.done)
    assert steps[1] <= steps[0] + sets
    told = [one.message for one in slow.done if isinstance(one, do.Tell)]
    lost = {one.trial for one in told if isinstance(one, Missing)}
    assert lost <= {max(one.trial for one in told if isinstance(one, Piece))}, "by the choice"
    assert slow.said() == []


@pytest.mark.parametrize("what", ["close", "give_up"])
def test_nothing_is_done_after_the_end(what: str) -> None:
    shell = Shell()
    for _ in range(6):
        shell.step()
    core = shell.core
    shell.perform(core.close() if what == "close" else core.give_up("no more"))
    assert shell.held == HIGHEST
    assert isinstance(core.state, Done)
    assert not core.state.chosen
    assert core.state.reason == (
        "training ended before it finished" if what == "close" else "no more"
    )
    shell.done.clear()
    for _ in range(5):
        shell.step()
    shell.perform([*core.pause(True), *core.pause(False), *core.evaluated()])
    assert not [one for one in shell.done if not isinstance(one, (do.Join, do.Leave))]


def test_the_choice_is_checked_once_beside_the_highest_limit() -> None:
    shell = Shell(adaptive=True)
    shell.run()
    shell.done.clear()
    for _ in range(150):
        shell.step()
    set_ = [one.power_limit_mw for one in shell.done if isinstance(one, do.SetLimit)]
    assert set_ == [HIGHEST, LIMITS[-1]]
    assert shell.done.count(do.ForLeader(Leader.check)) == 1
    shell.assert_chosen()


@pytest.mark.parametrize("block", range(4))
def test_windows_are_of_one_limit_and_a_choice_is_made_in_any_case(block: int) -> None:
    """The shell asserts that no window counts during which another limit was in force."""
    for seed in range(50 * block, 50 * (block + 1)):
        chance = random.Random(seed)
        shell = Shell(adaptive=chance.random() < 0.5)
        shell.core.begin_epoch()
        silent_until = 0
        try:
            for step in range(200):
                shell.step()
                if shell.core.step >= silent_until:
                    shell.answers = True
                if chance.random() < 0.03:
                    shell.answers = False
                    silent_until = step + chance.randint(1, 15)
                if chance.random() < 0.02 and shell.open is None:
                    shell.held = HIGHEST
                    shell.leases_lost += 1
                if chance.random() < 0.05:
                    core = shell.core
                    event = chance.choice(
                        [lambda: core.pause(True), lambda: core.pause(False), core.evaluated]
                    )
                    shell.perform(event())
            shell.answers = True
            for _ in range(40):
                shell.step()
            shell.run(2000)
            shell.assert_chosen()
        except BaseException:
            print(f"seed {seed}")
            raise


def test_estimates_are_kept_while_the_choice_is_checked() -> None:
    shell = Shell(adaptive=True)
    shell.run()
    chosen = shell.core.chosen
    assert isinstance(chosen, Choose)
    while isinstance(shell.core.state, Done):
        shell.step()
    assert shell.core.chosen is chosen
    shell.perform(shell.core.close())
    assert isinstance(shell.core.state, Done)
    assert shell.core.state.chosen
