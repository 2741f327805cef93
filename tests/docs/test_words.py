"""One word for one thing (docs/glossary.md): replaced words are not used again."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import snippets
from tests.snippets import ROOT

_BACK = r"(?:(?:it|them|limits|clocks|everything|leases) )?back"

FORBIDDEN = re.compile(
    r"\b(?:"
    rf"(?:puts?|putting) {_BACK}|(?:gives?|gave|giving) {_BACK}|given back"
    r"|(?:go|goes|going|went) back to"
    r"|let(?:s|ting)? go of|told off|tells? of|of late|anew|in the end|for ever|as ever"
    r"|site's maximum|audit trail|signs? of life|past zeusd|somebody|who(?:m)?ever"
    r")\b",
    re.IGNORECASE,
)
"""Left column of the table, where a word has no other sense."""

IN_PAGES = re.compile(r"\b(?:whatever|owed|owes|debts?|baselines?|held back)\b", re.IGNORECASE)
"""Words that code may need for another thing, and pages do not."""

PACKAGES = ("zeus", "zeus_ipc", "zeusctl", "zeusd")


def pages() -> list[Path]:
    more = ("CHANGELOG.md", "SECURITY.md")
    here = [one for one in snippets.pages() if "examples" not in one.parts]
    return [*here, *(ROOT / name for name in more)]


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def _found(path: Path, text: str, *words: re.Pattern[str]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for pattern in words
        for match in pattern.finditer(text)
    ]


def _texts(path: Path) -> Iterator[str]:
    """Docstrings, messages and comments of a module, at their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "\n" * (node.lineno - 1) + node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "\n" * (token.start[0] - 1) + token.string


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_glossary(page: Path) -> None:
    assert _found(page, page.read_text(encoding="utf-8"), FORBIDDEN, IN_PAGES) == []


def test_help_messages_docstrings_and_comments_use_the_glossary() -> None:
    assert [
        one for path in sources() for text in _texts(path) for one in _found(path, text, FORBIDDEN)
    ] == []


@pytest.mark.parametrize(
    "text", ["puts it back", "the site's maximum", "measured anew", "goes back to"]
)
def test_the_pattern_finds(text: str) -> None:
    assert FORBIDDEN.search(text)
