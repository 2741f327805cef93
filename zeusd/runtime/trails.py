"""Saves the newest records of the audit log, which survive a restart of zeusd."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from zeusd.core.trail import Trail

log = logging.getLogger(__name__)

SAVE_S = 30.0
"""How often to save. The log has what is lost here by a kill."""


class TrailFile:
    """A file of records.

    Args:
        directory: Directory of the file.
        boot: Name of the present boot, whose clock the records use.
    """

    def __init__(self, directory: str, boot: str) -> None:
        self._path = Path(directory, "audit.json")
        self._boot = boot
        self._saved: object = None

    def load(self, trail: Trail) -> None:
        """Adds records that an earlier zeusd of this boot saved, if they can be read."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, encoding="utf-8") as file:
                if os.fstat(fd).st_uid != os.geteuid():
                    raise ValueError("it belongs to another user")
                kept = json.load(file)
            if kept["boot"] == self._boot:
                trail.load(kept["records"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "%s cannot be used: %s", self._path, error, extra={"event": "audit_unreadable"}
            )

    def save(self, trail: Trail) -> None:
        """Saves the records if there are new ones."""
        state = trail.state
        if state == self._saved:
            return
        temporary = self._path.with_suffix(".new")
        try:
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump({"boot": self._boot, "records": trail.dump()}, file)
            temporary.replace(self._path)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s", self._path, error, extra={"event": "audit_not_kept"}
            )
        self._saved = state
