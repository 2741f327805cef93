"""The JSON schema of a probe's report; needs pydantic, which a probe does not."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from zeusctl.probe.report import SCHEMA, Report
from zeusctl.schemas import of_dataclass


def published() -> dict[str, Any]:
    """The schema of `Report.to_json`, whose `$id` has the version."""
    return of_dataclass(Report, SCHEMA)


def read(text: str) -> Report:
    """A report that someone sent.

    Raises:
        ValueError: It is none; the message says what is wrong.
    """
    from zeusctl.probe.report import from_json

    body = from_json(text)
    del body["schema"]
    return TypeAdapter(Report).validate_python(body)
