"""One word for one thing (docs/glossary.md): the words that it replaced do not come back."""

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


def _words(pattern: str) -> re.Pattern[str]:
    """Finds these words, whatever lines they stand on."""
    return re.compile(pattern.replace(" ", r"[\s#]+"), re.IGNORECASE)


FORBIDDEN = _words(
    r"\b(?:"
    rf"(?:puts?|putting) {_BACK}|(?:gives?|gave|giving) {_BACK}|given back"
    r"|(?:go|goes|going|went) back to"
    r"|let(?:s|ting)? go of|told off|tells? of|of late|anew|in the end|for ever|as ever"
    r"|site's maximum|audit trail|signs? of life|past zeusd|somebody|who(?:m)?ever"
    r")\b"
)
"""Left column of the table, where a word has no other sense."""

IN_PAGES = _words(r"\b(?:whatever|owed|owes|debts?|baselines?|held back)\b")
"""Words that code may need for another thing, and pages do not."""

IN_CODE = _words(
    r"\b(?:owed|owes|debts?|held back|ripe|trails?|whosever|manieth|shut out|kicked|let go"
    r"|tak(?:es?|en|ing) up|took up|late pipelines?"
    r"|(?<!there\s)is no (?:error|profile|frontier|plan|setting|administrator|folder|JSON|CSV)"
    r")\b"
)
"""Words that docstrings, comments and messages do without."""

IN_NAMES = {
    *("anew", "book", "books", "debt", "debts", "kicked", "letting", "owed", "owes", "party"),
    *("putback", "ripe", "somebody", "told", "trail", "trails", "whoever"),
}
"""Words that names do without."""

PACKAGES = ("zeus", "zeus_fleet", "zeus_ipc", "zeusctl", "zeusd")

ALLOWED = {
    "docs/operate/clusters.md": {"whatever"},  # "whatever fails"
    "docs/operate/zeusd.md": {"whatever"},  # "whatever the session or job"
    "zeusd/core/control.py": {"owed"},  # the argument
    "zeusd/core/restorable.py": {"owed"},  # the attribute
}
"""Where a word is meant, in lower case."""

ALLOWED_NAMES = {
    "zeus_ipc/replies/administration.py": {"owed"},  # a field of the protocol
    "zeusctl/commands/quiesce.py": {"owed"},  # the same
    "zeusd/core/administration.py": {"owed", "put_back"},
    "zeusd/core/control.py": {"owed", "put_back"},
    "zeusd/core/restorable.py": {"owed"},
    "zeus/optimizer/batch_size/choosing.py": {"_told", "told_now"},
    "zeus/optimizer/batch_size/reasons.py": {"_BY_SOMEBODY"},
    "zeus/optimizer/batch_size/rows.py": {"told"},
    "zeus/optimizer/batch_size/run.py": {"_told", "_epochs_told"},
}
"""Names that are still to change, or cannot."""

_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def pages() -> list[Path]:
    more = ("CHANGELOG.md", "SECURITY.md")
    here = [one for one in snippets.pages() if "examples" not in one.parts]
    return [*here, *(ROOT / name for name in more)]


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _found(name: str, text: str, *words: re.Pattern[str]) -> list[str]:
    allowed = ALLOWED.get(name, set())
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for pattern in words
        for match in pattern.finditer(text)
        if " ".join(match[0].lower().split()) not in allowed
    ]


def _texts(source: str) -> Iterator[str]:
    """Docstrings, messages and comments of a module, at their lines; not keys: they have no blank.

    Comments on consecutive lines are one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield "\n" * (node.lineno - 1) + node.value
    comments: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            comments[line] = [*comments.pop(line - 1, ()), token.string]
    for line, block in comments.items():
        yield "\n" * (line - len(block)) + "\n".join(block)


def _in_texts(name: str, source: str) -> list[str]:
    return [one for text in _texts(source) for one in _found(name, text, FORBIDDEN, IN_CODE)]


def _in_names(name: str, source: str) -> list[str]:
    """Names in the code that have one of these words as a part."""
    allowed = ALLOWED_NAMES.get(name, set())
    return [
        f"{name}:{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and token.string not in allowed
        for part in _PART.findall(token.string.replace("put_back", "putback"))
        if part.lower() in IN_NAMES
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_glossary(page: Path) -> None:
    assert _found(_name(page), page.read_text(encoding="utf-8"), FORBIDDEN, IN_PAGES) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_help_messages_docstrings_and_comments_use_the_glossary(package: str) -> None:
    here = [path for path in sources() if path.relative_to(ROOT).parts[0] == package]
    assert here
    assert [
        one for path in here for one in _in_texts(_name(path), path.read_text(encoding="utf-8"))
    ] == []


def test_names_use_the_glossary() -> None:
    assert [
        one
        for path in sources()
        for one in _in_names(_name(path), path.read_text(encoding="utf-8"))
    ] == []


def test_modules_are_named_after_the_glossary() -> None:
    parts = {path: set(_PART.findall(path.stem)) for path in sources()}
    assert [_name(path) for path, words in parts.items() if words & IN_NAMES] == []


@pytest.mark.parametrize(("name", "words"), ALLOWED.items())
def test_allowed_words_are_there(name: str, words: set[str]) -> None:
    text = " ".join((ROOT / name).read_text(encoding="utf-8").lower().split())
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("name", "names"), ALLOWED_NAMES.items())
def test_allowed_names_are_there(name: str, names: set[str]) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [one for one in names if not re.search(rf"\b{one}\b", text)] == []


@pytest.mark.parametrize(
    "text", ["puts it back", "the site's maximum", "measured anew", "goes back to"]
)
def test_the_pattern_finds(text: str) -> None:
    assert FORBIDDEN.search(text)


@pytest.mark.parametrize(
    "planted",
    [
        '"""What is owed."""',
        'def f():\n    """A limit goes\n    back to another."""',
        "# It goes\n# back to another.",
        "x = 1  # measured anew",
        'raise ValueError(f"{1} is no profile; give one")',
        '"""The text is\ntaken up."""',
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert _in_texts("zeus_fleet/planted.py", planted) != []
    assert _in_names("zeus_fleet/planted.py", planted) == []


@pytest.mark.parametrize(
    "planted", ["class Book: ...", "audit_trail = 1", "def put_back(): ...", "self._told = RIPE_NS"]
)
def test_a_planted_name_is_found(planted: str) -> None:
    assert _in_names("zeus_fleet/planted.py", planted) != []


@pytest.mark.parametrize("meant", ["notebook = 1", "Parties = retold = 2", "trailing = booked = 3"])
def test_another_name_is_not_found(meant: str) -> None:
    assert _in_names("zeus_fleet/planted.py", meant) == []
