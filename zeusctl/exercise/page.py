"""An exercise's report as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeus_ipc.controls import Control
from zeusctl.exercise.report import Condition, ExercisedGpu, ExerciseReport, Trial
from zeusctl.text import count, value_text


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


def _summary(trials: Sequence[Trial]) -> str:
    took = sorted(trial.took_ms for trial in trials)
    taken = sum(trial.applied is not None for trial in trials)
    middle, last = took[len(took) // 2], took[-1]
    return (
        f"{count(len(trials), 'value')}, {taken} taken; a set takes {middle:.0f} ms (longest "
        f"{last:.0f} ms)"
    )


def _checks(checks: Sequence[Condition]) -> Iterator[str]:
    for check in checks:
        yield f"  {'OK' if check.ok else 'FAILED':6}  {check.what}: {check.text}"
