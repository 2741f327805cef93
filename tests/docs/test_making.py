"""The functions that generate the reference and rewrite links; nothing is built."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
from markdown import Markdown
from pydantic import BaseModel, Field

from scripts.site.reference import api
from scripts.site.reference.markdown import paragraphs, prose, table
from scripts.site.reference.sources import attribute_docs, fields, listed_attributes, meanings
from tests.docs.built import SITE_URL
from tests.snippets import ROOT
from tests.support import PACKAGES

Watts = Annotated[int, Field(ge=1, le=300)]
"""A limit."""


class Sample(BaseModel):
    """States of a device.

    Attributes:
        name: What it is called,
            at length.
    """

    name: str
    limit_w: Watts = 250
    """The one in force."""
    most_w: Watts | None = None
    spans: list[tuple[int, int]] = Field(default_factory=lambda: [(1, 2)], min_length=1)
    """Pairs."""
    kind: Literal["a", "b"] = "a"


def test_only_code_is_left_as_it_is() -> None:
    assert prose("`a_b <c>` is * <d>\n and [e]") == r"`a_b <c>` is \* \<d\> and \[e\]"


def test_examples_stay_examples() -> None:
    found = paragraphs("Words\nand words.\n\n\b\nzeusctl  set\n\n    with x:\n        y\n")
    assert found.split("\n\n") == [
        "Words and words.",
        "```text\nzeusctl  set\n```",
        "```python\nwith x:\n    y\n```\n",
    ]


def test_a_column_without_anything_is_left_out() -> None:
    assert table(("a", "b", "c"), [("1", "", "2")]).splitlines()[2] == "| 1 | 2 |"


def test_attribute_docs_are_found_in_every_place() -> None:
    assert listed_attributes(Sample.__doc__ or "") == {"name": "What it is called, at length."}
    assert attribute_docs(Sample) == {"limit_w": "The one in force.", "spans": "Pairs."}
    assert meanings(Sample)["name"] == "What it is called, at length."


def test_types_and_bounds_are_words() -> None:
    found = {one.name: (one.kind, one.bounds, one.default) for one in fields(Sample)}
    assert found == {
        "name": ("string", "", None),
        "limit_w": ("integer", "≥ 1; ≤ 300", "250"),
        "most_w": ("integer or null", "≥ 1; ≤ 300", "null"),
        "spans": (r"list of \[integer, integer\]", "not empty", "[[1, 2]]"),
        "kind": ('`"a"`, `"b"`', "", '"a"'),
    }


def test_public_names_are_listed_defined_or_passed_on() -> None:
    assert "HFGlobalPowerLimitOptimizer" in api.public_names("zeus.optimizer.power_limit")
    assert "Measurement" in api.public_names("zeus.monitor")
    assert "from_ipc" in api.public_names("zeus.exceptions")
    assert not [one for one in api.public_names("zeus.exceptions") if one.startswith("_")]


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Rewrites a link of docs/operate/policy.md."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/site"))
    links = importlib.import_module("hooks").Links(Markdown(), SITE_URL, "https://host/repo/")
    links.page = "operate/policy.md"
    return links.rewritten


@pytest.mark.parametrize(
    ("link", "wanted"),
    [
        ("zeusd.md#units", "zeusd.md#units"),
        ("#below", "#below"),
        ("https://elsewhere/x", "https://elsewhere/x"),
        ("../../systemd/zeusd.toml", "https://host/repo/blob/main/systemd/zeusd.toml"),
        ("../../examples/policy", "https://host/repo/tree/main/examples/policy"),
        ("../reference/schema", "https://host/repo/tree/main/docs/reference/schema"),
        ("../../README.md#licence", "https://host/repo/blob/main/README.md#licence"),
        ("../../nowhere.toml", "../../nowhere.toml"),
        (f"{SITE_URL}reference/errors/", "../reference/errors.md"),
        (f"{SITE_URL}reference/#commands", "../reference/index.md#commands"),
        (SITE_URL, "../index.md"),
    ],
)
def test_a_link_leads_to_where_its_target_is_on_the_site(
    rewritten: Callable[[str], str], link: str, wanted: str
) -> None:
    assert rewritten(link) == wanted


MELTED = re.compile(
    r"[.:;] (?:-|\*|\d\.) [A-Z`]"  # an item of a list, in the middle of a line
    r"|\S (?:Args|Returns|Raises|Attributes|Yields):(?: |$)"
    r"|^    \S.*# .* \w+\(.*\)[.\w]*$"  # a call of an example, behind the comment of another
    r"|@\w+ def |\bwith \w+\(.*\) as \w+: \w",  # lines of one example
    re.MULTILINE,
)


@pytest.mark.parametrize(
    "docstring",
    [
        *("Ends. - The last.", "Ends. 2. The last.", "Does it. Returns: One.", "    a() # b c()"),
        *("@measured def train(): ...", "with a() as window: evaluate()"),
    ],
)
def test_a_list_heading_or_example_that_has_melted_is_found(docstring: str) -> None:
    assert MELTED.search(docstring)


def test_no_docstring_has_melted() -> None:
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node) or ""
                    found += [f"{path}: {match[0]}" for match in MELTED.finditer(text)]
    assert found == []


@pytest.mark.parametrize("page", ["reliability", "threat_model"])
def test_the_tests_that_pages_name_exist(page: str) -> None:
    text = (ROOT / f"docs/explain/{page}.md").read_text()
    named = re.findall(r"`(?:tests/)?([\w/]+/test_\w+\.py|test_\w+\.py|)((?:::\w+)?)`", text)
    source, seen = "", 0
    for path, name in named:
        source = (ROOT / "tests" / path).read_text() if path else source
        assert f"def {name[2:]}" in source or not name, f"{path}{name}"
        seen += bool(path)
    assert seen > 20


def test_the_changelog_says_what_the_first_release_is_on_one_page() -> None:
    """Nothing was released before it: what changed while it was made is in the history."""
    text = (ROOT / "CHANGELOG.md").read_text()
    section = text.partition("## 0.1.0 - ")[2].partition("\n## ")[0]
    assert 10 < len(section.splitlines()) <= 60
