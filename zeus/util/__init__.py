"""Names that scripts for earlier versions of ml-energy/zeus import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily
from zeus.utils.metric import zeus_cost as zeus_cost

if TYPE_CHECKING:
    from zeus.run.console import FileAndConsole as FileAndConsole

__all__ = ["FileAndConsole", "zeus_cost"]

__getattr__ = lazily("zeus", {"FileAndConsole": "run.console"})
