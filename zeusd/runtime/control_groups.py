"""Control groups of a process, as far down as root owns them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

from zeusd.core.jobs import ControlGroup

MOUNTS = "/proc/self/mountinfo"

_WHOLE = "/"
_OUTSIDE = "/.."


@dataclass(frozen=True, slots=True)
class _Mount:
    """One hierarchy whose whole tree is mounted. `controllers` is empty for version 2."""

    controllers: frozenset[str]
    folder: str


class ControlGroups:
    """The hierarchies of control groups on this machine."""

    def __init__(self, mounts: str | os.PathLike[str] = MOUNTS, owner: int = 0) -> None:
        # Unbuffered: it is read again from the start.
        self._table = open(mounts, "rb", buffering=0)  # noqa: SIM115 - for as long as this is
        # The kernel reports a priority event after each change of the table: proc_pid_mounts(5).
        self._changes = select.poll()
        self._changes.register(self._table, select.POLLPRI)
        self._mounts = [*_read(self._table.readall())]
        self._owner = owner

    def of(self, memberships: str) -> list[ControlGroup]:
        """A process's control group, as far down as the trusted user owns it."""
        return [*self._each(memberships)]

    def _each(self, memberships: str) -> Iterator[ControlGroup]:
        for line in memberships.split("\n"):  # no other character ends a line
            _, _, rest = line.partition(":")
            controllers, separator, path = rest.partition(":")
            if not separator or not path.startswith("/"):
                continue
            folder = None
            if not f"{path}/".startswith(f"{_OUTSIDE}/"):
                folder = self._folder(frozenset(filter(None, controllers.split(","))))
            if folder is None:
                yield ControlGroup(path, checked=False)
            else:
                yield ControlGroup(self._owned(folder, path))

    def _folder(self, controllers: frozenset[str]) -> str | None:
        """Mount point of the whole hierarchy with these controllers; None: not mounted."""
        while True:
            for mount in self._mounts:
                if mount.controllers >= controllers and bool(mount.controllers) == bool(
                    controllers
                ):
                    return mount.folder
            if not self._changes.poll(0):
                return None
            self._table.seek(0)
            self._mounts = [*_read(self._table.readall())]

    def _owned(self, folder: str, path: str) -> str:
        """The path down to the first group that another user owns or that others may write."""
        owned = ""
        if path == "/":
            return path  # no group below
        for name in path.split("/"):  # the first one is empty: the root of the hierarchy
            group = f"{owned}/{name}" if name else ""
            try:
                found = os.lstat(f"{folder}{group}")
            except OSError:
                break  # the group was removed after its last process exited
            if found.st_uid != self._owner or found.st_mode & 0o022:
                break
            owned = group
        return owned or "/"


def _read(table: bytes) -> Iterator[_Mount]:
    """The hierarchies in a table of mounts whose whole tree is visible."""
    for line in os.fsdecode(table).split("\n"):
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(rest) < 3 or rest[0] not in ("cgroup", "cgroup2"):
            continue
        root, folder = fields[3], fields[4]
        if root == _WHOLE:
            controllers = rest[2].split(",") if rest[0] == "cgroup" else []
            plain = folder.encode().decode("unicode_escape") if "\\" in folder else folder
            yield _Mount(frozenset(controllers), plain)
