"""Representations of measurements: text, HTML for notebooks, and dataclass functions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar, Protocol

from zeus.exceptions import ZeusBaseError


class _Measured(Protocol):
    """Anything with the attributes of a measurement."""

    @property
    def time(self) -> float:
        """Seconds."""

    @property
    def gpu_energy(self) -> dict[int, float]:
        """Joules by GPU index."""

    @property
    def cpu_energy(self) -> dict[int, float] | None:
        """Joules by CPU index."""

    @property
    def dram_energy(self) -> dict[int, float] | None:
        """Joules by CPU index."""

    @property
    def gpu_uncertainty(self) -> dict[int, float]:
        """Joules by GPU index."""


@dataclass
class _Fields:
    """The fields of a measurement, in the order of its arguments."""

    time: float
    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    soc_energy: None = None
    gpu_uncertainty: dict[int, float] | None = None


class Shown:
    """Base of `Measurement`: text, HTML, `dataclasses.asdict` and `replace`, and `vars`."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = {
        field.name: field for field in dataclasses.fields(_Fields)
    }

    def __repr__(self: _Measured) -> str:
        return as_text(self, type(self).__name__)

    def _repr_html_(self: _Measured) -> str:
        return as_html(self)

    def __replace__(self, **changes: Any) -> Any:
        return dataclasses.replace(self, **changes)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # nothing to write to
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def as_text(measured: _Measured, kind: str) -> str:
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


def as_html(measured: _Measured) -> str:
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


def _rows(measured: _Measured) -> list[tuple[str, str, str, str]]:
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
