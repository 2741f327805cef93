"""Fixtures of tests of whole systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.system.sites import QUICK_LEASES, Site


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack, 2, QUICK_LEASES)
