"""What an exercise reports: one JSON object, published as `zeusctl.exercise/1`, and a page of text.

Values of controls are as in the protocol: mW, MHz, 0 or 1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zeus_common.text import count, value_text
from zeus_ipc.controls import Control

SCHEMA = "zeusctl.exercise/1"


@dataclass(frozen=True)
class SetTrial:
    """One set of a control."""

    control: str
    asked: list[int]
    applied: list[int] | None
    """The value read back, or the requested one if it cannot be read; None: refused."""
    took_ms: float
    """From the request to zeusd's reply, which comes after the value was read back."""
    error: str | None = None
    """Code of the refusal, see `zeus_ipc.errors`."""
    device_code: int | None = None
    """The driver's return code; None: the driver was not asked, or accepted the value."""


@dataclass(frozen=True)
class DriverAnswer:
    """What the driver itself answered to a value outside a control's range."""

    control: str
    asked: list[int]
    call: str
    code: int
    """The driver's return code; 0: it accepted the value."""
    text: str
    """What the code means."""
    holds: list[int] | None
    """What the GPU held afterwards; None: it cannot be read."""


@dataclass(frozen=True)
class ValueRounding:
    """How a control's values are rounded.

    Attributes:
        step: Common divisor of the differences between accepted values.
        toward: `exact`, `down`, `up`, `nearest`, or `other`.
    """

    step: int
    toward: str


@dataclass(frozen=True)
class Settling:
    """How long a new value took to show on a GPU under load; None: over five seconds."""

    control: str
    value: list[int]
    shown_ms: float | None


@dataclass(frozen=True)
class Condition:
    """A condition that must hold."""

    what: str
    ok: bool
    text: str


@dataclass(frozen=True)
class ControlValues:
    """The values of a GPU's controls that can be read."""

    power_limit_mw: int | None
    enforced_power_limit_mw: int | None
    persistence_mode: bool | None
    locked_gpu_clocks_mhz: list[int] | None
    locked_memory_clocks_mhz: list[int] | None
    power_profiles: list[int] | None = None
    """Workload power profiles that are requested."""

    def of(self, control: str) -> list[int] | None:
        """What a control holds; None: it cannot be read."""
        values = {
            Control.POWER_LIMIT.value: self.power_limit_mw,
            Control.PERSISTENCE_MODE.value: self.persistence_mode,
        }
        value = values.get(control)
        return None if value is None else [int(value)]


@dataclass(frozen=True)
class ExercisedGpu:
    """One GPU's exercise."""

    index: int
    name: str
    found: ControlValues
    left: ControlValues
    trials: list[SetTrial]
    power_limit_rounding: ValueRounding | None
    settling: list[Settling]
    checks: list[Condition]
    outside: list[DriverAnswer] = field(default_factory=list)

    @property
    def as_found(self) -> bool:
        """Whether it was left as it was found."""
        return self.found == self.left


@dataclass(frozen=True)
class ExerciseReport:
    """An exercise's report."""

    at: str
    zeusd: str
    driver: str | None
    simulated: bool
    seconds: float
    gpus: list[ExercisedGpu]
    checks: list[Condition] = field(default_factory=list)
    """Checks of the whole node: kills of zeusd."""
    driver_not_asked: str | None = None
    """Why the driver was not asked for values outside its ranges; None: it was."""

    @property
    def as_found(self) -> bool:
        """Whether every GPU was left as it was found."""
        return all(gpu.as_found for gpu in self.gpus)

    @property
    def ok(self) -> bool:
        """Whether everything held and every GPU was left as it was found."""
        checks = [*self.checks, *(check for gpu in self.gpus for check in gpu.checks)]
        return all(check.ok for check in checks) and self.as_found

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)


def lines(report: ExerciseReport) -> Iterator[str]:
    """The page, line by line."""
    what = "simulated GPUs" if report.simulated else "GPUs"
    yield f"Exercise of {what}, driver {report.driver}: {report.at}, {report.seconds:.0f} s"
    for gpu in report.gpus:
        yield ""
        yield f"GPU {gpu.index}: {gpu.name}"
        yield from _gpu(gpu)
    yield ""
    if report.driver_not_asked:
        yield (
            "  the driver was not asked about values outside its ranges (zeusd refuses them): "
            f"{report.driver_not_asked}"
        )
    yield from _checks(report.checks)


def _gpu(gpu: ExercisedGpu) -> Iterator[str]:
    for control in dict.fromkeys(trial.control for trial in gpu.trials):
        trials = [trial for trial in gpu.trials if trial.control == control]
        yield f"  {control}: {_summary(trials)}"
        for trial in trials:
            if trial.applied is not None and trial.applied != trial.asked:
                asked, got = value_text(control, trial.asked), value_text(control, trial.applied)
                yield f"    asked for {asked}, holds {got}"
            elif trial.applied is None:
                device = "" if trial.device_code is None else f", driver's code {trial.device_code}"
                yield f"    {value_text(control, trial.asked)}: {trial.error}{device}"
    for answer in gpu.outside:
        holds = f", holds {value_text(answer.control, answer.holds)}" if answer.holds else ""
        switch = answer.control == Control.PERSISTENCE_MODE.value  # 2 is neither on nor off
        asked = str(answer.asked[0]) if switch else value_text(answer.control, answer.asked)
        yield f"  {answer.call}, {asked}: {answer.text} ({answer.code}){holds}"
    rounding = gpu.power_limit_rounding
    if rounding is not None:
        exact = rounding.toward == "exact"
        how = "taken exactly" if exact else f"rounded {rounding.toward} to {rounding.step} mW"
        yield f"  power limits are {how}"
    for one in gpu.settling:
        took = "not at all" if one.shown_ms is None else f"after {one.shown_ms:.0f} ms"
        yield f"  {one.control} {value_text(one.control, one.value)} shows under load {took}"
    if not gpu.settling:
        yield "  settling was not measured: that needs load, by PyTorch that sees this GPU"
    yield from _checks(gpu.checks)


def _summary(trials: Sequence[SetTrial]) -> str:
    took = sorted(trial.took_ms for trial in trials)
    taken = sum(trial.applied is not None for trial in trials)
    middle, last = took[len(took) // 2], took[-1]
    return (
        f"{count(len(trials), 'value')}, {taken} accepted; a set takes {middle:.0f} ms (longest "
        f"{last:.0f} ms)"
    )


def _checks(checks: Sequence[Condition]) -> Iterator[str]:
    for check in checks:
        yield f"  {'OK' if check.ok else 'FAILED':6}  {check.what}: {check.text}"
