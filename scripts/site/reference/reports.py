"""What `zeusctl --json` prints, from `zeusctl.reports`."""

from __future__ import annotations

from collections.abc import Set

from pydantic import BaseModel

from zeusctl import reports

from .markdown import code, heading, paragraphs, prose, table
from .sources import fields, meanings

_LEAD = """# What --json prints

What each verb of `zeusctl` prints with `--json`: one object, whose field `schema` names its schema.
Within a schema's number, fields are added and never changed or taken away.

Units are in the names; times are ISO 8601 with their zone. `null`: the GPU does not offer it, or
the reader may not know it.

"""


def parts() -> list[type[BaseModel]]:
    """The models that reports consist of, in the order of the module."""
    return [
        one
        for name, one in vars(reports).items()
        if isinstance(one, type)
        and issubclass(one, reports._Part)
        and not issubclass(one, reports.Report)
        and not name.startswith("_")
    ]


def page() -> str:
    """The page."""
    found = _LEAD
    rows = [
        (
            f"[`zeusctl.{name}/1`](#{_anchor(one)})",
            prose((one.__doc__ or "").rstrip(".")),
            f"[{name}.json](schema/{name}.json)",
        )
        for name, one in reports.REPORTS.items()
    ]
    found += table(("schema", "printed by", "JSON schema"), rows)
    found += heading(2, "In every report") + _fields(reports.Report)
    for name, one in reports.REPORTS.items():
        found += heading(2, f"zeusctl.{name}/1", _anchor(one))
        found += paragraphs(one.__doc__ or "") + "\n"
        found += _fields(one, without=set(reports.Report.model_fields))
    found += heading(2, "Parts")
    for part in parts():
        found += heading(3, part.__name__, _anchor(part)) + paragraphs(part.__doc__ or "") + "\n"
        found += _fields(part)
    return found


def _anchor(one: type[object]) -> str:
    return f"{reports.__name__}.{one.__name__}"


def _fields(model: type[BaseModel], without: Set[str] = frozenset()) -> str:
    docs = meanings(model)
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    rows = [
        (code(one.name), one.kind, prose(docs.get(names[one.name], "")))
        for one in fields(model)
        if names[one.name] not in without
    ]
    return table(("field", "type", "meaning"), rows)
