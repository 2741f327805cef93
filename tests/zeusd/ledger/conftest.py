from __future__ import annotations

from pathlib import Path

import pytest

from tests.zeusd.ledger.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A node with one GPU, whose zeusd has just started."""
    return World(tmp_path).open()
