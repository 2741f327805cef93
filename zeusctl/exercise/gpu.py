"""The exercise of one GPU, under leases that this process holds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeusctl.exercise import outside
from zeusctl.exercise.report import (
    Condition,
    ControlValues,
    DriverAnswer,
    ExercisedGpu,
    Rounding,
    Settling,
    Trial,
)
from zeusctl.probe.load import load
from zeusctl.text import value_text

if TYPE_CHECKING:
    from zeus_ipc import Client
    from zeus_ipc.replies import GpuInfo, GpuState

S = TypeVar("S")

SETTLE_S = 5.0
"""How long a value may take to show in a GPU under load."""

_LOOK_S = 0.005
_SLACK = 0.03
"""Power up to this share above a limit counts as within it."""


def held(client: Client, gpu: GpuInfo) -> ControlValues:
    """What a GPU holds now."""
    state = client.state(gpu.uuid)[gpu.uuid]
    return ControlValues(
        power_limit_mw=state.power_limit_mw,
        enforced_power_limit_mw=state.enforced_power_limit_mw,
        persistence_mode=state.persistence_mode,
        locked_gpu_clocks_mhz=state.locked_gpu_clocks_mhz,
        locked_memory_clocks_mhz=state.locked_memory_clocks_mhz,
        power_profiles=state.controls.get(Control.POWER_PROFILE.value),
    )


def exercise(
    client: Client,
    gpu: GpuInfo,
    found: ControlValues,
    simulated: str | None,
    setters: outside.Setters | None = None,
) -> ExercisedGpu:
    """Exercises every control of a GPU, and releases them.

    Args:
        client: Holds the leases on all controls of the GPU.
        gpu: Which.
        found: What it held before.
        simulated: Where work is put on it, if it is simulated.
        setters: The driver's own, for values that zeusd refuses; None: they cannot be called.
    """
    trials: list[Trial] = []
    settling: list[Settling] = []
    checks: list[Condition] = []
    answers: list[DriverAnswer] = []
    for control in map(Control, gpu.controls):
        valid = _values(client, gpu, control)
        swept = [_trial(client, gpu, control, value) for value in valid]
        trials += swept
        checks.append(_all_taken(control, swept))
        checks += _refusals(client, gpu, control, trials)
        if setters is not None and any(trial.applied is not None for trial in swept):
            answers += _outside(client, gpu, control, valid, setters)
        _reset(client, gpu, control)
    checks += _order(client, gpu)
    checks += _persistence(client, gpu)
    with load(simulated, gpu) as loaded:
        if loaded:
            settling += _settling(client, gpu)
    client.release(gpu.uuid)
    of_limit = [trial for trial in trials if trial.control == Control.POWER_LIMIT.value]
    return ExercisedGpu(
        index=gpu.index,
        name=gpu.name,
        found=found,
        left=eventually(lambda: held(client, gpu), lambda now: now == found),
        trials=trials,
        power_limit_rounding=rounding(of_limit),
        settling=settling,
        checks=checks,
        outside=answers,
    )


def _trial(client: Client, gpu: GpuInfo, control: Control, value: Sequence[int]) -> Trial:
    begin_s = time.monotonic()

    def took_ms() -> float:
        return round((time.monotonic() - begin_s) * 1000, 3)

    try:
        applied = client.set(gpu.uuid, control, value)[gpu.uuid]
    except ZeusIpcError as error:
        code = error.device_code
        return Trial(control.value, list(value), None, took_ms(), str(error.code), code)
    return Trial(control.value, list(value), applied, took_ms())


def _reset(client: Client, gpu: GpuInfo, control: Control) -> None:
    """Restores a control and keeps its lease; a failed restore is found at the end."""
    with contextlib.suppress(ZeusIpcError):
        client.reset(gpu.uuid, control)


def _all_taken(control: Control, trials: Sequence[Trial]) -> Condition:
    """Checks that every value within the range is accepted, rounded or not; or none is, if the
    driver turns out not to offer the control.
    """
    refused = [trial for trial in trials if trial.applied is None]
    text = "; ".join(f"{value_text(control.value, one.asked)}: {one.error}" for one in refused)
    if all(one.error == ErrorCode.NOT_SUPPORTED for one in trials):
        return Condition(f"{control.value} is not offered by this GPU or its driver", True, text)
    what = f"every value of {control.value} within its range is taken"
    return Condition(what, not refused, text or f"{len(trials)} of {len(trials)}")


def _values(client: Client, gpu: GpuInfo, control: Control) -> list[list[int]]:
    if control is Control.POWER_LIMIT:
        low, high = gpu.power_limit_min_mw, gpu.power_limit_max_mw
        highest = gpu.power_limit_highest_mw
        if low is None or high is None:
            return []
        return [[mw] for mw in power_limits(low, min(high, highest or high))]
    if control is Control.PERSISTENCE_MODE:
        return [[1], [0], [1]]
    if control is Control.POWER_PROFILE:
        profiles = [one.profile for one in gpu.power_profiles]
        return [*([profile] for profile in profiles), profiles, []]
    clocks = client.clocks(gpu.uuid)
    if control is Control.MEMORY_CLOCKS:
        return [[mhz, mhz] for mhz in clocks.memory_mhz]
    return clock_ranges(clocks.gpu_mhz[str(clocks.memory_mhz[0])])


def _refusals(
    client: Client, gpu: GpuInfo, control: Control, trials: list[Trial]
) -> Iterator[Condition]:
    """Values outside the range are refused and change nothing."""
    if control is not Control.POWER_LIMIT or gpu.power_limit_min_mw is None:
        return
    assert gpu.power_limit_max_mw is not None
    for mw in (gpu.power_limit_min_mw - 1000, gpu.power_limit_max_mw + 1000):
        before = _limit(client, gpu)
        trial = _trial(client, gpu, control, [mw])
        trials.append(trial)
        unchanged = _limit(client, gpu) == before
        refused = f"refused ({trial.error})" if trial.applied is None else "taken"
        yield Condition(
            f"a power limit of {mw / 1000:g} W is refused and changes nothing",
            trial.applied is None and unchanged,
            refused + ("" if unchanged else ", and the limit changed"),
        )


def _outside(
    client: Client,
    gpu: GpuInfo,
    control: Control,
    valid: list[list[int]],
    setters: outside.Setters,
) -> Iterator[DriverAnswer]:
    """Records the driver's own answers; zeusd overwrites what the driver accepts, and restores it
    later.
    """
    for value in outside.values(control, valid):
        _trial(client, gpu, control, valid[0])
        error = setters.ask(gpu.uuid, control, value)
        yield DriverAnswer(
            control.value,
            value,
            outside.CALLS[control],
            error.code if error else 0,
            error.text if error else "accepted",
            held(client, gpu).of(control.value),
        )
        if error is None:
            for one in valid[:2]:
                _trial(client, gpu, control, one)


def _order(client: Client, gpu: GpuInfo) -> Iterator[Condition]:
    """Checks that limit and clock do not change each other, in either order."""
    names = set(gpu.controls)
    if not {Control.POWER_LIMIT.value, Control.GPU_CLOCKS.value} <= names:
        return
    pairs = (
        (Control.POWER_LIMIT, _values(client, gpu, Control.POWER_LIMIT)[0]),
        (Control.GPU_CLOCKS, _values(client, gpu, Control.GPU_CLOCKS)[2]),
    )
    for order in (pairs, pairs[::-1]):
        applied = {control: _trial(client, gpu, control, value).applied for control, value in order}
        wanted = applied[Control.POWER_LIMIT]
        shown = _limit(client, gpu)
        first = order[0][0].value
        yield Condition(
            f"limit and clocks hold together, {first} first",
            None not in applied.values() and wanted == [shown],
            f"the limit reads {shown} mW",
        )
        for control, _ in order:
            _reset(client, gpu, control)


def _persistence(client: Client, gpu: GpuInfo) -> Iterator[Condition]:
    """A limit survives persistence mode off, because zeusd keeps the driver open."""
    names = set(gpu.controls)
    if not {Control.POWER_LIMIT.value, Control.PERSISTENCE_MODE.value} <= names:
        return
    applied = _trial(
        client, gpu, Control.POWER_LIMIT, _values(client, gpu, Control.POWER_LIMIT)[2]
    ).applied
    for on in (1, 0):
        _trial(client, gpu, Control.PERSISTENCE_MODE, [on])
    shown = _limit(client, gpu)
    yield Condition(
        "a power limit survives persistence mode off", applied == [shown], f"it reads {shown} mW"
    )
    for control in (Control.PERSISTENCE_MODE, Control.POWER_LIMIT):
        _reset(client, gpu, control)


def _settling(client: Client, gpu: GpuInfo) -> Iterator[Settling]:
    """Measures how long a new limit or clock takes to show in the readings."""
    if Control.POWER_LIMIT.value in gpu.controls:
        value = _values(client, gpu, Control.POWER_LIMIT)[0]

        def under(state: GpuState) -> bool:
            return state.power_mw is not None and state.power_mw <= value[0] * (1 + _SLACK)

        yield from _settle(client, gpu, Control.POWER_LIMIT, value, under)
    if Control.GPU_CLOCKS.value in gpu.controls:
        clock = _values(client, gpu, Control.GPU_CLOCKS)[2]

        def locked(state: GpuState) -> bool:
            return state.gpu_clock_mhz == clock[0]

        yield from _settle(client, gpu, Control.GPU_CLOCKS, clock, locked)


def _settle(
    client: Client,
    gpu: GpuInfo,
    control: Control,
    value: list[int],
    shows: Callable[[GpuState], bool],
) -> Iterator[Settling]:
    """Sets a value that the GPU's load does not already satisfy."""

    def read() -> GpuState:
        return client.state(gpu.uuid)[gpu.uuid]

    if shows(eventually(read, lambda state: not shows(state))):
        return
    begin_s = time.monotonic()
    _trial(client, gpu, control, value)
    state = eventually(read, shows)
    took_ms = round((time.monotonic() - begin_s) * 1000, 3)
    _reset(client, gpu, control)
    yield Settling(control.value, value, took_ms if shows(state) else None)


def eventually(read: Callable[[], S], good: Callable[[S], bool], within_s: float = SETTLE_S) -> S:
    """Reads until the value is as wanted or the time is over; returns the last reading."""
    end_s = time.monotonic() + within_s
    while True:
        found = read()
        if good(found) or time.monotonic() > end_s:
            return found
        time.sleep(_LOOK_S)


def _limit(client: Client, gpu: GpuInfo) -> int | None:
    return client.state(gpu.uuid)[gpu.uuid].power_limit_mw


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
    """Ranges of clocks: each end, the middle, the lower half, and a clock off the grid.

    Args:
        clocks: Supported clocks, MHz.
    """
    low, middle, high = min(clocks), sorted(clocks)[len(clocks) // 2], max(clocks)
    wanted = [(high, high), (low, low), (middle, middle), (low, middle)]
    if len(clocks) > 1:
        wanted.append((middle + 1, middle + 1))
    return [list(one) for one in dict.fromkeys(wanted)]


def rounding(trials: Sequence[Trial]) -> Rounding | None:
    """Returns how values were rounded; None if too few were accepted to tell."""
    taken = [(one.asked[0], one.applied[0]) for one in trials if one.applied is not None]
    if len(taken) < 4:
        return None
    values = sorted({applied for _, applied in taken})
    step = math.gcd(*(value - values[0] for value in values)) or 1
    off = [applied - asked for asked, applied in taken]
    if not any(off):
        return Rounding(step, "exact")
    if all(-step < one <= 0 for one in off):
        return Rounding(step, "down")
    if all(0 <= one < step for one in off):
        return Rounding(step, "up")
    return Rounding(step, "nearest" if all(2 * abs(one) <= step for one in off) else "other")
