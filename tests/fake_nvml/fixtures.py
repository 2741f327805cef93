"""Doubles for tests whose other processes, and other users, must reach the files.

A test module offers the fixture as its own: `nvml_double = fixtures.nvml_double`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.fake_nvml.double import BY_EUID, NvmlDouble
from tests.support import public_directory

MakeDouble = Callable[..., NvmlDouble]


@pytest.fixture
def nvml_double() -> Iterator[MakeDouble]:
    """Makes doubles, each in its own directory, which every user may enter."""
    with contextlib.ExitStack() as stack:

        def make(
            gpus: Sequence[dict[str, Any]] = ({},),
            *,
            privilege: int = BY_EUID,
            latency_ms: float = 0.0,
        ) -> NvmlDouble:
            directory = stack.enter_context(public_directory())
            return NvmlDouble(directory, gpus, privilege=privilege, latency_ms=latency_ms)

        yield make
