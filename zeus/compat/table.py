"""Where the modules and names of ml-energy/zeus are here; see `names.txt`."""

from __future__ import annotations

import os
import sys
from typing import Any

PAGE = "https://zeusd-project.github.io/zeusd/migrating/#what-is-missing"

MODULES: dict[str, tuple[str, ...]] = {}
"""By path: the releases that have it, and the modules that have its names here."""

RENAMED: dict[str, tuple[str, str]] = {}
"""By name: its module here, and its name there."""

NOT_SUPPORTED: dict[str, str] = {}
"""Modules and names that are for hardware or systems that are not supported here, and which."""

_loader: Any = sys.modules[__name__].__loader__  # also of a zip file
_names: bytes = _loader.get_data(os.path.join(os.path.dirname(__file__), "names.txt"))
for _line in _names.decode().splitlines():
    if _line and not _line.startswith("#"):
        _old, _releases, *_new = _line.split()
        if _new[:1] == ["!"]:
            NOT_SUPPORTED[_old] = " ".join(_new[1:])
        elif ":" in "".join(_new):
            _home, _, _name = _new[0].partition(":")
            RENAMED[_old] = _home, _name
        else:
            MODULES[_old] = (_releases, *_new)
