"""What tests of `zeus.run` begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from tests.zeus.run.masters import Jobs
from tests.zeus.run.sessions import Job
from zeusd.devices.simulated import Work


@pytest.fixture
def job(node: VirtualNode, work: Work, tmp_path: Path) -> Job:
    """A job on a V100."""
    return Job(node, work, tmp_path)


@pytest.fixture
def jobs(node: VirtualNode, tmp_path: Path) -> Jobs:
    """A folder for a master's jobs."""
    return Jobs(tmp_path)
