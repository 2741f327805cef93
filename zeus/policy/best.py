"""The best that was seen, for runs that begin while others have not ended."""

from __future__ import annotations

from zeus.job import Job


class BestKnown:
    """Of each job the batch size of the cheapest run that reached the target."""

    def __init__(self) -> None:
        self._best: dict[Job, tuple[float, int]] = {}

    def observe(self, job: Job, batch_size: int, cost: float, converged: bool | None) -> None:
        """A run has ended."""
        if converged and (job not in self._best or cost < self._best[job][0]):
            self._best[job] = (cost, batch_size)

    def batch_size(self, job: Job) -> int | None:
        """The best; None while no run has reached the target."""
        found = self._best.get(job)
        return None if found is None else found[1]
