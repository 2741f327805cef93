"""`override`: the base class documents this method (PEP 698).

Python has it from 3.12 on; modules that run on the standard library alone take it from here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import override
elif sys.version_info >= (3, 12):
    from typing import override
else:
    M = TypeVar("M")

    def override(method: M) -> M:
        """Marks a method."""
        return method


__all__ = ["override"]
