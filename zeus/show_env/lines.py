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


def user_name(uid: int) -> str:
    """A user's name, or number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """A group's name, or number."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
