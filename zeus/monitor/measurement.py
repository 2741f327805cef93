"""The measurement of a window: its time at once, its energy on first access."""

from __future__ import annotations

import math
from typing import Any, Protocol

from zeus.exceptions import ZeusBaseError
from zeus.monitor.showing import Shown


class LooksUp(Protocol):
    """Looks up energies."""

    def look_up(self, wanted: Measurement) -> None:
        """Fills in a measurement's energy. Raises `ZeusBaseError` if it cannot be known."""

    def as_known(self, wanted: Measurement) -> Measurement:
        """Returns a measurement with its energy, or `nan` for unknown energies."""

    def warn(self, error: ZeusBaseError) -> None:
        """Warns that energies are unknown, once until they are known again."""


class EndedWindow:
    """A window that has ended and whose energy is not known; times in ns of CLOCK_MONOTONIC.

    Attributes:
        settled: Whether it is unknown for good, or at least for now.
    """

    __slots__ = (
        *("aligned", "begin_ns", "end_ns", "error", "key", "lookup", "partial", "settled"),
    )

    def __init__(
        self, lookup: LooksUp, key: str, begin_ns: int, end_ns: int, aligned: bool
    ) -> None:
        self.lookup = lookup
        self.key = key
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.aligned = aligned
        self.error: ZeusBaseError | None = None
        self.partial: Measurement | None = None
        self.settled = False


class Measurement(Shown):
    """The measurement of a window. The time is known when the window ends. The energy is looked up
    on first access, together with that of earlier windows; this waits at most for the window's own
    update of the GPU's sensors (20 to 100 ms), and not at all if it has passed.

    Args:
        time: Seconds.
        gpu_energy: Joules by GPU index.
        cpu_energy: Joules by CPU index; None where it is not measured.
        dram_energy: Joules of the memory by CPU index; None where it is not measured.
        soc_energy: Always None: no system-on-chip is supported.
        gpu_uncertainty: Uncertainty of each GPU's energy, joules (two standard deviations). An
            unknown energy is `nan`, and one warning says why; check `known`, and read it again
            later. With a `strict` monitor, access raises `ZeusBaseError` instead.
    """

    __slots__ = ("__weakref__", "_cpu", "_dram", "_gpu", "_pending", "_uncertainty", "time")

    soc_energy: None = None

    def __init__(
        self,
        time: float,
        gpu_energy: dict[int, float],
        cpu_energy: dict[int, float] | None = None,
        dram_energy: dict[int, float] | None = None,
        soc_energy: None = None,
        gpu_uncertainty: dict[int, float] | None = None,
    ) -> None:
        self.time = time
        self._pending: EndedWindow | None = None
        self._fill(gpu_energy, cpu_energy, dram_energy, gpu_uncertainty)

    def _fill(
        self,
        gpu: dict[int, float],
        cpu: dict[int, float] | None,
        dram: dict[int, float] | None,
        uncertainty: dict[int, float] | None,
    ) -> None:
        self._gpu = gpu
        self._cpu = cpu
        self._dram = dram
        self._uncertainty = dict.fromkeys(gpu, 0.0) if uncertainty is None else uncertainty
        self._pending = None

    def _known(self) -> Measurement:
        pending = self._pending
        return self if pending is None else pending.lookup.as_known(self)

    @property
    def known(self) -> bool:
        """Whether the energy is known; looks it up if needed. Never raises or warns."""
        try:
            self.look_up()
        except ZeusBaseError:
            return False
        return not math.isnan(self._sum())

    def look_up(self) -> None:
        """Looks up the energy now, unless it is known.

        Raises:
            ZeusBaseError: It cannot be known, or not at the moment; you may retry.
        """
        pending = self._pending
        if pending is not None:
            pending.lookup.look_up(self)

    @property
    def settled(self) -> bool:
        """Whether the energy is known, or cannot be known; never waits."""
        pending = self._pending
        return pending is None or pending.settled

    @property
    def so_far(self) -> dict[int, float]:
        """Joules of the GPUs whose energy has been looked up, by index; never waits."""
        pending = self._pending
        known = self if pending is None else pending.partial
        return {} if known is None else known._gpu

    @property
    def gpu_energy(self) -> dict[int, float]:
        """Joules by GPU index."""
        return self._known()._gpu

    @property
    def energy(self) -> dict[int, float]:
        """`gpu_energy`, as ml-energy/zeus named it before 0.10."""
        return self.gpu_energy

    @property
    def cpu_energy(self) -> dict[int, float] | None:
        """Joules by CPU index; None where it is not measured."""
        return self._known()._cpu

    @property
    def dram_energy(self) -> dict[int, float] | None:
        """Joules of the memory by CPU index; None where it is not measured."""
        return self._known()._dram

    @property
    def gpu_uncertainty(self) -> dict[int, float]:
        """Uncertainty of each GPU's energy, joules: two standard deviations. It does not include
        gain errors of the boards' sensors, some percent: software cannot see them.
        """
        return self._known()._uncertainty

    @property
    def total_energy(self) -> float:
        """Joules of all GPUs together."""
        return sum(self.gpu_energy.values())

    @property
    def uncertainty(self) -> float:
        """Uncertainty of `total_energy`, joules."""
        return sum(self.gpu_uncertainty.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measurement):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # it changes: no key

    def __reduce__(self) -> tuple[Any, ...]:
        return Measurement, (*self._values()[:4], None, self._uncertainty)

    def _sum(self) -> float:
        """Joules of all that was measured."""
        found = (self._gpu, self._cpu or {}, self._dram or {})
        return sum(joules for energies in found for joules in energies.values())

    def _values(self) -> tuple[Any, ...]:
        known = self._known()
        return known.time, known._gpu, known._cpu, known._dram
