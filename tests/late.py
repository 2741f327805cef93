"""Modules that take seconds to import and that few tests use: PyTorch and trainers.

Every worker collects every file, but one worker runs those that use these modules: see
`tests/conftest.py`, which refuses a file that imports them when it is collected.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from typing import Any

import pytest

from tests import needs

HEAVY = ("torch", "transformers", "lightning")


class Late:
    """Stands for a module, which is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if not _collected:  # pytest looks for names of its own in all that a test file has
            raise AttributeError(f"{self.__name__} is imported when tests run")
        return getattr(_load(self.__name__), name)


def late(name: str) -> Any:
    """A module to use when tests run; the tests of the file that asks need its package."""
    needs.package(name.partition(".")[0])
    return Late(name)


def collected() -> None:
    """Allows names to be used from now on.

    Raises:
        pytest.UsageError: A file has imported such a module all the same.
    """
    global _collected
    if early := [name for name in HEAVY if name in sys.modules]:
        raise pytest.UsageError(f"a test file imports {', '.join(early)}: see tests/late.py")
    _collected = True


_collected = False


@functools.cache
def _load(name: str) -> Any:
    """Imports a module, in which nobody looks for garbage, as in what is there before all tests."""
    gc.disable()
    try:
        found = importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()
    return found
