"""One job of `ZeusMaster`, from its first run, or resumed from another process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Excludes, Run
from zeus.policy.knowledge import Knowledge, save
from zeus.policy.recurrence import Recurrences, Start, UnreachableTargetError, give, learned
from zeus.run import files
from zeus.run.child import follow, still_trains
from zeus.run.exceptions import ScriptFailedError
from zeus.run.files import FileError, TrainResult
from zeus.run.records import Records
from zeus.utils.metric import zeus_cost

if TYPE_CHECKING:
    from zeus.run.master import ZeusMaster


@dataclass
class Training:
    """A job that a master trains: its policy and its records.

    Its state follows from its records: `_record` writes each, and then applies it. A process that
    resumes the job applies the records of the one before.
    """

    master: ZeusMaster
    job: Job
    policy: BatchSizeOptimizer
    batch_sizes: Sequence[int]
    beta_knob: InitVar[float]
    eta_knob: float
    logdir: str
    records: Records

    def __post_init__(self, beta_knob: float) -> None:
        self._recurrences = Recurrences(self.policy, self.job, beta_knob)
        self._history: list[HistoryEntry] = []
        self._runs = 0
        self._now: Start | None = None  # the run that has begun and not ended

    def run(self, num_recurrence: int, known: Knowledge | None) -> list[HistoryEntry]:
        """Trains until the job has recurred this many times.

        Args:
            known: Knowledge for a job that starts; one that is resumed has that of its start.
        """
        try:
            if not self.records.rows and known is not None:
                self._record("knowledge", text=known.to_json())
            for row in self.records.rows:
                self._apply(row)
            if self._runs or self._now is not None:
                print(f"[ZeusMaster] goes on after {self._runs} runs")
            if self._now is not None:
                self._resume(self._now)
            while self._recurrences.recurrence <= num_recurrence:
                self._train(self._recurrences.begin())
        except UnreachableTargetError:
            self.records.add("over")  # starting over would give the same result
            raise
        self.records.add("over")
        learnt = learned(self.policy, self.job)
        if self.master.knowledge is not None and learnt is not None:
            save(self.master.knowledge, replace(learnt, place=self.master.place))
        return self._history

    def _record(self, kind: str, **row: Any) -> None:
        self.records.add(kind, **row)
        self._apply({"kind": kind, **row})

    def _apply(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        if kind == "knowledge":  # of the arguments it began with, not the present ones
            give(self.policy, self.job, Knowledge.from_json(row["text"]))
        elif kind == "begun":
            # Perhaps again: a run that was killed may have been restarted. So that a resumed
            # policy's random draws are the same, it is asked, too.
            self._now = self._now or self._recurrences.begin()
        elif kind == "left out":
            self._now = None
            assert isinstance(self.policy, Excludes)
            out = [size for size in self.batch_sizes if size >= row["batch_size"]]
            self.policy.exclude(self.job, out)
        elif kind == "ended":
            self._now = None
            self._runs += 1
            if row["entry"] is not None:
                self._history.append(HistoryEntry(**row["entry"]))
                files.write_history(self.logdir, self._history)
            self._recurrences.observe(Run(**row["run"]))

    def _resume(self, now: Start) -> None:
        """Ends the run that a process before has begun."""
        job_id = files.job_id(now.recurrence, now.number)
        log_path = files.train_log(self.logdir, job_id)
        if still_trains(log_path):
            print(f"[ZeusMaster] {job_id}: its script still trains, see {log_path}", flush=True)
            follow(lambda: still_trains(log_path), log_path)
        result = result_of(self.logdir, job_id, now.batch_size)
        if result is not None:
            self._collect(now, result)
        else:
            self._train(now)

    def _train(self, now: Start) -> None:
        """Trains one run."""
        master, size = self.master, now.batch_size
        job_id = files.job_id(now.recurrence, now.number)
        files.train_json(self.logdir, job_id, size).unlink(missing_ok=True)
        self._now = now
        self._record("begun", recurrence=now.recurrence, number=now.number, batch_size=size)
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
            self._failed(size, error)
            return
        result = result_of(self.logdir, job_id, size)
        if result is None:  # of a subclass that runs jobs in its own way
            cost = zeus_cost(energy, seconds, self.eta_knob, master.max_power)
            result = TrainResult(
                energy=energy,
                time=seconds,
                cost=cost,
                num_epochs=0,
                reached=reached,
                max_power=master.max_power,
            )
        self._collect(now, result)

    def _failed(self, size: int, error: ScriptFailedError) -> None:
        """Handles a script without a result."""
        if any(entry.bs == size for entry in self._history):
            raise error
        larger = size > (self.job.default_bs or 0)
        if error.out_of_memory and larger and isinstance(self.policy, Excludes):
            # It says nothing about the target: as if the size had not been tried.
            print(
                f"[ZeusMaster] {error}\nGPU memory does not suffice for batch size {size} or more"
            )
            self._record("left out", batch_size=size)
            return
        if not self._history:
            raise error
        # Other sizes trained, this one never did.
        print(
            f"[ZeusMaster] {error}\nbatch size {size} counts as one that does not reach the target"
        )
        self._record("ended", run=asdict(Run(size, 0.0, converged=False)), entry=None)

    def _collect(self, now: Start, result: TrainResult) -> None:
        """Handles the result of a run."""
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
        self._record("ended", run=asdict(run), entry=asdict(entry))


def result_of(logdir: str, job_id: str, batch_size: int) -> TrainResult | None:
    """Reads the result that a run's script has written; None if there is none.

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
