"""Names of users and groups, for people: nothing is decided by them."""

from __future__ import annotations


def known_user(uid: int) -> str | None:
    """A user's name; None if the number has none, or cannot be looked up."""
    import pwd  # Unix only, and reports are also printed elsewhere

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return None


def user_name(uid: int) -> str:
    """A user's name; the number if it has none."""
    return known_user(uid) or str(uid)


def group_name(gid: int) -> str:
    """A group's name; the number if it has none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return str(gid)
