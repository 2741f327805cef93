"""The JSON schema of an exercise's report."""

from __future__ import annotations

from typing import Any

from zeusctl.exercise.report import SCHEMA, Report
from zeusctl.schemas import of_dataclass


def published() -> dict[str, Any]:
    """The schema of `Report.to_json`, whose `$id` has the version."""
    return of_dataclass(Report, SCHEMA)
