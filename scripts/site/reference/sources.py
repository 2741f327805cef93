"""What the sources say about attributes: the strings below them, and pydantic's metadata."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

_OF_OTHERS = ("builtins", "enum", "pydantic")


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """The strings below a class's attributes, its bases' included, by name.

    They are read from the source: pydantic and Python keep none of them.
    """
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if one.__module__.split(".")[0] not in _OF_OTHERS:
            found |= below(_body(one))
    return found


def _body(cls: type[Any]) -> list[ast.stmt]:
    """The statements of a class."""
    body = _module(inspect.getfile(cls)).body
    for name in cls.__qualname__.split("."):
        (body,) = [one.body for one in body if isinstance(one, ast.ClassDef) and one.name == name]
    return body


@functools.cache
def _module(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def below(body: Iterable[ast.stmt]) -> dict[str, str]:
    """The strings below assignments, by the name that is assigned."""
    found: dict[str, str] = {}
    name: str | None = None
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = inspect.cleandoc(text)
        match statement:
            case ast.AnnAssign(target=ast.Name(id=target)):
                name = target
            case ast.Assign(targets=[ast.Name(id=target)]):
                name = target
            case _:
                name = None
    return found


def listed_attributes(docstring: str) -> dict[str, str]:
    """Reads the section `Attributes:` of a Google-style docstring, by name."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        match = re.fullmatch(r" {4}(\w+): (.*)", line)
        if match:
            name, found[match[1]] = match[1], match[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return found


def meanings(model: type[Any]) -> dict[str, str]:
    """The meaning of each field of a model: from its class, else from its type."""
    of_types = below(_module(inspect.getfile(model)).body)
    found = {
        name: of_types[str(kind)]
        for one in reversed(model.__mro__)
        for name, kind in inspect.get_annotations(one).items()
        if str(kind) in of_types
    }
    for one in reversed(model.__mro__):
        if one.__module__.split(".")[0] not in _OF_OTHERS:
            found |= listed_attributes(one.__doc__ or "")
    return found | attribute_docs(model)


@dataclass(frozen=True)
class FieldFacts:
    """Pydantic's metadata of a field.

    Attributes:
        name: Its name in a file or on the wire.
        kind: Its type in words, such as `integer` or `list of string`.
        bounds: Other constraints on a value; empty if there are none.
        default: As JSON; None: the field is required.
    """

    name: str
    kind: str
    bounds: str
    default: str | None


def fields(model: type[BaseModel]) -> list[FieldFacts]:
    """The fields of a model, its own first and in their order."""
    own = [name for name in model.model_fields if name in inspect.get_annotations(model)]
    names = [*own, *(name for name in model.model_fields if name not in own)]
    return [facts(name, model.model_fields[name], home(model)) for name in names]


def home(cls: type[object]) -> str:
    """The module that a class is imported from: its package, if that has it, or its own module."""
    package = cls.__module__.rpartition(".")[0]
    found = getattr(sys.modules.get(package), cls.__name__, None)
    return package if found is cls else cls.__module__


def facts(name: str, field: FieldInfo, module: str) -> FieldFacts:
    """What is known of a field; `module` is where the page says its types are."""
    schema = _schema(field)
    words = _Words(schema.get("$defs", {}), module)
    return FieldFacts(
        name=field.alias or name,
        kind=words.kind(schema),
        bounds="; ".join(words.bounds(schema)),
        default=None
        if field.is_required()
        else _as_json(field.get_default(call_default_factory=True)),
    )


def _schema(field: FieldInfo) -> dict[str, Any]:
    annotation: Any = field.annotation
    if typing.get_origin(annotation) is type:  # a class, by its name
        return {"type": "string"}
    for one in field.metadata:
        annotation = Annotated[annotation, one]
    return TypeAdapter(annotation).json_schema(mode="serialization")


def _as_json(value: Any) -> str:
    def plain(one: Any) -> Any:
        return one.value if isinstance(one, Enum) else str(one)

    if type(value) is int:
        return _short(value)
    return json.dumps(value, default=plain)


_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "pattern": "matches `{}`",
}


class _Words:
    """A JSON schema in words.

    Args:
        definitions: Its `$defs`.
        module: Where the models in it are imported from; headings are named by that.
    """

    def __init__(self, definitions: Mapping[str, Any], module: str) -> None:
        self._definitions = definitions
        self._module = module

    def kind(self, schema: Mapping[str, Any]) -> str:
        if "$ref" in schema:
            return self._named(schema["$ref"].rpartition("/")[2])
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "enum" in schema:
            return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
        if "anyOf" in schema:
            return " or ".join(dict.fromkeys(self.kind(one) for one in schema["anyOf"]))
        if schema.get("type") == "array":
            if "prefixItems" in schema:
                inner = ", ".join(self.kind(one) for one in schema["prefixItems"])
                return f"\\[{inner}\\]"
            return f"list of {self.kind(schema.get('items', {}))}"
        if schema.get("type") == "object" and "title" in schema:
            return self._link(schema["title"])
        if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
            return f"map of {self.kind(schema['additionalProperties'])}"
        names = {"object": "map", "null": "null", None: "anything"}
        kind = schema.get("type")
        time = schema.get("format") == "date-time"
        return "time, ISO 8601" if time else names.get(kind, str(kind))

    def _named(self, name: str) -> str:
        definition = self._definitions[name]
        if "enum" in definition:
            return self.kind(definition)
        return self._link(name)

    def _link(self, name: str) -> str:
        return f"[{name}](#{self._module}.{name})"

    def bounds(self, schema: Mapping[str, Any]) -> list[str]:
        """Constraints of the value itself, and of its items."""
        if "anyOf" in schema:
            found = [bound for one in schema["anyOf"] for bound in self.bounds(one)]
            return list(dict.fromkeys(found))
        found = [text.format(_short(schema[key])) for key, text in _BOUNDS.items() if key in schema]
        found += _size(schema, "minItems", "maxItems", "of them")
        found += _size(schema, "minLength", "maxLength", "characters")
        if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
            found += [f"each {bound}" for bound in self.bounds(schema["items"])]
        return found


def _size(schema: Mapping[str, Any], least: str, most: str, of: str) -> list[str]:
    if "prefixItems" in schema:
        return []
    low, high = schema.get(least), schema.get(most)
    if low is None and high is None:
        return []
    if low == high:
        return ["one"] if high == 1 else [f"{high} {of}"]
    if high is None:
        return ["not empty"] if low == 1 else [f"{low} or more {of}"]
    return [f"{low} to {high} {of}" if low else f"at most {high} {of}"]


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    for power, words in ((62, "2⁶²"), (63, "2⁶³")):
        if value in (2**power, 2**power - 1):
            return words + ("" if value == 2**power else " - 1")
    return f"{value:.12g}"
