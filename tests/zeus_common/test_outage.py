"""A failure that repeats fills no log."""

from __future__ import annotations

import logging

import pytest

from zeus_common import outage
from zeus_common.outage import Outage

log = logging.getLogger("test.outage")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    etcd = Outage(log, "etcd answers again")
    etcd.succeeded()
    assert not etcd.lasts
    for reason in ("refused", "refused", "timeout"):
        etcd.failed(f"etcd: {reason}")
        assert etcd.lasts
    assert warned(caplog) == ["etcd: refused"]
    etcd.succeeded()
    etcd.succeeded()
    etcd.failed("etcd: again")
    assert warned(caplog) == ["etcd: refused", "etcd answers again", "etcd: again"]


def test_an_outage_that_lasts_is_logged_again_in_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(outage.time, "monotonic", lambda: now_s)
    zeusd = Outage(log, again_s=60)
    said = []
    for now_s in (1000.0, 1030.0, 1059.9, 1060.0, 1119.9, 1120.0):
        zeusd.failed(f"at {now_s}")
        said.append(now_s)
    assert warned(caplog) == ["at 1000.0", "at 1060.0", "at 1120.0"]
    zeusd.succeeded()
    assert len(warned(caplog)) == 3  # there is nothing to say when it is over
