"""Sums of a job's trials: a summary of many jobs without reading all trials."""

from __future__ import annotations

from dataclasses import dataclass

from zeus.optimizer.batch_size.trials import JobRecord, Status

STATUSES: tuple[Status, ...] = ("running", "ok", "failed", "oom", "lost", "cancelled")


@dataclass(frozen=True)
class TrialGroup:
    """The trials of a job with the same batch size and the same end.

    Attributes:
        time: Their time, s.
        energy: Their energy, J.
    """

    batch_size: int
    status: Status
    converged: bool
    trials: int
    heard_s: float
    time: float
    energy: float


@dataclass(frozen=True)
class Overview:
    """A job and the sums of its trials."""

    job: JobRecord
    groups: tuple[TrialGroup, ...]

    @property
    def heard_s(self) -> float | None:
        """Time of its last message, s since 1970; None before its first trial."""
        return max((group.heard_s for group in self.groups), default=None)

    @property
    def time(self) -> float:
        """Time of all trials, s."""
        return sum(group.time for group in self.groups)

    @property
    def energy(self) -> float:
        """Energy of all trials, J."""
        return sum(group.energy for group in self.groups)

    @property
    def cost(self) -> float:
        """Cost of all trials, J."""
        return self.job.cost(self.energy, self.time)

    @property
    def converged(self) -> int:
        """Trials that reached the target."""
        return sum(group.trials for group in self.groups if group.converged)

    @property
    def counts(self) -> dict[str, int]:
        """Trials of each status."""
        found: dict[str, int] = dict.fromkeys(STATUSES, 0)
        for group in self.groups:
            found[group.status] += group.trials
        return found

    def mean_cost(self, batch_size: int) -> float | None:
        """Mean cost of a size's runs that reached the target, J; None if there are none."""
        # A size has only one such group: they all ended by a report.
        for group in self.groups:
            if group.converged and group.batch_size == batch_size:
                return self.job.cost(group.energy, group.time) / group.trials
        return None

    @property
    def cheapest(self) -> int | None:
        """The size of the lowest such mean."""
        costs = {size: self.mean_cost(size) for size in self.job.spec.batch_sizes}
        known = {size: cost for size, cost in costs.items() if cost is not None}
        return min(known, key=lambda size: known[size], default=None)
