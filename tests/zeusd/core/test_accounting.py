"""Who may say which job holds a GPU, and who may see whose energy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.zeusd.core.world import World
from zeus_ipc.errors import ErrorCode
