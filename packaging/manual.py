"""Writes the manual pages of zeusd and its exporter to a folder; zeusctl writes its own."""

from __future__ import annotations

import sys
from pathlib import Path

from zeusctl.exporter.__main__ import main as exporter
from zeusctl.man import pages
from zeusd.cli import main as zeusd


def main() -> None:
    """Writes them to the folder that the command line names."""
    folder = Path(sys.argv[1])
    for name, text in {**pages(zeusd, "zeusd"), **pages(exporter, "zeusd-exporter")}.items():
        (folder / f"{name}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
