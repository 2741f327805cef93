"""Operations and fields of the protocol, from `zeus_ipc.requests` and `zeus_ipc.replies`."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Set
from enum import Enum
from typing import TYPE_CHECKING

from pydantic import BaseModel

from zeus_ipc import replies as answers
from zeus_ipc import requests as asked
from zeus_ipc import wire
from zeus_ipc.operations import OF_REQUEST

from .markdown import code, heading, paragraphs, prose, table
from .sources import attribute_docs, below, fields, home, meanings

_LEAD = """# Operations and fields

Every operation, message and field of the protocol. How messages travel, and what a client must do:
[the protocol](../integrate/protocol.md).

Units are in the names: `mw` milliwatts, `mj` millijoules, `uj` microjoules, `mhz` megahertz, `ns`
nanoseconds of CLOCK_MONOTONIC, `ms` milliseconds.
"""

_COMMON = "Each request has these fields besides its own."

_BY_HAND = {
    "CALL_BUCKETS_S": "Upper ends of the buckets of `CallTimes`, seconds.",
    "NO_END_NS": "A time that is never reached: no deadline.",
}


def requests() -> list[type[BaseModel]]:
    """The class of each operation."""
    return [*typing.get_args(asked.Request)]


def replies() -> list[type[BaseModel]]:
    """Every other message, in the order of the module."""
    return [
        one
        for one in vars(answers).values()
        if isinstance(one, type)
        and issubclass(one, wire.Message)
        and one.__module__ == answers.__name__
    ]


def enums() -> list[type[Enum]]:
    """The sets of names that fields choose from."""
    return [
        one
        for one in vars(asked).values()
        if isinstance(one, type) and issubclass(one, Enum) and one.__module__ == asked.__name__
    ]


def page() -> str:
    """The page."""
    common = set(asked._Request.model_fields)
    found = _LEAD + heading(2, "Operations")
    rows = [
        (f"[`{one.model_fields['op'].default}`](#{_anchor(one)})", prose(_first(one)))
        for one in requests()
    ]
    found += table(("operation", ""), rows)
    found += heading(3, "In every request") + _COMMON + "\n\n" + _fields(asked._Request)
    for one in requests():
        found += heading(3, one.model_fields["op"].default, _anchor(one))
        found += paragraphs(_doc(one)) + "\n\n" + _result(one) + "\n"
        found += _fields(one, without=common | {"op"})
    found += heading(2, "Replies")
    for one in replies():
        found += heading(3, one.__name__, _anchor(one)) + paragraphs(_doc(one)) + "\n"
        found += _fields(one)
    found += heading(2, "Names")
    for names in enums():
        found += heading(3, names.__name__, _anchor(names)) + paragraphs(names.__doc__ or "") + "\n"
        docs = attribute_docs(names)
        rows = [(code(one.value), prose(docs.get(one.name, ""))) for one in names]
        found += table(("name", "meaning"), rows)
    limits = [(code(name), code(value), prose(text)) for name, (value, text) in constants().items()]
    return found + heading(2, "Limits") + table(("name", "value", "meaning"), limits)


def constants() -> dict[str, tuple[object, str]]:
    """Numbers of the protocol: value and meaning."""
    docs, values = dict(_BY_HAND), {}
    for module in (wire, asked, answers):
        docs = below(ast.parse(inspect.getsource(module)).body) | docs
        values |= {n: x for n, x in vars(module).items() if n.isupper() and x is not TYPE_CHECKING}
    return {name: (value, docs[name]) for name, value in values.items()}


def _anchor(one: type[object]) -> str:
    return f"{home(one)}.{one.__name__}"


def _doc(model: type[BaseModel]) -> str:
    """Fields of a set request: its own, and those of the base class."""
    own = model.__doc__ or ""
    if issubclass(model, asked._SetRequest):
        return f"{own}\n\n{(asked._SetRequest.__doc__ or '').partition(chr(10))[2]}"
    return own


def _result(model: type[BaseModel]) -> str:
    """The reply to a request."""
    operation = OF_REQUEST[model]
    text = f"Result: {_link(operation.result)}"
    if operation.each:
        text += f" or {_link(answers.Refused)} for each, by name, in `{operation.each}`"
    return f"{text}.\n"


def _link(model: type[BaseModel]) -> str:
    return f"[`{model.__name__}`](#{_anchor(model)})"


def _first(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _fields(model: type[BaseModel], without: Set[str] = frozenset()) -> str:
    docs = meanings(model)
    rows = [
        (
            code(one.name),
            one.kind,
            code(one.default) if one.default is not None else "",
            one.bounds,
            prose(docs.get(one.name, "")),
        )
        for one in fields(model)
        if one.name not in without
    ]
    return table(("field", "type", "default", "bounds", "meaning"), rows) if rows else ""
