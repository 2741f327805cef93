"""Write the manual pages of all programs but zeusctl, which writes its own."""

from __future__ import annotations

import sys
from pathlib import Path

from zeus_fleet.commands import main as fleet
from zeusctl.exporter.__main__ import main as exporter
from zeusctl.kubernetes.__main__ import main as kubernetes
from zeusctl.man import pages
from zeusd.cli import main as zeusd

PROGRAMS = {
    "zeusd": zeusd,
    "zeusd-exporter": exporter,
    "zeusd-kubernetes": kubernetes,
    "zeus-fleet": fleet,
}


def main() -> None:
    """Writes them to the folder that the command line names."""
    folder = Path(sys.argv[1])
    for name, command in PROGRAMS.items():
        for page, text in pages(command, name).items():
            (folder / f"{page}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
