"""Logging of figures to loggers, through their standard interfaces."""

from __future__ import annotations

import inspect
import statistics
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from zeus.utils.warn import warn
from zeus_ipc.overriding import override

Send = Callable[[dict[str, float], int], object]
"""A function of figures by name, and the step."""

_AXIS = "energy/steps"


class _Run:
    """What is known about a logger's run, in which several trainings may log.

    Attributes:
        before: Steps of earlier trainings.
        rows: Of Weights & Biases: what is not in a row of the job yet, ...
        at: ... the step that its next row has, ...
        alone: ... and whether nobody else has logged.
    """

    def __init__(self) -> None:
        self.before = 0
        # Rows that wait for the first row of the job itself; beyond it, the oldest are dropped.
        self.rows: deque[dict[str, float]] = deque(maxlen=10_000)
        self.at: int | None = None
        self.alone = True


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


def _run_of(target: Any) -> _Run:
    try:
        return _runs.setdefault(target, _Run())
    except TypeError:  # a user's own target that no dictionary takes
        return _Run()


class Log:
    """Passes figures to a function."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def __call__(self, figures: dict[str, float], step: int, end: bool = False) -> None:
        """Log figures.

        Args:
            step: Steps of this training so far.
        """
        self._send(figures, step)


class _RunLog(Log):
    """Passes figures to a logger's run, with steps that count on."""

    def __init__(self, send: Send, target: Any) -> None:
        super().__init__(send)
        self._run = _run_of(target)

    @override
    def __call__(self, figures: dict[str, float], step: int, end: bool = False) -> None:
        self._send(figures, self._run.before + step)
        self._run.before += step if end else 0


class _WandbLog(Log):
    """Logs to Weights & Biases without adding steps, which would move or drop the job's own rows.

    Figures become part of the job's next row (means, if there are several), on an axis of their
    own. If the job logs nothing, each gets a row when training ends.
    """

    def __init__(self, target: Any) -> None:
        super().__init__(lambda figures, step: None)
        self._target = target

    @override
    def __call__(self, figures: dict[str, float], step: int, end: bool = False) -> None:
        run = getattr(self._target, "run", None) or self._target  # the module's, if it is `wandb`
        known = _run_of(run)
        if known.at is None:
            run.define_metric(_AXIS, hidden=True)
            run.define_metric("energy/*", step_metric=_AXIS)
            known.alone = run.step == 0
        elif run.step != known.at:  # what was added to the job's row is written
            if not known.alone:
                known.rows.clear()
            known.alone = False
        known.rows.append(figures | {_AXIS: known.before + step})
        if not known.alone:
            run.log(_means(known.rows), commit=False)
        elif end:
            while known.rows:
                run.log(known.rows.popleft())
        known.before += step if end else 0
        known.at = run.step


def _means(rows: deque[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    means = {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}
    return means | {_AXIS: rows[-1][_AXIS]}


def as_log(target: Any) -> Log:
    """Returns what logs to a target.

    Args:
        target: A `SummaryWriter` of TensorBoard, a run of Weights & Biases (or `wandb`), `mlflow`
            (or its client's like), a Lightning logger, a function of figures and step, or None.

    Raises:
        TypeError: It is none of these.
    """
    if target is None:
        return Log(lambda figures, step: None)
    if hasattr(target, "add_scalar"):  # TensorBoard
        return _RunLog(
            lambda figures, step: [
                target.add_scalar(name, value, step) for name, value in figures.items()
            ],
            target,
        )
    if hasattr(target, "log_metrics"):  # MLflow, Lightning
        # MLflow would wait for its server.
        later = "synchronous" in inspect.signature(target.log_metrics).parameters
        options = {"synchronous": False} if later else {}
        return _RunLog(
            lambda figures, step: target.log_metrics(figures, step=step, **options), target
        )
    if hasattr(target, "define_metric"):
        return _WandbLog(target)
    if hasattr(target, "log"):
        return _RunLog(lambda figures, step: target.log(figures, step=step), target)
    if callable(target):
        return Log(target)
    raise TypeError(
        f"log must be a SummaryWriter, a run of Weights & Biases, mlflow, or a function of figures "
        f"and step, not {target!r}"
    )


class Once:
    """Logs figures; an error ends only the logging, with one warning."""

    def __init__(self, log: Log) -> None:
        self._log: Log | None = log

    def __call__(self, figures: dict[str, float], step: int, end: bool = False) -> None:
        """Log figures, if there are any; see `Log`."""
        if not figures or self._log is None:
            return
        try:
            self._log(figures, step, end)
        except Exception as error:  # noqa: BLE001 - a logger's, of which there are many
            self._log = None
            warn(f"Energy is still measured, but no longer logged: {error!r}")
