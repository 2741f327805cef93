"""Processes that are killed while they hold something, and the helper that restores it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import TIMEOUT_S, RunningDaemon, ending, script

INSTALL = Path(__file__).resolve().parents[2] / "packaging" / "helper"


def installed(folder: Path) -> Path:
    """The helper as it is installed."""
    subprocess.run([INSTALL, folder], check=True)
    return folder / "zeusd-restore.py"


@contextlib.contextmanager
def holding(source: str, daemon: RunningDaemon) -> Iterator[subprocess.Popen[str]]:
    """A program that holds something of a zeusd; it is killed at the end of the block."""
    with ending(script(source, daemon.socket)) as holder:
        assert holder.stdout.readline() == "holding\n"
        yield holder


def run_helper(
    *command: str, state_dir: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """The helper as the units run it, isolated and without site-packages, or as `zeusd restore`."""
    return subprocess.run(
        [sys.executable, *command, "--state-dir", str(state_dir)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=TIMEOUT_S,
    )
