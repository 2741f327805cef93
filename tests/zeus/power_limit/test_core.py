"""One process of a search alone: what it does with GPUs and user, whatever comes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.core import SILENT_S, Reading, SearchProcess
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import Choose, Message, Piece, RankHello
from zeus.optimizer.power_limit.ranks import Ranks
from zeus.optimizer.power_limit.search import Exhaustive, Search, SettingsSearch
from zeus.optimizer.power_limit.settings import Setting
from zeus.optimizer.power_limit.states import Done, Profiling, Ready, Warmup
from zeus.optimizer.power_limit.stretches import Stretches

LIMITS = [300_000, 250_000, 200_000, 150_000]
HIGHEST = LIMITS[0]


class Recorded(Ranks):
    """Keeps what the leader is told, and counts its checks."""

    def __init__(self, leader: Leader, told: list[Message]) -> None:
        super().__init__(None, 0, 1, leader)
        self.told = told

    def tell(self, message: Message) -> None:
        if isinstance(message, Piece) and message.time_s:
            assert message.time_s >= message.steps, "a step takes a second"
        self.told.append(message)
        super().tell(message)


class Shell:
    """A core, and effects on a GPU of arithmetic.

    Attributes:
        answers: Whether zeusd does.
        slow: Whether a limit is set only after the step that commands it.
        held: The limit of the GPU, mW; the highest if none is held.
        done: What the core did, as pairs of a name and a value.
    """

    def __init__(self, adaptive: bool = False, warmup_steps: int = 2) -> None:
        self.adaptive = adaptive
        self.warmup_steps = warmup_steps
        self.answers = True
        self.slow = False
        self.leases_lost = 0
        self.held = HIGHEST
        self.wanted: Setting | None = None  # the unanswered command
        self.done: list[tuple[str, Any]] = []
        self.told: list[Message] = []
        self.open: tuple[int, float, set[int]] | None = None
        self.now_s = 0.0
        hello = RankHello(gpus=["GPU"], min_mw=LIMITS[-1], max_mw=HIGHEST)
        self.core = SearchProcess(self, hello, 1, warmup_steps, 8, adaptive)
        self.core.begin()

    def step(self) -> None:
        self.core.begin_step(self.now_s, self.answers, self.leases_lost)
        if self.open is not None:
            self.open[2].add(self.held)
        self.now_s += 1.0

    # ------------------------------------------------------------------------------ its effects

    def meet(self, known_world: int) -> Ranks | None:
        if known_world:
            return None
        self.done.append(("meet", 1))
        return Recorded(Leader(1, self.search, lambda *_: None, self.adaptive), self.told)

    def set(self, setting: Setting | None) -> bool:
        if setting is None:
            self.done.append(("restore", None))
            self.held, self.wanted = HIGHEST, None
            return True
        if self.wanted != setting:
            self.done.append(("set", setting))
            self.wanted = setting
            if self.slow:
                return False
        if not self.answers:
            return False
        self.held, self.wanted = setting.power_limit_mw, None
        return True

    def measure(self, limit_mw: int, what: str) -> tuple[int, float, float]:
        self.done.append((what, limit_mw))
        if what == "open":
            self.open = limit_mw, self.now_s, set()
            return 0, 0.0, 0.0
        limit, since_s, held = self.open
        self.open = None
        if what == "close":
            assert limit == limit_mw
            assert held <= {limit}, f"a window of {limit} was open while {held} was in force"
        return limit, self.now_s - since_s, self.now_s

    def read(self, window: tuple[int, float, float]) -> Reading | None:
        limit, seconds, ended_s = window
        if not self.answers or (self.slow and ended_s == self.now_s):
            return None  # so is its energy
        return seconds * limit / 1000, 0.0, seconds, None

    def report(self, text: str, *, warn: bool = False) -> None:
        self.done.append(("warn" if warn else "say", text))

    def note(self, figures: dict[str, float]) -> None:
        self.done.append(("note", figures))

    def chosen(self, choice: Choose) -> None:
        self.done.append(("chosen", choice))

    def end(self, reason: str, *, warn: bool) -> None:
        self.done.append(("end", reason))

    def search(self, participants: Any) -> SettingsSearch:
        return SettingsSearch(lambda reference: self.search_of_limits(), best=self.best)

    def search_of_limits(self) -> Search:
        if not self.adaptive:
            return Exhaustive(LIMITS, self.warmup_steps, 8)
        return Adaptive(
            LIMITS,
            self.warmup_steps,
            8,
            lambda curve: curve[1],
            lambda estimates, cautious: self.best(estimates),
            1,
        )

    def best(self, estimates: Sequence[LimitEstimate]) -> LimitEstimate:
        return min(estimates, key=lambda one: one.energy_j)

    def did(self, name: str) -> list[Any]:
        return [value for one, value in self.done if one == name]

    def run(self, most: int = 500) -> int:
        for count in range(most):
            if isinstance(self.core.state, Done):
                return count
            self.step()
        raise AssertionError(f"no choice after {most} steps: {self.core.state}")

    def said(self) -> list[str]:
        return self.did("warn")

    def assert_chosen(self) -> None:
        assert isinstance(self.core.state, Done)
        assert self.core.state.chosen
        assert self.held == self.core.state.optimal_power_limit == LIMITS[-1]


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
        shell.core.begin_step(shell.now_s)
        shell.now_s += 1
    assert len(shell.did("set")) == 1
    assert len(shell.said()) == 1
    assert (shell.core.current, shell.core.awaited) == (None, shell.did("set")[-1])
    shell.answers = True
    shell.run()
    shell.assert_chosen()
    assert shell.core.awaited is None


@pytest.mark.parametrize(("adaptive", "warmup_steps"), [(False, 0), (False, 2), (True, 2)])
def test_a_limit_that_takes_long_to_set_costs_a_step_and_no_measurement(
    adaptive: bool, warmup_steps: int
) -> None:
    quick, slow = Shell(adaptive, warmup_steps), Shell(adaptive, warmup_steps)
    slow.slow = True
    steps = quick.run(), slow.run()
    slow.step()
    slow.assert_chosen()
    assert steps[1] <= steps[0] + len(slow.did("set"))
    pieces = [one for one in slow.told if isinstance(one, Piece)]
    assert all(one.time_s for one in pieces), "one is lost"
    assert slow.said() == []


@pytest.mark.parametrize("what", ["close", "give_up"])
def test_nothing_is_done_after_the_end(what: str) -> None:
    shell = Shell()
    for _ in range(6):
        shell.step()
    core = shell.core
    if what == "close":
        core.close()
    else:
        core.give_up("no more")
    assert shell.held == HIGHEST
    assert isinstance(core.state, Done)
    assert not core.state.chosen
    assert core.state.reason == (
        "training ended before it finished" if what == "close" else "no more"
    )
    shell.done.clear()
    for _ in range(5):
        shell.step()
    core.pause(True)
    core.pause(False)
    core.evaluated()
    assert not [one for one in shell.done if one[0] != "meet"]


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
                    chance.choice(
                        [lambda: core.pause(True), lambda: core.pause(False), core.evaluated]
                    )()
            shell.answers = True
            for _ in range(40):
                shell.step()
            shell.run(2000)
            shell.assert_chosen()
        except BaseException:
            print(f"seed {seed}")
            raise


def test_the_choice_is_kept_while_training_is_the_same() -> None:
    shell = Shell(adaptive=True)
    shell.run()
    chosen = shell.core.chosen
    assert isinstance(chosen, Choose)
    shell.done.clear()
    for _ in range(500):
        shell.step()
    assert len(shell.did("open")) > 1  # it is checked, ...
    assert shell.did("set") == []  # ... at the choice
    assert shell.core.chosen is chosen
    shell.core.close()
    assert isinstance(shell.core.state, Done)
    assert shell.core.state.chosen


def test_warm_ups_leave_half_of_the_longest_stretch_for_measuring() -> None:
    stretches = Stretches(10, 40, adaptive=True)
    lengths = [9, 7, 5, 3, 3, 3, 8, 8, 1]
    for steps, longest in zip(lengths, [10, 10, 4, 4, 4, 1, 1, 1, 1], strict=True):
        for _ in range(steps):
            stretches.step()
        assert stretches.cut(warming_up=True) == ""
        assert stretches.longest_warmup == longest
    stretches = Stretches(10, 40, adaptive=True)
    for measured in (False, False, True, False, False):
        stretches.step()
        if measured:
            stretches.measured()
        stretches.cut(warming_up=not measured)
    assert stretches.longest_warmup == 10, "something was measured meanwhile"
