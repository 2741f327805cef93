"""The fenced blocks of the documentation, so that tests can run what readers copy.

A block that a test cannot run has a comment on the line before it that says why:
`<!-- not run: needs a real GPU -->`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(
    r"^(?: *<!-- not run: (?P<why>[^\n]*?) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<source>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        path: The page.
        line: Of its first line of code, from 1.
        source: What is in it.
        language: What its fence says; empty for nothing.
        title: The file that the reader saves it as; empty for none.
        why_not: Why no test runs it; empty if one does.
    """

    path: Path
    line: int
    source: str
    language: str = "python"
    title: str = ""
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    def run(self, **names: Any) -> dict[str, Any]:
        """Runs it, if it is Python.

        Args:
            names: What the page takes for granted, such as a model.

        Returns:
            All names that there are afterwards. Errors have the page's line numbers.
        """
        code = compile("\n" * (self.line - 1) + self.source, str(self.path), "exec")
        space: dict[str, Any] = {"__name__": "__main__", **names}
        exec(code, space)
        return space


def pages() -> list[Path]:
    """Every page that readers copy from."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]


def every(path: Path) -> list[Block]:
    """All blocks of a page, from top to bottom."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            path=path,
            line=text.count("\n", 0, found.start("source")) + 1,
            source=textwrap.dedent(found["source"]),
            language=found["language"],
            title=title[1] if (title := _TITLE.search(found["info"])) else "",
            why_not=found["why"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def of(path: Path, language: str = "python") -> list[Block]:
    """A page's blocks in a language, from top to bottom."""
    return [block for block in every(path) if block.language == language]


def without_fences(path: Path) -> str:
    """A page's text, with empty lines where its blocks are."""

    def empty(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    return _FENCE.sub(empty, path.read_text(encoding="utf-8"))
