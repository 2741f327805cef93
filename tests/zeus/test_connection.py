from __future__ import annotations

import pytest

from zeus import _node
from zeus.exceptions import ZeusGPUInitError


@pytest.mark.parametrize(("value", "seconds"), [("", None), ("0.5", 0.5), ("1800", 1800.0)])
def test_the_stall_timeout_is_seconds(
    monkeypatch: pytest.MonkeyPatch, value: str, seconds: float | None
) -> None:
    monkeypatch.setenv(_node.STALL_TIMEOUT_ENV, value)
    assert _node.stall_timeout_s() == seconds


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf"])
def test_another_stall_timeout_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(_node.STALL_TIMEOUT_ENV, value)
    with pytest.raises(ZeusGPUInitError, match="must be a number of seconds"):
        _node.stall_timeout_s()
