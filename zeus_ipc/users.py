"""Names of users and groups, for display only."""

from __future__ import annotations

import re
from collections.abc import Mapping


def known_user(uid: int) -> str | None:
    """Returns a user's name; None if there is none, or it cannot be looked up."""
    import pwd  # Unix only, but reports are printed elsewhere, too

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return None


def user_name(uid: int) -> str:
    """Returns a user's name, or the number if there is none."""
    return known_user(uid) or str(uid)


def group_name(gid: int) -> str:
    """Returns a group's name, or the number if there is none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return str(gid)


def named(text: str, indices: Mapping[str, int]) -> str:
    """Replaces user ids and UUIDs in a message of zeusd by names and indices.

    Args:
        text: The message.
        indices: Index of each GPU, by UUID.
    """
    for uuid, index in indices.items():
        text = text.replace(uuid, f"GPU {index}")
    return re.sub(r"\buser ([0-9]+)\b", lambda found: f"user {user_name(int(found[1]))}", text)
