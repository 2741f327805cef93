"""Finding programs by name, as a shell does, and what they print."""

from __future__ import annotations

import os
import shutil
import subprocess


def is_missing(program: str, error: OSError, path: str | None = None) -> bool:
    """Whether a program could not be started because it does not exist.

    If a folder of the PATH cannot be searched and no other folder has the program, `subprocess`
    raises PermissionError. A shell says "command not found", and ends with 127.

    Args:
        program: Its name, or its path.
        error: What `subprocess` raised.
        path: The PATH that was searched; None: this process's.
    """
    if isinstance(error, PermissionError) and os.path.dirname(program):
        return False
    # A file that exists and is "not found" names an interpreter that does not exist.
    missing = isinstance(error, (FileNotFoundError, PermissionError))
    return missing and shutil.which(program, os.F_OK, path) is None


def output(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a program prints; None: it cannot be run, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
