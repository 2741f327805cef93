"""Reads a probe's report by its types, like a reader who is sent one."""

from __future__ import annotations

from pydantic import TypeAdapter

from zeusd.energy.probed.report import ProbeReport, from_json


def read(text: str) -> ProbeReport:
    """A report.

    Raises:
        ValueError: It is none; the message says what is wrong.
    """
    body = from_json(text)
    del body["schema"]
    return TypeAdapter(ProbeReport).validate_python(body)
