"""Groups of a cluster's recurring jobs: generated, or from Alibaba's public trace. A group is a
recurring job, and each of its rows is one recurrence with its start and end. The file has the
columns `group,start_time,end_time,dataset,runtime_ratio`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from zeus.simulate.workloads import WORKLOADS
from zeus.utils.lazy import needed
from zeus_common.tables import Amount, TableError, Text, kinds, read, rows, write


def kmeans_1d(values: Sequence[float], k: int) -> list[int]:
    """Splits numbers into clusters with the least sum of squared distances to their means.

    Clusters of numbers are intervals, so the best ones are found exactly, and nothing is random:
    sorted, the best split of the first `i` numbers into `c` clusters follows from those into
    `c - 1`, and where its last cluster begins only moves up with `i`. O(k n log n) in time, O(k n)
    in memory.

    Args:
        values: The numbers; the order does not matter.

    Returns:
        For each value its cluster; clusters are numbered from 0 in ascending order.

    Raises:
        ValueError: There are fewer different values than clusters.

    Source: Wang, Song, "Ckmeans.1d.dp", The R Journal 3(2), 2011; the O(n log n) step as in
    Grønlund et al., "Fast exact k-means, k-medians and Bregman divergence clustering in 1D", 2017.
    """
    np = needed("numpy", "k-means", "simulate")
    distinct, where, weights = np.unique(
        np.asarray(values, dtype=float), return_inverse=True, return_counts=True
    )
    n = len(distinct)
    if not 1 <= k <= n:
        raise ValueError(f"{n} different values cannot be split into {k} clusters")
    x = distinct - np.average(distinct, weights=weights)  # sums of squares keep their digits
    sums = [np.concatenate(([0.0], np.cumsum(weights * x**power))) for power in (0, 1, 2)]

    def spread(first: Any, end: Any) -> Any:
        """Sum of squared distances within `x[first:end]`, not empty."""
        count, total, squares = (one[end] - one[first] for one in sums)
        return squares - total**2 / count

    # best[i]: of x[:i + 1] in the clusters so far; begins[c][i]: where the last of c + 1 begins.
    best = spread(np.zeros(n, dtype=int), np.arange(1, n + 1))
    begins = [np.zeros(n, dtype=int)]
    for cluster in range(1, k):
        best, begin = _one_more(best, cluster, spread)
        begins.append(begin)
    labels = np.empty(n, dtype=int)
    end = n
    for cluster in range(k - 1, -1, -1):
        begin = int(begins[cluster][end - 1])
        labels[begin:end] = cluster
        end = begin
    return [int(label) for label in labels[where.ravel()]]


def _one_more(before: Any, cluster: int, spread: Any) -> tuple[Any, Any]:
    """The best splits with one more cluster, of all prefixes.

    That of the middle prefix bounds where the last cluster of those on either side begins.
    """
    import numpy as np

    n = len(before)
    best, begin = np.full(n, np.inf), np.full(n, cluster, dtype=int)
    tasks = [(cluster, n - 1, cluster, n - 1)]
    while tasks:  # prefixes that end in [low, high], whose last cluster begins in [first, last]
        low, high, first, last = tasks.pop()
        middle = (low + high) // 2
        starts = np.arange(first, min(last, middle) + 1)
        costs = before[starts - 1] + spread(starts, middle + 1)
        at = int(costs.argmin())
        best[middle], begin[middle] = costs[at], starts[at]
        if low < middle:
            tasks.append((low, middle - 1, first, int(starts[at])))
        if middle < high:
            tasks.append((middle + 1, high, int(starts[at]), last))
    return best, begin


COLUMNS = ("group", "start_time", "end_time", "dataset", "runtime_ratio")


@dataclass(frozen=True)
class GroupJob:
    """One of a group's jobs.

    Attributes:
        group: Its group.
        start_time: When it is submitted, s after some instant.
        end_time: When it ends, s after the same.
        dataset: The workload that stands for it (`zeus.simulate.workloads`).
        runtime_ratio: Its run time as a multiple of the mean of all jobs with this workload.
    """

    group: Text
    start_time: float
    end_time: float
    dataset: Text
    runtime_ratio: Amount


def synthetic_groups(num_groups: int = 60, seed: int = 20) -> list[GroupJob]:
    """Generates groups that resemble a cluster's.

    Workloads take turns. Groups have 5 jobs and more, most of them few (Pareto, exponent 1.1, at
    most 150). Run times vary by 0.4 (lognormal) about the workload's usual time on a V100. Jobs
    arrive at random, in some groups often and in some rarely: about 44 % of them begin while an
    earlier one of their group still runs.

    Returns:
        Their jobs, by group and start.

    Raises:
        ValueError: `num_groups` is not positive.
    """
    if num_groups < 1:
        raise ValueError(f"there must be at least one group, not {num_groups}")
    np = needed("numpy", "making up groups", "simulate")
    rng = np.random.default_rng(seed)
    digits = max(3, len(str(num_groups - 1)))
    plain: list[tuple[str, float, float, str]] = []
    for number in range(num_groups):
        workload = WORKLOADS[number % len(WORKLOADS)]
        size = int(min(150.0, 5 * (1 + rng.pareto(1.1))))
        between = workload.usual_time * rng.lognormal(_LN_BETWEEN, 1.0)
        starts = rng.uniform(0, 86400) + np.cumsum(rng.exponential(between, size))
        # So that the usual time is the mean, not the median.
        times = workload.usual_time * rng.lognormal(-(0.4**2) / 2, 0.4, size)
        for start, time in zip(starts, times, strict=True):
            begin = float(round(start))
            end = begin + max(1.0, float(round(time)))
            plain.append((f"synthetic-{number:0{digits}d}", begin, end, workload.dataset))
    return _with_ratios(plain)


_LN_BETWEEN = 0.6
"""Of the time between jobs of a group as a multiple of their run time, median, natural log."""


def make_groups(
    jobs: str | os.PathLike[str], tags: str | os.PathLike[str], *, least_jobs: int = 1
) -> list[GroupJob]:
    """Makes groups from the tables of Alibaba's GPU cluster trace of 2020.

    Jobs that succeeded (`Terminated`) and have times are put into groups by their group tag. The
    groups' mean run times are split into as many clusters as there are workloads, and clusters and
    workloads are matched by length: the group with the shortest jobs trains the shortest workload.

    Args:
        jobs: `pai_job_table.csv`: job_name, inst_id, user, status, start_time, end_time.
        tags: `pai_group_tag_table.csv`: inst_id, user, gpu_type_spec, group, workload. Both may
            also be the `.tar.gz` that is offered for download, and may have a header row.
        least_jobs: Groups with fewer jobs are left out.

    Returns:
        Their jobs, by group and start.

    Raises:
        ValueError: It is not such a table, or has too few groups.

    Source: https://github.com/alibaba/clusterdata, cluster-trace-gpu-v2020 (CC BY 4.0). The mapping
    is that of "Zeus", NSDI 2023, section 6.1.
    """
    times = dict(_job_times(jobs))
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in _table(tags, ("inst_id", "user", "gpu_type_spec", "group", "workload")):
        # Of a job that stands there twice the first tag counts.
        if line[3] and line[0] in times:
            groups[line[3]].append(times.pop(line[0]))
    kept = {group: spans for group, spans in groups.items() if len(spans) >= least_jobs}
    means = [sum(end - start for start, end in spans) / len(spans) for spans in kept.values()]
    if len(set(means)) < len(WORKLOADS):
        raise ValueError(
            f"{os.fspath(jobs)} and {os.fspath(tags)} hold {len(set(means))} groups of "
            f"{least_jobs} or more finished jobs that differ in their mean run time; at least "
            f"{len(WORKLOADS)} are needed, one for each workload"
        )
    clusters = kmeans_1d(means, len(WORKLOADS))
    return _with_ratios(
        (group, start, end, WORKLOADS[cluster].dataset)
        for (group, spans), cluster in zip(kept.items(), clusters, strict=True)
        for start, end in spans
    )


def write_groups(groups: Iterable[GroupJob], path: str | os.PathLike[str]) -> None:
    """Writes groups; see `zeus_common.tables.write`."""
    write(Path(path), kinds(GroupJob), map(astuple, groups))


def read_groups(path: str | os.PathLike[str]) -> dict[str, list[GroupJob]]:
    """Reads groups; see `zeus_common.tables.read`.

    Returns:
        For each group its jobs by start.

    Raises:
        TableError: It is not such a file; the message has the place.
    """
    jobs = []
    for place, job in read(path, GroupJob):
        if job.end_time < job.start_time:
            raise TableError(f"{place}: end_time must not come before start_time")
        jobs.append(job)
    if not jobs:
        raise TableError(f"{path} holds no job")
    return by_group(jobs)


def by_group(jobs: Iterable[GroupJob]) -> dict[str, list[GroupJob]]:
    """Returns each group's jobs by start; groups in the order of the file."""
    groups: defaultdict[str, list[GroupJob]] = defaultdict(list)
    for one in jobs:
        groups[one.group].append(one)
    for group, members in groups.items():
        if len({one.dataset for one in members}) > 1:
            raise ValueError(f"the group {group} has jobs of more than one data set")
        members.sort(key=lambda one: one.start_time)
    return dict(groups)


def overlapping(jobs: Sequence[GroupJob]) -> float:
    """Share of jobs that begin while an earlier one of their group still runs."""
    count = 0
    for members in by_group(jobs).values():
        until = -math.inf
        for one in members:
            count += one.start_time < until
            until = max(until, one.end_time)
    return count / len(jobs)


def _with_ratios(plain: Iterable[tuple[str, float, float, str]]) -> list[GroupJob]:
    rows = sorted(plain)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _, start, end, dataset in rows:
        times[dataset].append(end - start)
    means = {dataset: sum(ratios) / len(ratios) for dataset, ratios in times.items()}
    return [
        GroupJob(group, start, end, dataset, (end - start) / means[dataset])
        for group, start, end, dataset in rows
    ]


def _job_times(path: str | os.PathLike[str]) -> Iterator[tuple[str, tuple[float, float]]]:
    names = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
    for number, line in enumerate(_table(path, names), start=1):
        if line[3] != "Terminated" or not line[4] or not line[5]:
            continue
        try:
            start, end = float(line[4]), float(line[5])
        except ValueError:
            raise ValueError(
                f"{os.fspath(path)}: the times of job number {number} are not numbers"
            ) from None
        if start > 0 and end > start:
            yield line[1], (start, end)


def _table(path: str | os.PathLike[str], names: tuple[str, ...]) -> Iterator[Sequence[str]]:
    """The rows of one of Alibaba's tables; a header looks like a job that never ended."""
    for line in rows(path):
        if line and len(line) != len(names):
            raise TableError(
                f"{os.fspath(path)} has {len(line)} columns, and not the {len(names)} of Alibaba's "
                f"table: {', '.join(names)}"
            )
        if line:
            yield line
