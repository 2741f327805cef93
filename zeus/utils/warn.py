"""Warnings that point at the user's line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_HOME = Path(__file__).parents[2]
_OURS = tuple(
    f"{_HOME / name}{os.sep}" for name in ("zeus", "zeus_ipc", "zeus_common", "zeusd", "zeusctl")
)
_LIBRARIES = (f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen ")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the newest call of the user's own code, or else of a library: a trainer calls us
    from its own lines, which its user did not write.
    """
    theirs = [frame for frame in _calls(sys._getframe(1)) if not _in(frame, _OURS)]
    users = (frame for frame in theirs if not _is_library(frame))
    frame = next(users, theirs[0] if theirs else sys._getframe(1))
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "sys"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _calls(frame: FrameType | None) -> list[FrameType]:
    calls = []
    while frame is not None:
        calls.append(frame)
        frame = frame.f_back
    return calls


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return _in(frame, _LIBRARIES) or f"-packages{os.sep}" in name


def _in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)
