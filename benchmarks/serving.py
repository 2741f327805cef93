"""Benchmarks of the serving package: `python benchmarks/serving.py attribution|clocks`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HOME = Path(__file__).parent / "serving"
NAMES = ("attribution", "clocks")


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES or not (HOME / f"{name}.py").exists():
        sys.exit(f"usage: python benchmarks/serving.py {'|'.join(NAMES)} [options]")
    sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
    sys.path.insert(0, str(HOME))
    runpy.run_path(str(HOME / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
