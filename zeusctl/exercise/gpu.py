"""The exercise of one GPU, under leases that this process holds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from zeus_common.text import value_text
from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeusctl.exercise import outside
from zeusctl.exercise.report import (
    Condition,
    ControlValues,
    DriverAnswer,
    ExercisedGpu,
    Settling,
    SetTrial,
    ValueRounding,
)
from zeusctl.probe.load import load

if TYPE_CHECKING:
    from zeus_ipc import Client
    from zeus_ipc.replies import GpuInfo, GpuState

S = TypeVar("S")


def held(client: Client, gpu: GpuInfo) -> ControlValues:
    """What a GPU holds now."""
    state = client.state(gpu.uuid)[gpu.uuid]
    names = ControlValues.__dataclass_fields__.keys() - {"power_profiles"}
    profiles = state.controls.get(Control.POWER_PROFILE.value)
    return ControlValues(**{name: getattr(state, name) for name in names}, power_profiles=profiles)


def exercise(
    client: Client,
    gpu: GpuInfo,
    before: ControlValues,
    simulated: str | None,
    setters: outside.Setters | None = None,
) -> ExercisedGpu:
    """Exercises every control of a GPU, and releases them.

    Args:
        found: What it held before.
        simulated: Where work is put on it, if it is simulated.
        setters: The driver's own, for values that zeusd refuses; None: they cannot be called.
    """
    run = _Exercise(client, gpu)
    checks: list[Condition] = []
    answers: list[DriverAnswer] = []
    for control, valid in run.values.items():
        swept = [run.tried(control, value) for value in valid]
        checks += [_all_taken(control, swept), *run.refusals(control)]
        if setters is not None and any(trial.applied is not None for trial in swept):
            answers += run.beyond(control, setters)
        run.reset(control)
    trials = run.trials
    checks += [*run.order(), *run.persistence()]
    settling: list[Settling] = []
    with load(simulated, gpu) as loaded:
        if loaded:
            settling += run.settling()
    client.release(gpu.uuid)
    of_limit = [trial for trial in trials if trial.control == Control.POWER_LIMIT.value]
    return ExercisedGpu(
        index=gpu.index,
        name=gpu.name,
        found=before,
        left=eventually(lambda: held(client, gpu), lambda now: now == before),
        trials=trials,
        power_limit_rounding=rounding(of_limit),
        settling=settling,
        checks=checks,
        outside=answers,
    )


class _Exercise:
    """One GPU's exercise."""

    def __init__(self, client: Client, gpu: GpuInfo) -> None:
        self._client = client
        self._gpu = gpu
        self.trials: list[SetTrial] = []
        self.values = {control: self._values(control) for control in map(Control, gpu.controls)}

    def _values(self, control: Control) -> list[list[int]]:
        gpu = self._gpu
        if control is Control.POWER_LIMIT:
            low, high = gpu.power_limit_min_mw, gpu.power_limit_max_mw
            highest = gpu.power_limit_highest_mw
            if low is None or high is None:
                return []
            return [[mw] for mw in power_limits(low, min(high, highest or high))]
        if control is Control.PERSISTENCE_MODE:
            return [[1], [0], [1]]
        if control is Control.POWER_PROFILE:
            profiles = [profile.profile for profile in gpu.power_profiles]
            return [*([profile] for profile in profiles), profiles, []]
        clocks = self._client.clocks(gpu.uuid)
        if control is Control.MEMORY_CLOCKS:
            return [[mhz, mhz] for mhz in clocks.memory_mhz]
        return clock_ranges(clocks.gpu_mhz[str(clocks.memory_mhz[0])])

    def tried(self, control: Control, value: Sequence[int]) -> SetTrial:
        """Sets a value, for the report."""
        self.trials.append(self._set(control, value))
        return self.trials[-1]

    def _set(self, control: Control, value: Sequence[int]) -> SetTrial:
        begin_s = time.monotonic()
        applied = error = code = None
        try:
            applied = self._client.set(self._gpu.uuid, control, value)[self._gpu.uuid]
        except ZeusIpcError as raised:
            error, code = str(raised.code), raised.device_code
        took_ms = round((time.monotonic() - begin_s) * 1000, 3)
        return SetTrial(control.value, list(value), applied, took_ms, error, code)

    def reset(self, *controls: Control) -> None:
        """Restores controls and keeps their leases; a failed restore is found at the end."""
        for control in controls:
            with contextlib.suppress(ZeusIpcError):
                self._client.reset(self._gpu.uuid, control)

    def _state(self) -> GpuState:
        return self._client.state(self._gpu.uuid)[self._gpu.uuid]

    def refusals(self, control: Control) -> Iterator[Condition]:
        """Values outside the range are refused and change nothing."""
        low, high = self._gpu.power_limit_min_mw, self._gpu.power_limit_max_mw
        if control is not Control.POWER_LIMIT or low is None or high is None:
            return
        for mw in (low - 1000, high + 1000):
            before = self._state().power_limit_mw
            trial = self.tried(control, [mw])
            unchanged = self._state().power_limit_mw == before
            refused = f"refused ({trial.error})" if trial.applied is None else "taken"
            yield Condition(
                f"a power limit of {mw / 1000:g} W is refused and changes nothing",
                trial.applied is None and unchanged,
                refused + ("" if unchanged else ", and the limit changed"),
            )

    def beyond(self, control: Control, setters: outside.Setters) -> Iterator[DriverAnswer]:
        """Records the driver's own answers; zeusd overwrites what the driver accepts, and restores
        it later.
        """
        valid = self.values[control]
        for value in outside.values(control, valid):
            self._set(control, valid[0])
            error = setters.ask(self._gpu.uuid, control, value)
            yield DriverAnswer(
                control.value,
                value,
                outside.CALLS[control],
                error.code if error else 0,
                error.text if error else "accepted",
                held(self._client, self._gpu).of(control.value),
            )
            if error is None:
                for one in valid[:2]:
                    self._set(control, one)

    def order(self) -> Iterator[Condition]:
        """Checks that limit and clock do not change each other, in either order."""
        limit, clocks = Control.POWER_LIMIT, Control.GPU_CLOCKS
        if not self.values.keys() >= {limit, clocks}:
            return
        values = {limit: self.values[limit][0], clocks: self.values[clocks][2]}
        for order in ((limit, clocks), (clocks, limit)):
            applied = {control: self._set(control, values[control]).applied for control in order}
            shown = self._state().power_limit_mw
            yield Condition(
                f"limit and clocks hold together, {order[0].value} first",
                None not in applied.values() and applied[limit] == [shown],
                f"the limit reads {shown} mW",
            )
            self.reset(*order)

    def persistence(self) -> Iterator[Condition]:
        """A limit survives persistence mode off, because zeusd keeps the driver open."""
        if not self.values.keys() >= {Control.POWER_LIMIT, Control.PERSISTENCE_MODE}:
            return
        applied = self._set(Control.POWER_LIMIT, self.values[Control.POWER_LIMIT][2]).applied
        for on in (1, 0):
            self._set(Control.PERSISTENCE_MODE, [on])
        shown = self._state().power_limit_mw
        what = "a power limit survives persistence mode off"
        yield Condition(what, applied == [shown], f"it reads {shown} mW")
        self.reset(Control.PERSISTENCE_MODE, Control.POWER_LIMIT)

    def settling(self) -> Iterator[Settling]:
        """Measures how long a new limit or clock takes to show in the readings."""
        if Control.POWER_LIMIT in self.values:
            limit = self.values[Control.POWER_LIMIT][0]
            # Power up to 3 % above a limit counts as within it.
            most_mw = limit[0] * 1.03
            yield from self._settle(
                Control.POWER_LIMIT,
                limit,
                lambda state: state.power_mw is not None and state.power_mw <= most_mw,
            )
        if Control.GPU_CLOCKS in self.values:
            clock = self.values[Control.GPU_CLOCKS][2]
            yield from self._settle(
                Control.GPU_CLOCKS, clock, lambda state: state.gpu_clock_mhz == clock[0]
            )

    def _settle(
        self, control: Control, value: list[int], shows: Callable[[GpuState], bool]
    ) -> Iterator[Settling]:
        """Sets a value that the GPU's load does not already satisfy."""
        if shows(eventually(self._state, lambda state: not shows(state))):
            return
        begin_s = time.monotonic()
        self._set(control, value)
        state = eventually(self._state, shows)
        took_ms = round((time.monotonic() - begin_s) * 1000, 3)
        self.reset(control)
        yield Settling(control.value, value, took_ms if shows(state) else None)


def _all_taken(control: Control, trials: Sequence[SetTrial]) -> Condition:
    """Checks that every value within the range is accepted, rounded or not; or none is, if the
    driver turns out not to offer the control.
    """
    refused = [trial for trial in trials if trial.applied is None]
    text = "; ".join(f"{value_text(control.value, one.asked)}: {one.error}" for one in refused)
    if all(trial.error == ErrorCode.NOT_SUPPORTED for trial in trials):
        return Condition(f"{control.value} is not offered by this GPU or its driver", True, text)
    what = f"every value of {control.value} within its range is accepted"
    return Condition(what, not refused, text or f"{len(trials)} of {len(trials)}")


def eventually(read: Callable[[], S], good: Callable[[S], bool], within_s: float = 5.0) -> S:
    """Reads until the value is as wanted or the time is over; returns the last reading. By default,
    the time in which a value shows in a GPU under load."""
    end_s = time.monotonic() + within_s
    while True:
        state = read()
        if good(state) or time.monotonic() > end_s:
            return state
        time.sleep(0.005)


_OFFSETS_MW = (1, 7, 50, 137, 250, 333, 500, 777, 900, 999, 1234, 2718, 4321)
"""Beyond whole watts: off any grid that a driver may have."""


def power_limits(smallest_mw: int, largest_mw: int) -> list[int]:
    """Both ends, the middle, and values off any grid, spread over the range.

    Adjacent values differ after rounding too: zeusd reads twice if a GPU still holds its old value.
    """
    span = largest_mw - smallest_mw
    wanted = [smallest_mw, largest_mw, smallest_mw + span // 2 // 1000 * 1000]
    for number, offset in enumerate(_OFFSETS_MW, 1):
        whole = span * number // (len(_OFFSETS_MW) + 1) // 1000 * 1000
        wanted.append(smallest_mw + whole + offset)
    return [mw for mw in dict.fromkeys(wanted) if smallest_mw <= mw <= largest_mw]


def clock_ranges(clocks: Sequence[int]) -> list[list[int]]:
    """Ranges of clocks: each end, the middle, the lower half, and a clock off the grid."""
    low, middle, high = min(clocks), sorted(clocks)[len(clocks) // 2], max(clocks)
    wanted = [(high, high), (low, low), (middle, middle), (low, middle)]
    if len(clocks) > 1:
        wanted.append((middle + 1, middle + 1))
    return [list(one) for one in dict.fromkeys(wanted)]


def rounding(trials: Sequence[SetTrial]) -> ValueRounding | None:
    """Returns how values were rounded; None if too few were accepted to tell."""
    taken = [(trial.asked[0], trial.applied[0]) for trial in trials if trial.applied is not None]
    if len(taken) < 4:
        return None
    values = sorted({applied for _, applied in taken})
    step = math.gcd(*(value - values[0] for value in values)) or 1
    off = [applied - asked for asked, applied in taken]
    if not any(off):
        return ValueRounding(step, "exact")
    if all(-step < one <= 0 for one in off):
        return ValueRounding(step, "down")
    if all(0 <= one < step for one in off):
        return ValueRounding(step, "up")
    return ValueRounding(step, "nearest" if all(2 * abs(one) <= step for one in off) else "other")
