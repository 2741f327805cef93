"""The JSON schema of a probe's report; needs pydantic, which a probe does not."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from zeusctl.probe.report import SCHEMA, Report


def published() -> dict[str, Any]:
    """The schema of `Report.to_json`, whose `$id` has the version."""
    schema = TypeAdapter(Report).json_schema(mode="serialization")
    own = {"schema": {"const": SCHEMA, "title": "Schema", "type": "string"}}
    return {"$id": SCHEMA, **schema, "properties": own | schema["properties"]}


def read(text: str) -> Report:
    """A report that somebody sent.

    Raises:
        ValueError: It is none; the message says what is wrong.
    """
    from zeusctl.probe.report import from_json

    body = from_json(text)
    del body["schema"]
    return TypeAdapter(Report).validate_python(body)
