"""JSON schemas of reports that are dataclasses instead of pydantic models."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter


def of_dataclass(report: type, name: str) -> dict[str, Any]:
    """The schema of a report, with `$id` and the field `schema`.

    Args:
        report: The dataclass.
        name: Name and version, such as `zeusctl.probe/1`.
    """
    schema = TypeAdapter(report).json_schema(mode="serialization")
    own = {"schema": {"const": name, "title": "Schema", "type": "string"}}
    return {"$id": name, **schema, "properties": own | schema["properties"]}
