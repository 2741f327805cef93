"""The sums of `zeusctl energy` as tables for other programs: CSV, JSON and Parquet."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from zeusctl import parquet
from zeusctl.reports import EnergyReport, UsedEnergy

_TEXTS = (
    "since",
    "until",
    "kind",
    "name",
    "run",
    "user",
    "basis",
    "bounds",
    "reason",
    "begin",
    "end",
    "workload",
)


def _rows(report: EnergyReport) -> list[dict[str, Any]]:
    return [{**one.model_dump(mode="json"), "basis": "+".join(one.basis)} for one in report.sums]


def csv_text(report: EnergyReport) -> str:
    """One line for each sum."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*UsedEnergy.model_fields])
    writer.writeheader()
    writer.writerows(_rows(report))
    return text.getvalue()


def json_text(report: EnergyReport) -> str:
    """The report as `--json` prints it."""
    return report.model_dump_json(by_alias=True) + "\n"


def write_parquet(report: EnergyReport, path: Path) -> None:
    """One row for each sum; times are texts with their offset from UTC."""
    kinds: dict[str, type] = {}
    for name in UsedEnergy.model_fields:
        kinds[name] = {"uid": int, "exact": bool}.get(name, str if name in _TEXTS else float)
    parquet.write(path, _rows(report), kinds)
