"""Writes of files that leave no part of what was to be written."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file; a reader sees the old file or the complete new one. Of several writers, the
    last one wins. A file that is not regular, such as a pipe, is written to, not replaced.

    Raises:
        OSError: It cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def append_text(path: Path, text: str) -> None:
    """Appends to a file; a full disk leaves no part of a line.

    Raises:
        OSError: Nothing was appended.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
