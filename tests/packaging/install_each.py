"""Installs each extra alone in a fresh environment, as a user would, and runs its promises.

    python -m tests.packaging.install_each [EXTRA ...]

Prints for each how large it is and how long the library's import takes. Takes minutes, and as many
gigabytes as PyTorch; the tests check the same on what is installed already (test_distribution.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.packaging.closure import ROOT
from tests.packaging.promises import BASE, PROMISES

PINS = "torch==2.13.0\n"
"""A CPU build is at hand for this one; a range would bring a build for CUDA."""

IMPORTED = "import zeus.monitor, zeus.optimizer.power_limit"
ROUNDS = 5


def main() -> int:
    """Prints a table. Returns the number of extras that break a promise."""
    asked = sys.argv[1:] or list(PROMISES)
    broken = 0
    print("| installed | MB, without / with bytecode | import, ms | |\n|---|--:|--:|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins = folder / "pins.txt"
        pins.write_text(PINS)
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", name]
        subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        for extra in asked:
            outcome = _try(extra, wheel, pins)
            broken += not outcome.endswith("| ok |")
            print(outcome, flush=True)
    return broken


def _try(extra: str, wheel: Path, pins: Path) -> str:
    what = "zeusd" if extra == BASE else f"zeusd[{extra}]"
    with tempfile.TemporaryDirectory() as name:
        venv = Path(name, "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        python = str(venv / "bin" / "python")
        asked = str(wheel) if extra == BASE else f"{wheel}[{extra}]"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(pins), asked]
        installed = subprocess.run(pip, capture_output=True, text=True)
        if installed.returncode != 0:
            return f"| {what} | | | not installed: {_last_line(installed.stderr)} |"
        files = [path for path in (venv / "lib").rglob("*") if path.is_file()]
        total = sum(path.stat().st_size for path in files)
        sources = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
        done = subprocess.run(
            [python, "-I", "-c", PROMISES[extra]], cwd=name, capture_output=True, text=True
        )
        said = "ok" if done.returncode == 0 else _last_line(done.stderr)
        size = f"{sources / 1e6:.1f} / {total / 1e6:.1f}"
        return f"| {what} | {size} | {_import_ms(python):.0f} | {said} |"


def _import_ms(python: str) -> float:
    """The least of several times, above that of an interpreter that imports nothing."""

    def least(program: str) -> float:
        took = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            subprocess.run([python, "-I", "-c", program], check=True)
            took.append(time.perf_counter() - begin)
        return min(took) * 1e3

    return least(IMPORTED) - least("pass")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing said"])[-1]


if __name__ == "__main__":
    sys.exit(main())
