"""The server's environment variables when it was called Perseus: `PERSEUS_` for `ZEUS_PFO_`."""

from __future__ import annotations

import os

for _name, _value in list(os.environ.items()):
    if _name.startswith("PERSEUS_"):
        os.environ.setdefault(f"ZEUS_PFO_{_name.removeprefix('PERSEUS_')}", _value)
