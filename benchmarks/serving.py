"""Benchmarks of the serving package: `python benchmarks/serving.py attribution|clocks|cost`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HOME = Path(__file__).parent
FILES = {
    "attribution": HOME / "serving" / "attribution.py",
    "clocks": HOME / "serving_clocks.py",
    "cost": HOME / "serving" / "step_cost.py",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in FILES:
        sys.exit(f"usage: python benchmarks/serving.py {'|'.join(FILES)} [options]")
    sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
    sys.path.insert(0, str(FILES[name].parent))
    runpy.run_path(str(FILES[name]), run_name="__main__")


if __name__ == "__main__":
    main()
