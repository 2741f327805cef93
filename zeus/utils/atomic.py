"""Writes of files that leave no part of what was to be written."""

from __future__ import annotations

import os
from pathlib import Path

from zeus_ipc.atomic import replacing


def write_text(path: Path, text: str) -> None:
    """Writes a file; a reader sees the old file or the complete new one. Of several writers, the
    last one wins. A file that is not regular, such as a pipe, is written to, not replaced.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


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
