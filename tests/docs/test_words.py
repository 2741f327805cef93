"""One word for one thing (docs/glossary.md): replaced words are not used again."""

from __future__ import annotations

import re
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

SUFFIXES = {"", ".py", ".sh", ".c", ".h", ".toml", ".yaml", ".yml", ".json", ".service", ".socket"}
"""Of files with texts, apart from pages; scripts have no suffix."""

_BREAK = re.compile(r'"\s*\n\s*[a-z]{0,2}"|\s*\n\s*(?:(?:#|//|\*)\s?)?')
"""Where a string, a comment or a paragraph continues in the next line."""

FOLDERS = (
    *("zeus", "zeus_ipc", "zeusctl", "zeusd", "scripts", "examples", "benchmarks"),
    *("packaging", "systemd", "docker", "tests"),
)


def pages() -> list[Path]:
    more = ("CHANGELOG.md", "SECURITY.md")
    here = [one for one in snippets.pages() if "examples" not in one.parts]
    return [*here, *(ROOT / name for name in more)]


def sources() -> list[Path]:
    """Modules, and other files in which everything is text for people."""
    found = (path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file())
    return sorted(path for path in found if path.suffix in SUFFIXES and path != Path(__file__))


def _found(path: Path, *words: re.Pattern[str]) -> list[str]:
    source = path.read_text(encoding="utf-8")
    text = _BREAK.sub(lambda found: "" if found[0].startswith('"') else " ", source)
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}: {text[max(0, match.start() - 40) : match.end() + 20]}"
        for pattern in words
        for match in pattern.finditer(text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_glossary(page: Path) -> None:
    assert _found(page, FORBIDDEN, IN_PAGES) == []


def test_help_messages_docstrings_and_comments_use_the_glossary() -> None:
    assert [one for path in sources() for one in _found(path, FORBIDDEN)] == []


@pytest.mark.parametrize(
    "text", ["puts it back", "the site's maximum", "measured anew", "goes back to"]
)
def test_the_pattern_finds(text: str) -> None:
    assert FORBIDDEN.search(text)
