"""What `zeusctl --json` prints, from `zeusctl.reports`."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any, get_type_hints

from pydantic.fields import FieldInfo

from zeusctl import entities, reports
from zeusctl.columns import Column, ExporterMetric

from .markdown import code, heading, paragraphs, prose, table
from .sources import facts, meanings

_LEAD = """# What --json prints

What each verb of `zeusctl` prints with `--json`: one object, whose field `schema` names its schema.
Within a schema's number, fields are added and never changed or taken away.

Units are in the names; times are ISO 8601 with their zone. `null`: the GPU does not offer it, or
the reader may not know it. Each field is declared once: a table shows it under its heading, and
[zeusd-exporter](metrics.md) as its metric.

"""


def parts() -> list[type[Any]]:
    """What reports consist of, in the order of the module."""
    return [
        one
        for one in {**vars(entities), **vars(reports)}.values()
        if isinstance(one, type)
        and dataclasses.is_dataclass(one)
        and not issubclass(one, reports.ReportHeader)
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
    found += heading(2, "In every report") + _fields(reports.ReportHeader)
    for name, one in reports.REPORTS.items():
        found += heading(2, f"zeusctl.{name}/1", _anchor(one))
        found += paragraphs(one.__doc__ or "") + "\n"
        found += _fields(
            one, without={one.name for one in dataclasses.fields(reports.ReportHeader)}
        )
    found += heading(2, "Parts")
    for part in parts():
        found += heading(3, part.__name__, _anchor(part)) + paragraphs(part.__doc__ or "") + "\n"
        found += _fields(part)
    return found


def _anchor(one: type[object]) -> str:
    return f"{reports.__name__}.{one.__name__}"


def _fields(kind: type[Any], without: Set[str] = frozenset()) -> str:
    """The fields of a report or a part, and where else each is shown."""
    docs, hints = meanings(kind), get_type_hints(kind)
    columns = {one.name: one for one in dataclasses.fields(kind) if one.name not in without}
    rows = []
    for name, one in columns.items():
        shown = one.metadata.get("column", Column())
        known = facts(name, FieldInfo.from_annotation(hints[name]), reports.__name__)
        metric = code(ExporterMetric.parse(shown.metric).name) if shown.metric else ""
        rows.append((code(name), known.kind, prose(docs.get(name, "")), shown.heading, metric))
    return table(("field", "type", "meaning", "heading", "metric"), rows)
