"""`BatchSizeOptimizer`: gets the batch size of one run of a recurring job, and reports its cost. No
failure ends training once it has begun. If the store of the trials is unavailable, the run uses the
best known size, applies the same rules here, and is reported later if possible (`run`, `link`).
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zeus.callback import Callback
from zeus.optimizer.batch_size.common import (
    CreatedJob,
    GpuConfig,
    JobSpec,
    JobSpecFromClient,
    NewTrial,
    Trials,
)
from zeus.optimizer.batch_size.exceptions import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
    ZeusBSOTrainFailError,
)
from zeus.optimizer.batch_size.link import Link, may_pass, patiently
from zeus.optimizer.batch_size.run import ActiveRun
from zeus.utils import framework
from zeus.utils.configured import OfProcess
from zeus_common.atomic import write_text
from zeus_ipc.parsing import parse, read_file

if TYPE_CHECKING:
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

log = logging.getLogger(__name__)

RUN_ID_ENV = "ZEUS_BSO_RUN_ID"
"""Environment variable with the name of a resumable run, see `BatchSizeOptimizer`."""

_MOST_NAMED = 180
"""Maximum length of such a name; a server accepts keys of 200 characters."""


class BatchSizeOptimizer(OfProcess, Callback):
    """Gets the batch size of a run of a recurring job, and reports what the run costs.

    Call `get_batch_size` before training, `on_train_begin` or `with optimizer:`, `on_evaluate`
    after each epoch's evaluation, and stop once `training_finished` is true. With several
    processes, only rank 0 does so, and broadcasts the result; in the others, everything but
    `get_batch_size` does nothing.

    Args:
        monitor: Monitor of all training GPUs that rank 0 can measure.
        server_url: URL of the server, such as `http://master:7788`. Its token, if any, comes from
            `ZEUS_BSO_TOKEN`.
        job: The recurring job. Without `job_id`, a name is generated and logged.
        rank: This process; None: from torch.distributed or torchrun.
        store: Without a server: a file for the trials of this machine's jobs.
        run_id: Name of a run that may be stopped and resumed from a checkpoint: the same name gets
            the same trial until that has ended. None: `ZEUS_BSO_RUN_ID`, if set.
        wait_s: How long to wait for the store before continuing without it, s.
        raise_on_failure: Raise ZeusBSOTrainFailError from `on_evaluate` if the run is stopped
            early, and ZeusBSORuntimeError if no batch size is available.
        cache: JSON file with the best known sizes, for when the store is unavailable; None: in the
            user's cache folder.

    Raises:
        ZeusBSOConfigError: An argument is wrong, or the GPUs are of several models.
        ZeusBSORuntimeError: The job was refused: it is registered with other settings, or the token
            is wrong.
        ImportError: httpx, or what `store` needs, is not installed.

    Attributes:
        job: The registered job; on ranks other than 0, the argument.
        current_batch_size: The run's batch size; 0 before `get_batch_size`.
        trial_number: Number of its trial; None if the store was unavailable.
        power_limit_optimizer: Set it to a power limit optimizer of the same run: the cost of its
            search is not charged to the batch size.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        server_url: str | None = None,
        job: JobSpec | None = None,
        rank: int | None = None,
        *,
        store: str | Path | None = None,
        run_id: str | None = None,
        wait_s: float = 10.0,
        raise_on_failure: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        if job is None:
            raise ZeusBSOConfigError("pass job=JobSpec(...): what is trained, and to which target")
        self.monitor = monitor
        self.rank = _rank() if rank is None else rank
        self.job = job
        self.current_batch_size = 0
        self.trial_number: int | None = None
        self._pid = os.getpid()
        self._run_id = _run_id(run_id)
        self.power_limit_optimizer: GlobalPowerLimitOptimizer | None = None
        self._wait_s = wait_s
        self._raises = raise_on_failure
        self._best = BestKnown(cache)
        self._run: ActiveRun | None = None
        self._outer: BaseException | None = None
        self._registered: CreatedJob | None = None
        if self.rank != 0:
            return
        self._connect = _connector(server_url, store)
        self._job = self.job = _with_gpus(job, monitor)
        self._trials: Trials | None = None
        self._away = ""
        try:
            self._opened(wait_s)
        except ZeusBSORuntimeError as error:
            self._close()
            if not may_pass(error):
                raise
            self._away = str(error).rstrip(".")
        if job.job_id is None:
            log.warning(
                "the job is named %s; its next runs need JobSpec(job_id=%r)",
                self._job.job_id,
                self._job.job_id,
            )

    # ------------------------------------------------------------------------------ what it knows

    @property
    def training_finished(self) -> bool:
        """Whether the run is over and training should stop."""
        return self._run is not None and self._run.finished

    @property
    def converged(self) -> bool:
        """Whether the run has reached its target."""
        return self._run is not None and self._run.converged

    @property
    def cur_epoch(self) -> int:
        """Epochs that were reported."""
        return 0 if self._run is None else self._run.epoch

    # ------------------------------------------------------------------------------ what is called

    def get_batch_size(self) -> int:
        """Returns the batch size of this run. It is the same at each call; a call after a run that
        ended unfinished, as by an error, begins another run.

        Raises:
            ZeusBSOBadOperationError: This is not rank 0.
            ZeusBSORuntimeError: With `raise_on_failure`: none is available.
        """
        if self.rank != 0:
            raise ZeusBSOBadOperationError(
                "only rank 0 asks for the batch size, and tells the others "
                f"(zeus.utils.framework.all_reduce); this is rank {self.rank}"
            )
        run = self._run
        if run is None or (run.over and not run.finished):
            self._run = self._begin()
        return self.current_batch_size

    def on_train_begin(self) -> None:
        """Training begins: starts the measurement.

        Raises:
            ZeusBSOOperationOrderError: `get_batch_size` was not called.
        """
        if self._mine:
            self._outer = sys.exc_info()[1]
            self._started("on_train_begin").begin()

    def on_epoch_begin(self) -> None:
        """An epoch begins. Optional: without it, each evaluation ends an epoch."""
        if self._mine and self._run is not None:
            self._run.epoch_begins()
            self._raise_if_given_up()

    def on_epoch_end(self) -> None:
        """An epoch has ended."""
        if self._mine and self._run is not None:
            self._run.epoch_ends()

    def on_evaluate(self, metric: float) -> None:
        """The model was evaluated after an epoch: reports it, and sets `training_finished`.

        Args:
            metric: The validation metric. A value that is not finite does not reach the target.

        Raises:
            ZeusBSOOperationOrderError: `get_batch_size` or `on_train_begin` was not called.
            ZeusBSOTrainFailError: With `raise_on_failure`: the run is stopped early.
        """
        if not self._mine:
            return
        run = self._started("on_evaluate")
        if not run.training:
            raise ZeusBSOOperationOrderError(
                "call on_train_begin, or use `with optimizer:`, before on_evaluate"
            )
        if run.finished:
            return
        run.evaluated(metric)
        if run.converged and self._best.get(self._job) is None:
            self._best.put(self._job, self.current_batch_size)
        self._raise_if_given_up()

    def on_train_end(self) -> None:
        """Training has ended, perhaps by the present exception."""
        if self._mine and self._run is not None:
            error = sys.exc_info()[1]
            # A program that trains again in an except clause has that clause's error as the present
            # one.
            self._run.end(None if error is self._outer else error)

    # --------------------------------------------------------------------------------- internals

    @property
    def _mine(self) -> bool:
        """Whether this process is rank 0, and not a child of fork."""
        return self.rank == 0 and os.getpid() == self._pid

    def _started(self, event: str) -> ActiveRun:
        if self._run is None:
            raise ZeusBSOOperationOrderError(f"call get_batch_size before {event}")
        return self._run

    def _raise_if_given_up(self) -> None:
        run = self._run
        if self._raises and run is not None and run.finished and not run.converged:
            raise ZeusBSOTrainFailError(
                f"training with batch size {self.current_batch_size} is given up: {run.message}"
            )

    def _opened(self, wait_s: float) -> Trials:
        """Opens the store, and registers the job if it was not registered yet."""
        trials = self._trials = self._trials or patiently(self._connect, wait_s)
        if self._registered is None:
            patiently(lambda: self._register(trials), wait_s)
        return trials

    def _register(self, trials: Trials) -> str:
        self.job = self._registered = trials.register(self._job)
        return self._registered.job_id

    def _close(self) -> None:
        trials, self._trials = self._trials, None
        if trials is not None:
            trials.close()

    def _begin(self) -> ActiveRun:
        wait_s = 0.0 if self._away else self._wait_s
        try:
            trials = self._opened(wait_s)
            trial = self._new_trial(trials, wait_s)
        except ZeusBSORuntimeError as error:
            self._close()
            if self._raises and not may_pass(error):
                raise
            return self._without(self._away or str(error).rstrip("."))
        self._away, self._trials = "", None  # the link closes it
        if trial.best_batch_size is not None:
            self._best.put(self._job, trial.best_batch_size)
        self.current_batch_size, self.trial_number = trial.batch_size, trial.trial_number
        log.info(
            "trial %d of job %s: batch size %d, given up %s",
            trial.trial_number,
            trial.job_id,
            trial.batch_size,
            "never" if trial.cost_bound is None else f"before it costs {trial.cost_bound:.4g} J",
        )
        return self._new_run(trial, Link(trials, trial, self._wait_s))

    def _new_trial(self, trials: Trials, wait_s: float) -> NewTrial:
        """Returns a trial of this run: a new one, or the one it had before it was stopped."""
        for number in itertools.count():
            key = f"{self._run_id or uuid.uuid4().hex}#{number}"
            trial = patiently(functools.partial(self._ask_for_trial, trials, key), wait_s)
            if trial.reason is None:  # the ended one was another run with this name
                return trial
        raise AssertionError

    def _ask_for_trial(self, trials: Trials, key: str) -> NewTrial:
        assert self._registered is not None
        try:
            return trials.begin_trial(self._registered.job_id, key)
        except ZeusBSORuntimeError as error:
            if error.status != 404:
                raise
            return trials.begin_trial(self._register(trials), key)  # someone has deleted the job

    def _without(self, why: str) -> ActiveRun:
        """Creates a run without a stored trial."""
        known = self._best.get(self._job)
        size = self._job.default_batch_size if known is None else known
        log.warning(
            "%s; this run takes batch size %d, the %s, and does not count",
            why,
            size,
            "default" if known is None else "best that is known",
        )
        self.current_batch_size, self.trial_number = size, None
        trial = NewTrial(job_id=self._job.job_id, batch_size=size, trial_number=1)
        return self._new_run(trial, None)

    def _new_run(self, trial: NewTrial, link: Link | None) -> ActiveRun:
        return ActiveRun(
            self._registered or self._job,
            trial,
            self.monitor,
            lambda: self.power_limit_optimizer,
            link,
            goes_on=self._run_id is not None,
        )


class BestKnown:
    """A JSON file with the last known best batch size of each job. Never raises: the default size
    is used if none is known.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is None:
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            path = Path(cache) / "zeus" / "batch_sizes.json"
        self.path = Path(path)

    def get(self, spec: JobSpecFromClient) -> int | None:
        """Returns the best known size of a job, if any."""
        size = self._read().get(_key(spec))
        return size if size in spec.batch_sizes else None

    def put(self, spec: JobSpecFromClient, batch_size: int) -> None:
        """Stores it."""
        sizes = self._read()
        if sizes.get(_key(spec)) == batch_size:
            return
        sizes[_key(spec)] = batch_size
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(sizes, indent=1, sort_keys=True))
        except OSError as error:
            log.info("the best batch size is not kept in %s: %s", self.path, error)

    def _read(self) -> dict[str, int]:
        try:
            sizes = parse(read_file(self.path))
        except (OSError, ValueError):
            return {}
        if not isinstance(sizes, dict):
            return {}
        return {key: size for key, size in sizes.items() if isinstance(size, int)}


def _key(spec: JobSpecFromClient) -> str:
    return f"{spec.job_id} on {spec.number_of_gpus} {spec.gpu_model}"


def _rank() -> int:
    if framework.initialized():
        return framework.rank()
    given = os.environ.get("RANK", "0")  # torchrun's, before init_process_group
    return int(given) if given.isdecimal() else 0


def _run_id(given: str | None) -> str | None:
    name = given if given is not None else os.environ.get(RUN_ID_ENV) or None
    if name is None:
        return None
    if not (1 <= len(name) <= _MOST_NAMED and name.isascii() and name.isprintable()):
        raise ZeusBSOConfigError(
            f"run_id must have 1 to {_MOST_NAMED} printable ASCII characters, not {name!r}"
        )
    return name


def _connector(server_url: str | None, store: str | Path | None) -> Callable[[], Trials]:
    """Returns a function that opens the store; imports its dependencies at once."""
    if server_url is not None and store is None:
        from zeus.optimizer.batch_size.http import HttpTrials

        return lambda: HttpTrials(server_url)
    if store is not None and server_url is None:
        from zeus.optimizer.batch_size.store import Store

        return lambda: Store(store)
    raise ZeusBSOConfigError(
        "pass either server_url, of a batch size server, or store, a file of this machine"
    )


def _with_gpus(job: JobSpec, monitor: ZeusMonitor) -> CreatedJob:
    """Returns the job with its name and its GPUs.

    Raises:
        ZeusBSOConfigError: The GPUs are of several models, or have no power limit.
    """
    gpus = [monitor.gpus[index] for index in monitor.gpu_indices]
    models = sorted({gpu.get_name() for gpu in gpus})
    if len(models) != 1:
        raise ZeusBSOConfigError(
            f"the monitor has GPUs of several models ({', '.join(models)}), and what is learnt on "
            "one is not true of another; give it gpu_indices of one model"
            if models
            else "the monitor has no GPU; give it those that train"
        )
    # The product's limit, not the site's, which may differ between nodes.
    limits_mw = [gpu.info.power_limit_max_mw or 0 for gpu in gpus]
    if not all(limits_mw):
        raise ZeusBSOConfigError(
            f"{models[0]} has no power limit, with which the cost of time is computed"
        )
    range_w = None
    if job.family is not None:
        ranges = [gpu.get_power_management_limit_constraints() for gpu in gpus]
        range_w = max(low for low, _ in ranges) / 1000, min(high for _, high in ranges) / 1000
    config = GpuConfig(
        max_power=sum(limits_mw) / 1000,
        number_of_gpus=len(gpus),
        gpu_model=models[0],
        power_limits=range_w,
    )
    # Named here, so that a repeated request does not create a second job.
    fields = {**job.model_dump(), **config.model_dump(), **job.naming()}
    return CreatedJob.model_validate(fields)
