"""Lines of the sections of `zeus.show_env`."""

from __future__ import annotations

REINSTALL = "install zeusd again: pip install --force-reinstall zeusd"

Row = tuple[str, str]
"""A name, and its text."""


def unexpected(error: Exception) -> str:
    """The text for an unexpected error."""
    if isinstance(error, ImportError):
        return f"{error}; {REINSTALL}"
    return f"{type(error).__name__}: {error}; please report it with all of this output"
