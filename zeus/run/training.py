"""One job of `ZeusMaster`, from its first run. Its state follows from the results in its folder: if
a process before was killed, each run that has a result there is not trained again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Excludes, Run
from zeus.policy.recurrence import Recurrences, Start
from zeus.run import files
from zeus.run.child import follow, still_trains
from zeus.run.exceptions import ScriptFailedError
from zeus.run.files import FileError, TrainResult
from zeus.utils.metric import zeus_cost

if TYPE_CHECKING:
    from zeus.run.master import ZeusMaster


@dataclass
class Training:
    """A job that a master trains.

    Attributes:
        resumes: Whether a process before has begun it.
    """

    master: ZeusMaster
    job: Job
    policy: BatchSizeOptimizer
    batch_sizes: Sequence[int]
    beta_knob: InitVar[float]
    eta_knob: float
    logdir: str
    resumes: bool

    def __post_init__(self, beta_knob: float) -> None:
        self._recurrences = Recurrences(self.policy, self.job, beta_knob)
        self._history: list[HistoryEntry] = []
        self._runs = 0

    def run(self, num_recurrence: int) -> list[HistoryEntry]:
        """Trains until the job has recurred this many times."""
        while self._recurrences.recurrence <= num_recurrence:
            now = self._recurrences.begin()
            result = self._found(now) if self.resumes else None
            self._end(now, result or self._train(now))
        return self._history

    def _found(self, now: Start) -> TrainResult | None:
        """Returns the result of a run that a process before has begun, if it has one."""
        job_id = files.job_id(now.recurrence, now.number)
        log_path = files.train_log(self.logdir, job_id)
        if still_trains(log_path):
            print(f"[ZeusMaster] {job_id}: its script still trains, see {log_path}", flush=True)
            follow(lambda: still_trains(log_path), log_path)
        try:
            return files.load_result(files.train_json(self.logdir, job_id, now.batch_size))
        except FileError:
            return None

    def _train(self, now: Start) -> TrainResult:
        """Trains one run."""
        master, size = self.master, now.batch_size
        job_id = files.job_id(now.recurrence, now.number)
        try:
            energy, seconds, reached = master.run_job(
                self.job,
                batch_size=size,
                learning_rate=self.job.scale_lr(size),
                seed=master.seed + self._runs,
                logdir=self.logdir,
                rec_i=now.recurrence,
                tries=now.number,
                eta_knob=self.eta_knob,
                cost_ub=now.cost_bound,
            )
        except ScriptFailedError as error:
            result = self._failed(size, error)
        else:
            saved = result_of(self.logdir, job_id, size)
            if saved is not None:
                return saved
            result = TrainResult(  # of a subclass that runs jobs in its own way
                energy=energy,
                time=seconds,
                cost=zeus_cost(energy, seconds, self.eta_knob, master.max_power),
                num_epochs=0,
                reached=reached,
                max_power=master.max_power,
            )
        files.save(files.train_json(self.logdir, job_id, size), result)
        return result

    def _failed(self, size: int, error: ScriptFailedError) -> TrainResult:
        """Returns the result of a script that has written none, or raises its error."""
        larger = size > (self.job.default_bs or 0)
        oom = error.out_of_memory and larger and isinstance(self.policy, Excludes)
        if any(entry.bs == size for entry in self._history) or not (oom or self._history):
            raise error
        # Other sizes trained, this one never did.
        print(
            f"[ZeusMaster] {error}\n"
            + (
                f"GPU memory does not suffice for batch size {size} or more"
                if oom
                else f"batch size {size} counts as one that does not reach the target"
            )
        )
        nothing = {"energy": 0.0, "time": 0.0, "cost": 0.0, "num_epochs": 0, "reached": False}
        return TrainResult(**nothing, failure="oom" if oom else "failed")

    def _end(self, now: Start, result: TrainResult) -> None:
        """A run has ended."""
        if result.failure == "oom" and isinstance(self.policy, Excludes):
            # It says nothing about the target: as if the size had not been tried.
            out = [size for size in self.batch_sizes if size >= now.batch_size]
            self.policy.exclude(self.job, out)
            return
        self._runs += 1
        if result.failure is not None:
            self._recurrences.observe(Run(now.batch_size, 0.0, converged=False))
            return
        run = Run(
            batch_size=now.batch_size,
            # Of the GPUs that it trained on, which may not be all visible ones.
            cost=result.cost,
            converged=result.reached,
            epochs=result.num_epochs or None,
            overhead=result.overhead,
            cost_bound=None if math.isinf(now.cost_bound) else now.cost_bound,
            stopped_by_cost=result.stopped_by_cost,
            utilization=result.utilization,
        )
        outcome = _described(run, result.time)
        print(f"[ZeusMaster] {files.job_id(now.recurrence, now.number)}: {outcome}")
        entry = HistoryEntry(run.batch_size, None, result.energy, run.converged, result.time)
        self._history.append(entry)
        files.write_history(self.logdir, self._history)
        self._recurrences.observe(run)


def result_of(logdir: str, job_id: str, batch_size: int) -> TrainResult | None:
    """Reads the result of a run; None if there is none.

    Raises:
        RuntimeError: It cannot be read.
    """
    path = files.train_json(logdir, job_id, batch_size)
    if not path.exists():
        return None
    try:
        return files.load_result(path)
    except FileError as error:
        raise RuntimeError(f"{error}; run the job again") from None


def _described(run: Run, seconds: float) -> str:
    if run.converged:
        end = "reached the target"
    elif run.stopped_by_cost:
        end = "was given up for its cost"
    else:
        end = "did not reach the target"
    epochs = "" if run.epochs is None else f" after {run.epochs} epochs"
    return f"batch size {run.batch_size} {end}{epochs}, {seconds:.1f} s, cost {run.cost:.0f} J"
