"""One etcd for all tests of a process; each test has its own keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.zeus_fleet.etcd import running_etcd

PREFIXES = itertools.count()


@pytest.fixture(scope="session")
def etcd() -> Iterator[str]:
    with running_etcd() as endpoint:
        yield endpoint


@pytest.fixture
def prefix() -> str:
    return f"/test{next(PREFIXES)}/"
