"""What all sections of `zeus.show_env` are made of."""

from __future__ import annotations

REINSTALL = "install zeusd again: pip install --force-reinstall zeusd"

Row = tuple[str, str]
"""A name, and what is known of it."""


def unexpected(error: Exception) -> str:
    """What to say of an error that nothing was prepared for."""
    if isinstance(error, ImportError):
        return f"{error}; {REINSTALL}"
    return f"{type(error).__name__}: {error}; please report it, with all that is shown here"
