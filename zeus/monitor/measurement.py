"""The measurement of a window: its time at once, its energy on first access. It is shown as text,
as HTML in notebooks, and like a dataclass.
"""

from __future__ import annotations

import dataclasses
import math
from html import escape
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar

from zeus.exceptions import ZeusBaseError

if TYPE_CHECKING:
    from zeus.monitor.lookup import WindowLookup


@dataclasses.dataclass(slots=True, eq=False)
class EndedWindow:
    """A window that has ended and whose energy is not known; times in ns of CLOCK_MONOTONIC.

    Attributes:
        thread: The thread in which it ended.
        settled: Whether it is unknown for good, or at least for now.
        limited: Whether the time limited is looked up with the energy.
    """

    lookup: WindowLookup
    key: str
    begin_ns: int
    end_ns: int
    aligned: bool
    thread: int = dataclasses.field(default_factory=get_ident)
    error: ZeusBaseError | None = None
    partial: Measurement | None = None
    settled: bool = False
    limited: bool = False


@dataclasses.dataclass
class _Fields:
    """The fields of a measurement, in the order of its arguments."""

    time: float
    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    soc_energy: None = None
    gpu_uncertainty: dict[int, float] | None = None
    limited: dataclasses.InitVar[dict[int, dict[str, float]] | None] = None
    """No field, as it may have to be looked up, but copied by `dataclasses.replace`."""


class Measurement:
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
        limited: See the property.
    """

    __slots__ = (
        *("__weakref__", "_cpu", "_dram", "_gpu", "_limited", "_pending", "_uncertainty"),
        *("_window", "time"),
    )

    soc_energy: None = None
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = _Fields.__dataclass_fields__

    def __init__(
        self,
        time: float,
        gpu_energy: dict[int, float],
        cpu_energy: dict[int, float] | None = None,
        dram_energy: dict[int, float] | None = None,
        soc_energy: None = None,
        gpu_uncertainty: dict[int, float] | None = None,
        limited: dict[int, dict[str, float]] | None = None,
    ) -> None:
        self.time = time
        self._limited = limited
        self._pending: EndedWindow | None = None
        self._window: tuple[WindowLookup, int, int] | None = None
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
    def error(self) -> ZeusBaseError | None:
        """Why the energy could not be looked up; None: it is known, or nobody has tried."""
        pending = self._pending
        return None if pending is None else pending.error

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
    def limited(self) -> dict[int, dict[str, float]] | None:
        """Seconds in which the clocks of each GPU were limited, by GPU index and reason: power,
        heat, board, sync or reliability (`zeus_ipc.limited.REASONS`), as far as its driver counts
        it. None: no driver does, or it cannot be known. Looked up on first access; read it before
        you pickle or copy the measurement, as copies do not look it up.

        Between two readings of the driver's counters, a second apart, it is interpolated.

        Raises:
            ZeusBaseError: It cannot be looked up, and the monitor is strict.
        """
        if self._limited is None and self._window is not None:
            lookup, begin_ns, end_ns = self._window
            self._limited = lookup.limited(begin_ns, end_ns)
        return self._limited or None

    @property
    def limited_so_far(self) -> dict[int, dict[str, float]] | None:
        """`limited`, if it has been looked up, see `ZeusMonitor.available`; never waits."""
        return self._limited or None

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
        return Measurement, (*self._values()[:4], None, self._uncertainty, self._limited)

    def __repr__(self) -> str:
        return as_text(self, type(self).__name__)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __replace__(self, **changes: Any) -> Any:
        return dataclasses.replace(self, **changes)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # nothing to write to
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _sum(self) -> float:
        """Joules of all that was measured."""
        parts = (self._gpu, self._cpu or {}, self._dram or {})
        return sum(joules for energies in parts for joules in energies.values())

    def _values(self) -> tuple[Any, ...]:
        known = self._known()
        return known.time, known._gpu, known._cpu, known._dram


def as_text(measured: Measurement, kind: str) -> str:
    """Time and energies on one line.

    Looks up energies; an energy that cannot be known is shown as unknown.
    """
    parts = [f"time={measured.time!r}"]
    try:
        parts += [
            f"{name}={getattr(measured, name)!r}"
            for name in ("gpu_energy", "cpu_energy", "dram_energy")
        ]
    except ZeusBaseError as error:
        parts.append(f"energy unknown: {error.message}")
    else:
        parts.append("soc_energy=None")
    return f"{kind}({', '.join(parts)})"


def as_html(measured: Measurement) -> str:
    """A table of time, energy, its uncertainty and mean power; for notebooks."""
    try:
        rows = _rows(measured)
    except ZeusBaseError as error:
        rows = [("", "", "", escape(error.message))]
    lines = [
        "<table><thead><tr><th></th><th>energy (J)</th><th>± (J)</th><th>mean power (W)</th></tr>"
        "</thead><tbody>",
        *(
            f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
            for row in [(f"{measured.time:.3f} s", "", "", ""), *rows]
        ),
        "</tbody></table>",
    ]
    return "".join(lines)


def _rows(measured: Measurement) -> list[tuple[str, str, str, str]]:
    def power(energy_j: float) -> str:
        return f"{energy_j / measured.time:.1f}" if measured.time else ""

    uncertainty = measured.gpu_uncertainty
    rows = [
        (f"GPU {index}", f"{energy_j:.1f}", f"{uncertainty[index]:.1f}", power(energy_j))
        for index, energy_j in measured.gpu_energy.items()
    ]
    for name, energies in (("CPU", measured.cpu_energy), ("DRAM", measured.dram_energy)):
        rows += [
            (f"{name} {index}", f"{energy_j:.1f}", "", power(energy_j))
            for index, energy_j in (energies or {}).items()
        ]
    return rows
