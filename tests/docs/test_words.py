"""One word for one thing (docs/glossary.md): replaced words are not used again."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests import snippets
from tests.snippets import ROOT
from tests.support import PACKAGES

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

IN_CODE = re.compile(
    r"\b(?:owed|owes|debts?|held back|ripe|trails?|whosever|manieth|shut out|kicked|let go"
    r"|tak(?:es?|en|ing) up|took up|late pipelines?"
    r"|(?<!there )is no (?:error|profile|frontier|plan|setting|administrator|folder|JSON|CSV)"
    r")\b",
    re.IGNORECASE,
)
"""Words that docstrings, comments and messages of the packages do without."""

IN_NAMES = {
    *("anew", "book", "books", "debt", "debts", "kicked", "letting", "owed", "owes", "party"),
    *("putback", "ripe", "somebody", "told", "trail", "trails", "whoever"),
}
"""Words that names of the packages do without."""

SHARED_CLASSES = {("zeus", "BatchSizeOptimizer")}
"""Both are public, as in ml-energy/zeus: a run's client, and the base class of policies."""

_BACK_NAMES = re.compile("(?:put|not|goes)_back")
_ANY_NAME = re.compile("|".join([*IN_NAMES, _BACK_NAMES.pattern]), re.IGNORECASE)
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")

SUFFIXES = {"", ".py", ".sh", ".c", ".h", ".toml", ".yaml", ".yml", ".json", ".service", ".socket"}
"""Of files with texts, apart from pages; scripts have no suffix."""

_BREAK = re.compile(r'"\s*\n\s*[a-z]{0,2}"|\s*\n\s*(?:(?:#|//|\*)\s?)?')
"""Where a string, a comment or a paragraph continues in the next line."""

FOLDERS = (
    *PACKAGES,
    *("scripts", "examples", "benchmarks", "packaging", "systemd", "docker", "tests"),
)


NAMED = (
    *("zeus_ipc", "zeus_common", "zeusd", "zeusctl", "zeus_fleet"),
    *("zeus/compat", "zeus/device", "zeus/measure", "zeus/monitor", "zeus/utils"),
)
"""Rooms in which an item of what has a plural for its name has the singular."""

_UNNAMED = re.compile(r"\bfor one in (?:\w+\.)*\w*[a-rt-z]s(?:\.values\(\))?(?=[\s\]:)}])")


def pages() -> list[Path]:
    more = ("CHANGELOG.md", "SECURITY.md")
    here = [one for one in snippets.pages() if "examples" not in one.parts]
    return [*here, *(ROOT / name for name in more)]


def sources() -> list[Path]:
    """Modules, and other files in which everything is text for people."""
    found = (path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file())
    return sorted(path for path in found if path.suffix in SUFFIXES and path != Path(__file__))


def modules() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def _joined(text: str) -> str:
    return _BREAK.sub(lambda found: "" if found[0].startswith('"') else " ", text)


def _found(path: Path, *words: re.Pattern[str]) -> list[str]:
    source = path.read_text(encoding="utf-8")
    text = _joined(source)
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}: {text[max(0, match.start() - 40) : match.end() + 20]}"
        for pattern in words
        for match in pattern.finditer(text)
    ]


def _texts(source: str) -> Iterator[str]:
    """Docstrings, messages and comments of a module; not keys, which have no blank.

    Comments on consecutive lines are one. To find them exactly takes ten times as long: that of a
    line with a `#` in a string may begin there, and have its code as well.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    comments: dict[int, str] = {}
    for line, text in enumerate(source.split("\n")):
        _, mark, rest = text.partition("#")
        if mark:
            comments[line] = f"{comments.pop(line - 1, '')}\n#{rest}"
    yield from comments.values()


def _in_texts(name: str, source: str) -> list[str]:
    return [
        f"{name}: {text[max(0, match.start() - 40) : match.end() + 20]}"
        for text in map(_joined, _texts(source))
        for match in IN_CODE.finditer(text)
    ]


def _in_names(name: str, source: str) -> list[str]:
    """Names in the code that have one of these words as a part."""
    if not _ANY_NAME.search(source):
        return []
    return [
        f"{name}:{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME
        for part in _PART.findall(_BACK_NAMES.sub("putback", token.string))
        if part.lower() in IN_NAMES
    ]


def _shared_classes(sources: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Package and name of each public class that two modules of the package define."""
    found = Counter(
        (name.partition("/")[0], one)
        for name, source in sources
        for one in re.findall(r"^class ([^_\W]\w*)", source, re.MULTILINE)
    )
    return {one for one, number in found.items() if number > 1}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_glossary(page: Path) -> None:
    assert _found(page, FORBIDDEN, IN_PAGES) == []


def test_help_messages_docstrings_and_comments_use_the_glossary() -> None:
    assert [one for path in sources() for one in _found(path, FORBIDDEN)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_use_the_glossary(package: str) -> None:
    read = {path.relative_to(ROOT).as_posix(): path for path in modules()}
    here = {name: path for name, path in read.items() if name.startswith(f"{package}/")}
    assert here
    for name, path in here.items():
        source = path.read_text(encoding="utf-8")
        assert [*_in_texts(name, source), *_in_names(name, source)] == []


def test_modules_are_named_after_the_glossary() -> None:
    assert [path for path in modules() if IN_NAMES & {*_PART.findall(path.stem)}] == []


@pytest.mark.parametrize("room", NAMED)
def test_an_item_of_a_plural_has_the_singular_for_its_name(room: str) -> None:
    assert _UNNAMED.search("sum(one.gpus for one in self.leases)")
    assert [text for path in (ROOT / room).rglob("*.py") for text in _found(path, _UNNAMED)] == []


def _bound(source: str, local: str) -> list[int]:
    """Lines that bind a local name, or take it as a parameter; a field of a class is not local."""
    nodes = [*ast.walk(ast.parse(source))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = {one.target for node in classes for one in node.body if isinstance(one, ast.AnnAssign)}
    names = {node for node in nodes if isinstance(node, ast.Name) and node.id == local} - fields
    taken = [node.lineno for node in nodes if isinstance(node, ast.arg) and node.arg == local]
    return taken + [node.lineno for node in names if isinstance(node.ctx, ast.Store)]


def test_a_local_name_is_a_noun() -> None:
    planted = (
        "if one := 1: 1\ndef f(one): 1\nfor a, one in b: 1\nwith a as one: 1\n{a for one in b}"
    )
    assert sorted(_bound(planted, "one")) == [1, 2, 3, 4, 5]
    assert _bound("class Check:\n    one: str = f(one=one)", "one") == []
    sources = {path: path.read_text(encoding="utf-8") for path in modules()}
    assert [
        path for path, text in sources.items() if "found" in text and _bound(text, "found")
    ] == []


def test_no_two_classes_of_a_package_have_the_same_name() -> None:
    """So that a search for a class finds one."""
    read = ((path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in modules())
    assert _shared_classes(read) == SHARED_CLASSES


def test_a_planted_class_is_found() -> None:
    planted = [
        ("zeus/a.py", "class Run: ...\nclass _Row: ..."),
        ("zeus/b/c.py", "class Run: ...\nclass _Row: ..."),
        ("zeusd/a.py", "class Run: ..."),
    ]
    assert _shared_classes(planted) == {("zeus", "Run")}


@pytest.mark.parametrize(
    "text", ["puts it back", "the site's maximum", "measured anew", "goes back to"]
)
def test_the_pattern_finds(text: str) -> None:
    assert FORBIDDEN.search(text)


@pytest.mark.parametrize(
    "planted",
    [
        '"""What is owed."""',
        'def f():\n    """A pipeline is shut\n    out."""',
        "# It is taken\n# up.",
        'raise ValueError(f"{1} is no profile; give one")',
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
