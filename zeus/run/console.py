"""Output to the console and a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO


class FileAndConsole:
    """Writes to two places; can replace `sys.stdout`.

    Args:
        filepath: The file, opened for appending.
        stream: The console; None: standard output as it is now.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, filepath: str | Path, stream: TextIO | None = None) -> None:
        self._file = open(filepath, "a", encoding="utf-8")  # noqa: SIM115 - closed with this
        self._stream = sys.stdout if stream is None else stream

    def write(self, text: str) -> int:
        """Writes to both."""
        self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flushes both."""
        self._file.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether the console is a terminal."""
        return self._stream.isatty()

    def close(self) -> None:
        """Closes the file; the console stays open."""
        self._file.close()
