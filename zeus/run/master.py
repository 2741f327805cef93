"""`ZeusMaster`: trains a recurring job repeatedly, each time with a batch size chosen by a
policy."""

from __future__ import annotations

import contextlib
import math
import os
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from zeus.analyze import HistoryEntry
from zeus.device import get_gpus
from zeus.job import Job
from zeus.optimizer.batch_size.endings import says_out_of_memory
from zeus.policy.interface import BatchSizeOptimizer
from zeus.policy.knowledge import Place, load, save
from zeus.policy.recurrence import UnreachableTargetError, give, learned
from zeus.run import files
from zeus.run.child import how_it_ended, run_script, tail
from zeus.run.console import FileAndConsole
from zeus.run.exceptions import ScriptFailedError
from zeus.run.job_file import JOB, JobFile, unfinished
from zeus.run.settings import MONITOR_PATH, Settings
from zeus.run.training import Training, result_of


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
        knowledge: File of knowledge about a job on other GPUs, or under other power limits: it is
            used, and updated with what is learned here.

    Raises:
        ValueError: A path is not absolute, a number is out of range, or no GPU is visible.
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
        *,
        knowledge: str | None = None,
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
        self.knowledge = knowledge
        gpus = get_gpus()
        self._device_count = len(gpus)
        lowest_mw, highest_mw = gpus[0].get_power_management_limit_constraints()
        self.max_power = highest_mw / 1000 * self._device_count
        self.place = Place(gpus[0].get_name(), (lowest_mw / 1000, highest_mw / 1000))

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
            num_recurrence: How many times it recurs.
            eta_knob: 1 counts energy only, 0 time only.
            beta_knob: Runs are stopped at this multiple of the lowest cost.
            exist_ok: Whether it may exist already.

        Returns:
            Its path.

        Raises:
            OSError: It cannot be made.
        """
        now = time.strftime("%Y%m%d%H%M%s")
        folder = os.path.join(
            self.log_base, _prefix(job, num_recurrence, eta_knob, beta_knob) + now
        )
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

        `history.json` in the job's folder always has all runs so far. If a process that trained the
        same job, with the same arguments and policy, was killed or failed, its folder is continued:
        the results of its runs are used, and a script that still trains is waited for.

        Args:
            job: The job, with its command, default batch size and default learning rate.
            num_recurrence: How many times it recurs.
            batch_sizes: The batch sizes to choose among.
            beta_knob: A run is stopped when it would cost this multiple of the lowest cost.
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
        _check(job, eta_knob, beta_knob)
        policy = deepcopy(self.batch_size_optimizer)
        policy.register_job(job, batch_sizes)
        arguments = {
            "job": str(job),
            "batch_sizes": sorted(batch_sizes),
            "policy": policy.name,
            "seed": self.seed,
        }
        prefix = _prefix(job, num_recurrence, eta_knob, beta_knob)
        known = None if self.knowledge is None else load(self.knowledge, self.place)
        run = unfinished(self.log_base, prefix, arguments)
        if run is None:
            logdir = _unused(self.build_logdir(job, num_recurrence, eta_knob, beta_knob))
            file = JobFile(logdir)
            file.write(arguments, known, over=False)
        else:
            logdir, file = run
            known = file.knowledge  # that of its start, not the present one
        if known is not None:
            give(policy, job, known)
        training = Training(
            self, job, policy, batch_sizes, beta_knob, eta_knob, logdir, run is not None
        )
        with (
            contextlib.closing(file),
            contextlib.closing(FileAndConsole(Path(logdir, files.MASTER_LOG))) as both,
            contextlib.redirect_stdout(both),
        ):
            print(f"[ZeusMaster] {job}, {num_recurrence} times; files are in {logdir}")
            try:
                history = training.run(num_recurrence)
            except UnreachableTargetError:
                file.write(arguments, known, over=True)  # starting over would give the same result
                raise
            file.write(arguments, known, over=True)
        learnt = learned(policy, job)
        if self.knowledge is not None and learnt is not None:
            save(self.knowledge, replace(learnt, place=self.place))
        return history

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
            tries: Which try of the recurrence, from 1.
            eta_knob: 1 counts energy only, 0 time only.
            cost_ub: Cost at which it is stopped, J; infinite for never.

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
            monitor_path=self.monitor_path or MONITOR_PATH,
            profile_params=(self.profile_warmup_iters, self.profile_measure_iters),
            use_optimal_pl=not self.observer_mode,
        )
        # Python's own buffer would show a script's lines long after they were printed.
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **settings.to_env()}
        command = job.gen_command(batch_size, learning_rate, seed, rec_i)
        result_path = files.train_json(logdir, job_id, batch_size)
        result_path.unlink(missing_ok=True)  # an older one is not this run's
        bound = "" if math.isinf(cost_ub) else f", given up at {cost_ub:.0f} J"
        print(f"[ZeusMaster] {job_id}: batch size {batch_size}{bound}: {' '.join(command)}")
        log_path = files.train_log(logdir, job_id)
        code = run_script(command, env, job.workdir, log_path)
        result = result_of(logdir, job_id, batch_size)
        if result is None:
            raise ScriptFailedError(
                _failure(job_id, batch_size, code, log_path), says_out_of_memory(tail(log_path))
            )
        if code != 0 and not result.stopped_by_cost:
            print(
                f"[ZeusMaster] {job_id}: the script {how_it_ended(code)}, but its result was "
                f"written before and counts; see {log_path}"
            )
        return result.energy, result.time, result.reached


def _check(job: Job, eta_knob: float, beta_knob: float) -> None:
    """Checks what a job needs before its first run.

    Raises:
        ValueError: An argument makes no sense, or the job lacks something.
        NotImplementedError: How the optimizer's learning rate scales is not known.
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


def _unused(folder: str) -> str:
    """Returns the folder, or another if a job that began in the same second has it."""
    number, name = 1, folder
    while os.path.exists(os.path.join(name, JOB)):
        number += 1
        name = f"{folder}+{number}"
        os.makedirs(name, exist_ok=True)
    return name


def _prefix(job: Job, num_recurrence: int, eta_knob: float, beta_knob: float) -> str:
    return f"{job.to_logdir()}+x{num_recurrence}+eta{eta_knob}+beta{beta_knob}+"


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
