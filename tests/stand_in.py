"""Compiles C stand-ins for the libraries of drivers, and shares their state with them."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests import needs

State = TypeVar("State", bound=ctypes.Structure)


@cache
def compiled(source: Path, name: str, *flags: str) -> Path:
    """The library of a source, in a folder that every user may enter."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"zeusd-{source.stem}-{os.getuid()}-{digest}"
    folder.mkdir(exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to someone else; remove it, or set TMPDIR.")
    folder.chmod(0o755)  # whatever the umask: tests act as other users
    library = folder / name
    if not library.exists():
        needs.require("gcc")
        aside = folder / f"new-{os.getpid()}"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags]
        command += ["-o", str(aside), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        aside.chmod(0o755)
        aside.rename(library)
    return library


def mapped(state: Path, record: Path, layout: type[State]) -> State:
    """A state that a library shares with this process, and a file for its record."""
    state.write_bytes(bytes(ctypes.sizeof(layout)))
    record.touch()
    for path in (state, record):
        path.chmod(0o666)
    with state.open("r+b") as file:
        return layout.from_buffer(mmap.mmap(file.fileno(), 0))
