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
