"""Optional modules."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str, what: str, extra: str) -> Any:
    """Imports a module.

    Args:
        module: Its name.
        what: What needs it.
        extra: The extra of this package that includes it.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs {package}: pip install 'zeusd[{extra}]'") from None
