"""Many simulated jobs at once, in as many processes as there are cores."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.simulate.groups import GroupJob
from zeus.simulate.results import RunRow
from zeus.simulate.workloads import power_trace, train_trace, workload
from zeus.utils.lazy import needed
from zeus.utils.metric import zeus_cost

if TYPE_CHECKING:
    from zeus.simulate.simulator import Simulator


@dataclass(frozen=True)
class Case:
    """A recurring job to simulate.

    Attributes:
        job: The job.
        gpu: The GPU whose measured traces are used.
        name: Name of its results; by default the data set.
        policy: Name of the policy (`zeus.policy.make_policy`).
        window_size: Number of runs of each batch size that the policy remembers; 0 for all.
        seed: Seed of the policy and of the simulator.
        eta_knob: 1 counts energy only, 0 time only.
        beta_knob: A run is stopped before it costs this multiple of the best; infinite for never.
        num_recurrence: How many times it recurs; by default twice the number of pairs of batch size
            and power limit. A group has as many as it has jobs.
        group: The jobs of a group of a cluster, by start; None: one run after the other.
        summary_train: CSV file of measured training runs; by default that of this package.
        summary_power: CSV file of measured power; by default that of the GPU.
    """

    job: Job
    gpu: str = "v100"
    name: str = ""
    policy: str = "gp"
    window_size: int = 0
    seed: int = 1
    eta_knob: float = 0.5
    beta_knob: float = 2.0
    num_recurrence: int | None = None
    group: tuple[GroupJob, ...] | None = None
    summary_train: str = ""
    summary_power: str = ""


@dataclass
class Study:
    """Results of many cases.

    Attributes:
        rows: All runs, case by case in the order in which they were given.
        failures: Cases that could not be simulated, and why.
    """

    rows: list[RunRow] = field(default_factory=list)
    failures: list[tuple[Case, str]] = field(default_factory=list)


def workload_job(
    dataset: str, gpu: str = "v100", summary_train: str = "", summary_power: str = ""
) -> Job:
    """The job that trains one of the measured workloads.

    Its default batch size is reduced to fit the GPU's memory.

    Args:
        dataset: The workload's data set (`zeus.simulate.workloads.WORKLOADS`).

    Raises:
        ValueError: There are no measurements of it.
        OSError: A trace cannot be read.
    """
    needed("numpy", "a simulation", "simulate")
    one = workload(dataset)
    simulator = _simulator(*_traces(gpu, summary_train, summary_power))
    return one.job(simulator.batch_sizes(one.job([one.default_bs])))


def run_case(case: Case) -> list[RunRow]:
    """Simulates one job.

    Raises:
        ValueError: There are no measurements of it, or an option is not valid.
        RuntimeError: Its target cannot be reached.
        OSError: A trace cannot be read.
    """
    needed("numpy", "a simulation", "simulate")
    from zeus.policy import JITPowerLimitOptimizer, make_policy

    simulator = _simulator(*_traces(case.gpu, case.summary_train, case.summary_power))
    # The same tables for all cases; each call of the simulator copies the policies.
    simulator.bso = make_policy(
        case.policy,
        seed=case.seed,
        window_size=case.window_size,
        concurrency=case.group is not None,
    )
    simulator.plo = JITPowerLimitOptimizer(verbose=False)
    simulator.seed = case.seed
    sizes = simulator.batch_sizes(case.job)
    if case.job.default_bs not in sizes:
        raise ValueError(
            f"the default batch size {case.job.default_bs} of {case.job} was not measured on "
            f"{case.gpu}; there are {', '.join(map(str, sizes))}"
        )
    best = simulator.measurements.best(case.job, case.eta_knob)
    usual = simulator.measurements.usual(case.job, case.eta_knob)
    rows: list[RunRow] = []
    recurrence = 1
    for number, (entry, ratio) in enumerate(_history(simulator, case), start=1):
        row = RunRow(
            name=case.name or case.job.dataset,
            policy=case.policy,
            gpu=case.gpu,
            dataset=case.job.dataset,
            network=case.job.network,
            optimizer=case.job.optimizer,
            eta_knob=case.eta_knob,
            beta_knob=case.beta_knob,
            seed=case.seed,
            run=number,
            recurrence=recurrence,
            batch_size=entry.bs,
            power_limit=entry.pl,
            energy=entry.energy,
            time=entry.time,
            cost=zeus_cost(
                entry.energy, entry.time, case.eta_knob, simulator.measurements.max_power
            ),
            reached=entry.reached,
            best_cost=best.cost * ratio,
            default_energy=usual.energy * ratio,
            default_time=usual.time * ratio,
            default_cost=usual.cost * ratio,
        )
        rows.append(row)
        recurrence += entry.reached
    return rows


def run_study(
    cases: Sequence[Case],
    processes: int | None = 1,
    tell: Callable[[int, int], None] | None = None,
) -> Study:
    """Simulates many jobs. The result is the same for any number of processes.

    With several, each imports the calling script again: start the study under `if __name__ ==
    "__main__":`.

    Args:
        processes: Number of processes; None: one per core.
        tell: Called with the numbers of finished and of all jobs.

    Returns:
        All runs. A job that cannot be simulated does not affect the others; it is among the
        failures.

    Raises:
        ValueError: `processes` is not positive.
        RuntimeError: A process was killed.
        ImportError: NumPy is not installed.
    """
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    if count < 1:
        raise ValueError(f"a study needs at least one process, not {count}")
    outcomes: list[list[RunRow] | str] = [""] * len(cases)
    if tell is not None:
        tell(0, len(cases))
    for done, (index, outcome) in enumerate(_outcomes(cases, min(count, len(cases))), start=1):
        outcomes[index] = outcome
        if tell is not None:
            tell(done, len(cases))
    study = Study()
    for case, outcome in zip(cases, outcomes, strict=True):
        if isinstance(outcome, str):
            study.failures.append((case, outcome))
        else:
            study.rows.extend(outcome)
    return study


def _outcomes(cases: Sequence[Case], processes: int) -> Iterator[tuple[int, list[RunRow] | str]]:
    """Yields each case's index, and its rows or its error, as they come."""
    if processes <= 1:
        for index, case in enumerate(cases):
            yield index, _outcome(case)
        return
    left = iter(enumerate(cases))
    with ExitStack() as started:
        with _interrupts_held():
            pipes = [started.enter_context(_worker()) for _ in range(processes)]
        for pipe in pipes:
            with _kill_reported():
                pipe.send(next(left))
        while pipes:
            answered: list[Any] = wait(pipes)
            for pipe in answered:
                following = next(left, None)
                with _kill_reported():
                    index, outcome = pipe.recv()
                    if following is not None:
                        pipe.send(following)
                if following is None:
                    pipes.remove(pipe)
                if isinstance(outcome, Exception):
                    raise outcome
                yield index, outcome


@contextmanager
def _kill_reported() -> Iterator[None]:
    """Around what fails if the process at the pipe's other end was killed, and only that."""
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError(
            "a process of the study was killed, perhaps out of memory; use fewer processes"
        ) from None


@contextmanager
def _worker() -> Iterator[Any]:
    """Starts a process, and yields the pipe to it.

    An executor's processes share queues: where one is killed, a lock stays locked, or half a
    message in a queue, and the others wait forever.
    """
    # Not forked: this process may have threads, of a progress bar or of NumPy.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            yield ours
        finally:
            process.kill()
            process.join()


def _work(pipe: Any) -> None:
    """Simulates what comes, until the study has ended."""
    with suppress(EOFError, OSError):
        while True:
            index, case = pipe.recv()
            pipe.send((index, _answer(case)))


def _answer(case: Case) -> list[RunRow] | str | Exception:
    """The rows, a sentence, or an error that the other process can read."""
    try:
        return _outcome(case)
    except Exception as error:  # noqa: BLE001 - an import's, or any bug's
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
            return error
        return RuntimeError(f"{type(error).__name__}: {error}")


def _outcome(case: Case) -> list[RunRow] | str:
    try:
        return run_case(case)
    except (ValueError, RuntimeError) as error:
        return str(error)
    except OSError as error:
        if error.filename is None:
            return str(error)
        return f"{error.filename} cannot be read: {error.strerror}"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delays Ctrl-C until its end; processes started in it ignore Ctrl-C. So only the first process
    ends the others, and none is left half started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _traces(gpu: str, summary_train: str, summary_power: str) -> tuple[str, str]:
    return summary_train or str(train_trace()), summary_power or str(power_trace(gpu))


@lru_cache(maxsize=8)
def _simulator(summary_train: str, summary_power: str) -> Simulator:
    from zeus.policy import JITPowerLimitOptimizer, make_policy
    from zeus.simulate import Simulator

    return Simulator(
        summary_train,
        summary_power,
        make_policy(),
        JITPowerLimitOptimizer(verbose=False),
        verbose=False,
    )


def _history(simulator: Simulator, case: Case) -> list[tuple[HistoryEntry, float]]:
    """Returns the runs, each with the ratio of its job's run time to the measured one."""
    knobs = (case.beta_knob, case.eta_knob)
    if case.group is None:
        count = case.num_recurrence
        if count is None:
            sizes, limits = simulator.batch_sizes(case.job), simulator.power_limits(case.job)
            count = 2 * len(sizes) * len(limits)
        if count < 1:
            raise ValueError(f"a job must recur at least once, not {count} times")
        return [(run, 1.0) for run in simulator.simulate_one_job(case.job, count, *knobs)]
    if not case.group:
        raise ValueError("a group must have a job")
    group = [(one.start_time, one.end_time, one.runtime_ratio) for one in case.group]
    return simulator.play_group(case.job, group, *knobs)
