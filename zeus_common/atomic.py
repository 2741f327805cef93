"""Writes files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the name under which to write a file, and then gives that its own: nothing but the
    whole file is ever there. What is not a regular file, such as a pipe, is written to as it is.

    Raises:
        OSError: It cannot be written; with the path.
    """
    special = path.exists() and not path.is_file()
    aside = path if special else path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    try:
        yield aside
        if not special:
            os.replace(aside, path)
    except BaseException as error:
        if not special:
            with suppress(OSError):
                aside.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise


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
