"""Modules that are imported on first use, or may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`.

    Args:
        package: Its `__name__`.
        homes: The module of the package for each name.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
