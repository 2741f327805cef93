"""The Python in the documentation, so that tests can run what readers copy."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        path: The page.
        line: Of its first line of code, from 1.
        source: What is in it.
    """

    path: Path
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    def run(self, **names: Any) -> dict[str, Any]:
        """Runs it.

        Args:
            names: What the page takes for granted, such as a model.

        Returns:
            All names that there are afterwards. Errors have the page's line numbers.
        """
        code = compile("\n" * (self.line - 1) + self.source, str(self.path), "exec")
        space: dict[str, Any] = {"__name__": "__main__", **names}
        exec(code, space)  # noqa: S102 - our own pages
        return space


def of(path: Path, language: str = "python") -> list[Block]:
    """A page's blocks in a language, from top to bottom."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, found.start(3)) + 1, textwrap.dedent(found[3]))
        for found in _FENCE.finditer(text)
        if found[2] == language
    ]
