from __future__ import annotations

import pytest

from tests.zeusd.core.world import World


@pytest.fixture
def world() -> World:
    """Two GPUs, whose controls anyone may set."""
    return World(limits_mw=(300_000, 300_000))
