"""A picture of a terminal: text with escapes on standard input, SVG on standard output.

tmux capture-pane -e -p | python scripts/lib/terminal_picture.py TITLE > picture.svg
"""

from __future__ import annotations

import re
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    """Draws what standard input holds."""
    lines = sys.stdin.read().rstrip("\n").split("\n")
    width = max(Text.from_ansi(line).cell_len for line in lines)
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=width + 1, file=nowhere, force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line), no_wrap=True, overflow="ignore", crop=False)
    picture = console.export_svg(title=sys.argv[1], unique_id="terminal")
    # Without the font that it would have viewers fetch from elsewhere.
    print(re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
