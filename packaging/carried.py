"""Prints what a folder of Python packages holds: name, version, licence, where its text is."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def main() -> None:
    """Prints one line for each distribution in the folder that the command line names."""
    folder = Path(sys.argv[1])
    print("Contents of /usr/lib/zeusd besides zeusd, as published on PyPI:\n")
    found = metadata.distributions(path=[str(folder)])
    for one in sorted(found, key=lambda one: one.metadata["Name"].lower()):
        known = one.metadata
        licence = known["License-Expression"] or known["License"] or "see its text"
        print(f"{known['Name']} {one.version}\n    {licence.splitlines()[0]}")
        print(f"    https://pypi.org/project/{known['Name']}/{one.version}/")


if __name__ == "__main__":
    main()
