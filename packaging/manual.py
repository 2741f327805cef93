"""Write the manual pages of zeusd, its exporter and zeus-fleet; zeusctl writes its own."""

from __future__ import annotations

import sys
from pathlib import Path

from zeus_fleet.command import main as fleet
from zeusctl.exporter.__main__ import main as exporter
from zeusctl.man import pages
from zeusd.cli import main as zeusd


def main() -> None:
    """Writes them to the folder that the command line names."""
    folder = Path(sys.argv[1])
    for command, name in ((zeusd, "zeusd"), (exporter, "zeusd-exporter"), (fleet, "zeus-fleet")):
        for page, text in pages(command, name).items():
            (folder / f"{page}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
