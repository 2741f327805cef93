"""Energy counters of CPUs, as files."""

from __future__ import annotations

from pathlib import Path


def zone(path: Path, name: str) -> Path:
    """A counter of powercap."""
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", "0"), ("max_energy_range_uj", "1" * 12)):
        (path / file).write_text(text)
    return path


def spend_uj(path: Path, energy_uj: int) -> None:
    aside = path / "new"
    aside.write_text(str(energy_uj))
    aside.rename(path / "energy_uj")
