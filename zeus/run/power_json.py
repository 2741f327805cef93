"""`bs*.power.json`: the power limits of a batch size, from one run to the next.

The format is ml-energy/zeus's; the search is that of `zeus.optimizer.power_limit`.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from zeus.optimizer.power_limit.profile import (
    PowerLimitMeasurement,
    Profile,
    ProfileError,
    ProfileFile,
)
from zeus.optimizer.power_limit.settings import watts
from zeus.run import files
from zeus.run.files import FileError, PowerByLimit
from zeus.utils.warn import warn
from zeus_ipc.overriding import override


class PowerJson(ProfileFile):
    """A profile in this format. An evaluation, which comes later, completes it. A failed write
    causes one warning.

    Args:
        iterations: Those that are measured at each limit.

    Attributes:
        finished: Whether the file is complete and up to date.
    """

    def __init__(self, path: Path, job_id: str, iterations: int) -> None:
        super().__init__(path)
        self._job_id = job_id
        self._iterations = iterations
        self._known: PowerByLimit | None = None
        self._was_finished = False
        self._writable = True
        self.finished = False

    @override
    def load(self, path: Path) -> Profile:
        try:
            profile = files.load_profile(path)
        except FileError as error:
            raise ProfileError(str(error)) from None
        if not profile.train_power or profile.train_power.keys() != profile.train_throughput.keys():
            raise ProfileError(f"{path} has not both the power and the throughput of each limit")
        complete = path == self.path
        self._was_finished |= complete
        return Profile(
            measurements=[
                self._measurement(limit, power, profile.train_throughput[limit])
                for limit, power in sorted(profile.train_power.items(), reverse=True)
            ],
            gpus=profile.gpus,
            complete=complete,
        )

    @override
    def keep(self, profile: Profile) -> None:
        # Without a step of search, it is unchanged.
        self.finished = self._was_finished and profile.complete and profile.position == 0
        power = {milliwatts(one): one.energy / one.time for one in profile.measurements}
        speed = {milliwatts(one): self._iterations / one.time for one in profile.measurements}
        self._known = PowerByLimit(
            job_id=self._job_id, train_power=power, train_throughput=speed, gpus=profile.gpus
        )
        if not self.finished:
            self._save(self.partial, self._known)

    def finish(self, optimal_mw: int, evaluation: tuple[int, float, float] | None) -> None:
        """Writes the file once all is measured.

        Args:
            optimal_mw: The best limit.
            evaluation: The limit, mW, at which evaluations run, their mean power, W, and iterations
                a second; None: unknown.
        """
        if self._known is None:
            return
        self._known.optimal_pl = optimal_mw
        if evaluation is not None:
            limit, power, throughput = evaluation
            self._known.eval_power[limit] = power
            self._known.eval_throughput[limit] = throughput
        self._save(self.path, self._known)
        self.finished = True  # even if it cannot be written: there is no retry
        if self._writable:
            self.partial.unlink(missing_ok=True)

    def _measurement(self, limit_mw: int, power: float, throughput: float) -> PowerLimitMeasurement:
        time = self._iterations / throughput
        return PowerLimitMeasurement(power_limit=watts(limit_mw), energy=power * time, time=time)

    def _save(self, path: Path, profile: BaseModel) -> None:
        if not self._writable:
            return
        try:
            files.save(path, profile)
        except OSError as error:
            self._writable = False
            warn(f"The power profile cannot be written ({error}).")


def milliwatts(measured: PowerLimitMeasurement) -> int:
    """The limit of a measurement, mW."""
    return round(measured.power_limit * 1000)
