"""Markdown as Python-Markdown reads it, from texts that are not Markdown throughout."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]+`)")
_ACTIVE = re.compile(r"([*_<>\[\]\\|])")


def code(text: object) -> str:
    """Text as code."""
    return f"`{text}`"


def prose(text: str) -> str:
    """A docstring's or a help text's sentence: between backticks is code, the rest is plain."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(
        part if number % 2 else _ACTIVE.sub(r"\\\1", part) for number, part in enumerate(parts)
    )


def paragraphs(text: str) -> str:
    """A docstring or a help text of several paragraphs.

    Paragraphs that click must not reflow (a backspace before them) are output; indented ones are
    Python.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            found.append("```text\n" + paragraph.partition("\n")[2].rstrip() + "\n```")
        elif paragraph.startswith("    "):
            found.append("```python\n" + textwrap.dedent(paragraph).rstrip() + "\n```")
        elif paragraph.strip():
            found.append(prose(paragraph))
    return "\n\n".join(found) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown. Columns that no row has anything in are left out."""
    rows = [tuple(row) for row in rows]
    kept = [n for n in range(len(head)) if not rows or any(row[n] for row in rows)]
    lines = [
        "| " + " | ".join(row[n] for n in kept) + " |"
        for row in (tuple(head), ("---",) * len(head), *rows)
    ]
    return "\n".join(lines) + "\n"


def heading(level: int, title: str, anchor: str = "") -> str:
    """Formats a heading, with an anchor if the anchor differs from the heading's text."""
    return f"\n{'#' * level} {title}" + (f" {{#{anchor}}}" if anchor else "") + "\n\n"
