"""`ZeusMaster`: trains a recurring job again and again, each time with a policy's batch size."""

from __future__ import annotations

import contextlib
import math
import os
import time
from copy import deepcopy
from pathlib import Path

from zeus.analyze import HistoryEntry
from zeus.device import get_gpus
from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Run
from zeus.policy.recurrence import Recurrences, Try
from zeus.run import files
from zeus.run.child import how_it_ended, run_script, tail
from zeus.run.console import FileAndConsole
from zeus.run.files import FileError, TrainResult
from zeus.run.settings import Settings
from zeus.utils.metric import zeus_cost


class ScriptFailedError(RuntimeError):
    """A training script ended before it had a result."""


class ZeusMaster:
    """Runs recurring jobs whose training scripts use `ZeusDataLoader`.

    Args:
        batch_size_optimizer: Chooses the batch size of each run; each job gets a copy of it.
        log_base: Folder, absolute, in which each job gets a folder of its own.
        monitor_path: Absolute path of ml-energy/zeus's monitor program, which scripts find in
            `ZEUS_MONITOR_PATH`. Nothing here runs it; None leaves the path out.
        seed: Of the first run; each one after it gets the next number.
        observer_mode: Power limits are measured, but training stays at the highest.
        profile_warmup_iters: Iterations that are not measured after a change of the limit.
        profile_measure_iters: Iterations that are measured at each limit.

    Raises:
        ValueError: A path is not absolute, a number of iterations is out of range, or no GPU is
            visible.
        ZeusGPUInitError: The GPUs cannot be reached.
    """

    def __init__(
        self,
        batch_size_optimizer: BatchSizeOptimizer,
        log_base: str,
        monitor_path: str | None = None,
        seed: int = 123456,
        observer_mode: bool = False,
        profile_warmup_iters: int = 10,
        profile_measure_iters: int = 40,
    ) -> None:
        for name, path in (("log_base", log_base), ("monitor_path", monitor_path)):
            if path is not None and not os.path.isabs(path):
                raise ValueError(
                    f"{name} must be an absolute path, not {path!r}: scripts run in folders of "
                    "their own"
                )
        if profile_warmup_iters < 0 or profile_measure_iters < 1:
            raise ValueError(
                "profile_warmup_iters must not be negative, and profile_measure_iters must be "
                f"positive; they are {profile_warmup_iters} and {profile_measure_iters}"
            )
        self.batch_size_optimizer = batch_size_optimizer
        self.log_base = log_base
        self.monitor_path = monitor_path
        self.seed = seed
        self.observer_mode = observer_mode
        self.profile_warmup_iters = profile_warmup_iters
        self.profile_measure_iters = profile_measure_iters
        gpus = get_gpus()
        self._device_count = len(gpus)
        _, highest_mw = gpus[0].get_power_management_limit_constraints()
        self._max_power = highest_mw / 1000 * self._device_count

    def build_logdir(
        self,
        job: Job,
        num_recurrence: int,
        eta_knob: float,
        beta_knob: float,
        exist_ok: bool = True,
    ) -> str:
        """Makes the folder for the files of a job.

        Args:
            job: The job.
            num_recurrence: How many times it recurs.
            eta_knob: 1 counts energy only, 0 time only.
            beta_knob: So many times the lowest cost is too much.
            exist_ok: Whether it may be there already.

        Returns:
            Its path.

        Raises:
            OSError: It cannot be made.
        """
        now = time.strftime("%Y%m%d%H%M%s")
        name = f"{job.to_logdir()}+x{num_recurrence}+eta{eta_knob}+beta{beta_knob}+{now}"
        folder = os.path.join(self.log_base, name)
        os.makedirs(folder, exist_ok=exist_ok)
        return folder

    def run(
        self,
        job: Job,
        num_recurrence: int,
        batch_sizes: list[int],
        beta_knob: float,
        eta_knob: float,
    ) -> list[HistoryEntry]:
        """Trains a job as often as it recurs, and each time until a run reaches the target.

        `history.json` in the job's folder has all runs up to now at any time.

        Args:
            job: The job, with its command, default batch size and default learning rate.
            num_recurrence: How many times it recurs.
            batch_sizes: The batch sizes to choose among.
            beta_knob: A run is given up when it would cost so many times the lowest cost.
            eta_knob: 1 counts energy only, 0 time only.

        Returns:
            All runs, in order.

        Raises:
            ValueError: An argument makes no sense, or the job lacks something; nothing has run.
            NotImplementedError: How the optimizer's learning rate scales is not known.
            RuntimeError: A script failed with a batch size that trained before, or in the first
                run; the default batch size missed the target; or the target is out of reach. One
                sentence says which.
            OSError: Files cannot be written.
        """
        if job.default_bs is None:
            raise ValueError(f"{job} has no default batch size; give Job(default_bs=...)")
        if job.command is None:
            raise ValueError(f"{job} has no command to run; give Job(command=[...])")
        if not 0 <= eta_knob <= 1:
            raise ValueError(f"eta_knob must be between 0 and 1, not {eta_knob:g}")
        if not beta_knob > 0:
            raise ValueError(f"beta_knob must be positive, not {beta_knob:g}")
        job.scale_lr(job.default_bs)
        policy = deepcopy(self.batch_size_optimizer)
        policy.register_job(job, batch_sizes)
        recurrences = Recurrences(policy, job, beta_knob)
        logdir = self.build_logdir(job, num_recurrence, eta_knob, beta_knob)
        with (
            FileAndConsole(Path(logdir, files.MASTER_LOG)) as both,
            contextlib.redirect_stdout(both),
        ):
            print(f"[ZeusMaster] {job}, {num_recurrence} times; files are in {logdir}")
            return self._train(job, num_recurrence, recurrences, eta_knob, logdir)

    def _train(
        self,
        job: Job,
        num_recurrence: int,
        recurrences: Recurrences,
        eta_knob: float,
        logdir: str,
    ) -> list[HistoryEntry]:
        history: list[HistoryEntry] = []
        done = failed = 0
        while done < num_recurrence:
            now = recurrences.begin()
            seed = self.seed + len(history) + failed
            try:
                run, energy, seconds = self._try(job, now, seed, logdir, eta_knob)
            except ScriptFailedError as error:
                if not history or any(entry.bs == now.batch_size for entry in history):
                    raise
                # Others trained, this never did: for want of memory, most likely.
                print(
                    f"[ZeusMaster] {error}\nbatch size {now.batch_size} counts as one that does "
                    "not reach the target"
                )
                failed += 1
                recurrences.end(Run(now.batch_size, 0.0, converged=False))
                continue
            history.append(HistoryEntry(run.batch_size, None, energy, run.converged, seconds))
            files.write_history(logdir, history)
            print(f"[ZeusMaster] {files.job_id(now.recurrence, now.number)}: {_told(run, seconds)}")
            recurrences.end(run)
            done += run.converged
        return history

    def _try(
        self, job: Job, now: Try, seed: int, logdir: str, eta_knob: float
    ) -> tuple[Run, float, float]:
        """One run. Returns it, its energy, J, and its time, s."""
        size = now.batch_size
        energy, seconds, reached = self.run_job(
            job,
            batch_size=size,
            learning_rate=job.scale_lr(size),
            seed=seed,
            logdir=logdir,
            rec_i=now.recurrence,
            tries=now.number,
            eta_knob=eta_knob,
            cost_ub=now.cost_bound,
        )
        result = self._result(logdir, files.job_id(now.recurrence, now.number), size)
        if result is None:  # of a subclass that runs jobs in its own way
            cost = zeus_cost(energy, seconds, eta_knob, self._max_power)
            result = TrainResult(
                energy=energy, time=seconds, cost=cost, num_epochs=0, reached=reached
            )
        run = Run(
            batch_size=size,
            # Of the GPUs that it trained on, which need not be all that are visible here.
            cost=result.cost,
            converged=reached,
            epochs=result.num_epochs or None,
            overhead=result.overhead,
            cost_bound=None if math.isinf(now.cost_bound) else now.cost_bound,
            stopped_by_cost=result.stopped_by_cost,
            utilization=result.utilization,
        )
        return run, energy, seconds

    def run_job(
        self,
        job: Job,
        batch_size: int,
        learning_rate: float,
        seed: int,
        logdir: str,
        rec_i: int,
        tries: int,
        eta_knob: float,
        cost_ub: float,
    ) -> tuple[float, float, bool]:
        """Trains a job once.

        Args:
            job: The job.
            batch_size: Its batch size.
            learning_rate: Its learning rate.
            seed: Its seed.
            logdir: Folder for its files.
            rec_i: The recurrence, from 1.
            tries: Which try of the recurrence, from 1.
            eta_knob: 1 counts energy only, 0 time only.
            cost_ub: Cost at which it is given up, J; infinite for never.

        Returns:
            Energy, J, time, s, and whether it reached the target.

        Raises:
            ScriptFailedError: The script failed before its result was written; the message has the
                end of its log.
        """
        job_id = files.job_id(rec_i, tries)
        settings = Settings(
            target_metric=job.target_metric,
            log_dir=logdir,
            job_id=job_id,
            cost_thresh=cost_ub,
            eta_knob=eta_knob,
            monitor_path=self.monitor_path or Settings.monitor_path,
            warmup_iters=self.profile_warmup_iters,
            measure_iters=self.profile_measure_iters,
            use_optimal_pl=not self.observer_mode,
        )
        # Python's own buffer would show a script's lines long after they were printed.
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **settings.to_env()}
        command = job.gen_command(batch_size, learning_rate, seed, rec_i)
        result_path = files.train_json(logdir, job_id, batch_size)
        result_path.unlink(missing_ok=True)  # one of before is not this run's
        bound = "" if math.isinf(cost_ub) else f", given up at {cost_ub:.0f} J"
        print(f"[ZeusMaster] {job_id}: batch size {batch_size}{bound}: {' '.join(command)}")
        log_path = files.train_log(logdir, job_id)
        code = run_script(command, env, job.workdir, log_path)
        result = self._result(logdir, job_id, batch_size)
        if result is None:
            raise ScriptFailedError(_failure(job_id, batch_size, code, log_path))
        if code != 0 and not result.stopped_by_cost:
            print(
                f"[ZeusMaster] {job_id}: the script {how_it_ended(code)}, but its result was "
                f"written before and counts; see {log_path}"
            )
        return result.energy, result.time, result.reached

    @staticmethod
    def _result(logdir: str, job_id: str, batch_size: int) -> TrainResult | None:
        path = files.train_json(logdir, job_id, batch_size)
        if not path.exists():
            return None
        try:
            return files.load_result(path)
        except FileError as error:
            raise RuntimeError(f"{error}; run the job again") from None


def _told(run: Run, seconds: float) -> str:
    if run.converged:
        end = "reached the target"
    elif run.stopped_by_cost:
        end = "was given up for its cost"
    else:
        end = "did not reach the target"
    epochs = "" if run.epochs is None else f" after {run.epochs} epochs"
    return f"batch size {run.batch_size} {end}{epochs}, {seconds:.1f} s, cost {run.cost:.0f} J"


def _failure(job_id: str, batch_size: int, code: int, log_path: Path) -> str:
    advice = ""
    if code == 0:
        advice = (
            "; its training loop must be `for epoch in train_loader.epochs()`, of a ZeusDataLoader "
            f"with max_epochs and a batch size of {batch_size}, and run to the end"
        )
    return (
        f"the training script of {job_id} with batch size {batch_size} {how_it_ended(code)} before "
        f"it had a result{advice}. The end of its log, {log_path}:\n{tail(log_path)}"
    )
