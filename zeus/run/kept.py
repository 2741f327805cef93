"""The power limits of a batch size, from one run to the next."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeus.run import files
from zeus.run.files import FileError, PowerProfile
from zeus.run.profiling import Reading


class KeptProfile:
    """What runs of one batch size have measured.

    A file that cannot be read costs a warning, and the run measures again; so does a failed write.

    Args:
        path: Of the finished profile. What is not finished is kept beside it.
        job_id: The run that writes.
        gpus: Product names of the GPUs.
        low_mw: The lowest limit that they take, mW.
        high_mw: The highest.

    Attributes:
        readings: What earlier runs have measured, by limit in mW.
        finished: Whether that is all there is to measure.
    """

    def __init__(
        self, path: Path, job_id: str, gpus: Sequence[str], low_mw: int, high_mw: int
    ) -> None:
        self._path = path
        self._job_id = job_id
        self._gpus = list(gpus)
        self._range = low_mw, high_mw
        self._writable = True
        self.readings: dict[int, Reading] = {}
        self.finished = False
        for there in (path, files.partial(path)):
            found = self._load(there)
            if found is not None and found.train_power:
                self.readings = {
                    limit: Reading(power, found.train_throughput[limit])
                    for limit, power in found.train_power.items()
                }
                self.finished = there == path
                break

    def _load(self, path: Path) -> PowerProfile | None:
        if not path.exists():
            return None
        try:
            found = files.load_profile(path)
        except FileError as error:
            warnings.warn(f"{error}. It is measured again.", stacklevel=6)
            return None
        fault = found.fault(self._gpus, *self._range)
        if fault is not None:
            warnings.warn(f"{path} {fault}. It is measured again.", stacklevel=6)
            return None
        return found

    def keep(self, readings: Mapping[int, Reading]) -> None:
        """Writes what is known while limits are still measured."""
        self._save(files.partial(self._path), self._profile(readings))

    def finish(
        self,
        readings: Mapping[int, Reading],
        optimal_mw: int,
        evaluation: tuple[int, Reading] | None,
    ) -> None:
        """Writes what is known now that all is measured.

        Args:
            readings: By limit, mW.
            optimal_mw: The best limit.
            evaluation: What evaluating does, and the limit at which it does; None: not known.
        """
        profile = self._profile(readings)
        profile.optimal_pl = optimal_mw
        if evaluation is not None:
            limit, reading = evaluation
            profile.eval_power[limit] = reading.power
            profile.eval_throughput[limit] = reading.throughput
        self._save(self._path, profile)
        self.finished = True  # also where it cannot be written: it is not tried again
        if self._writable:
            files.partial(self._path).unlink(missing_ok=True)

    def _profile(self, readings: Mapping[int, Reading]) -> PowerProfile:
        return PowerProfile(
            job_id=self._job_id,
            train_power={limit: one.power for limit, one in readings.items()},
            train_throughput={limit: one.throughput for limit, one in readings.items()},
            gpus=self._gpus,
        )

    def _save(self, path: Path, profile: PowerProfile) -> None:
        if not self._writable:
            return
        try:
            files.save(path, profile)
        except OSError as error:
            self._writable = False
            warnings.warn(f"The power profile cannot be written ({error}).", stacklevel=6)
