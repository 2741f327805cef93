from __future__ import annotations

import pytest

from tests.zeusd.core.world import World


@pytest.fixture
def world() -> World:
    """Two GPUs, and whoever asks may set everything."""
    return World(limits_mw=(300_000, 300_000))
