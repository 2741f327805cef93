"""What repeats does not fill the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from zeusd.logs import AUDIT, EVERY_S, MOST, Repeats, configure

NOW_S = [1000.0]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    handler.addFilter(Repeats(lambda: NOW_S[0]))
    loggers = [logging.getLogger(name) for name in ("zeusd.test", AUDIT)]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
    yield handler
    for one in loggers:
        one.removeHandler(handler)
        one.setLevel(logging.NOTSET)


def fail(number: int) -> None:
    raise ValueError(f"differs: {number}")


def test_equal_warnings_and_failures_are_counted(kept: Kept) -> None:
    log = logging.getLogger("zeusd.test")
    for number in range(1000):
        log.warning("the disk is %s", "full", extra={"event": "journal_failed"})
        try:
            fail(number)
        except ValueError:
            log.exception("user %d shows a bug", number, extra={"event": "bug"})
    assert len(kept.records) == 2 * MOST
    NOW_S[0] += EVERY_S
    log.warning("the disk is %s", "full", extra={"event": "journal_failed"})
    assert vars(kept.records[-1])["repeated"] == 1000 - MOST
    log.warning("the disk is %s", "full", extra={"event": "journal_failed"})
    assert "repeated" not in vars(kept.records[-1])
    for number in range(1000):  # so many are remembered
        log.warning("job %d is new", number)
    before = len(kept.records)
    for _ in range(2 * MOST):
        log.warning("the disk is %s", "full", extra={"event": "journal_failed"})
    assert len(kept.records) == before + MOST


def test_what_cannot_be_formatted_is_the_handlers_trouble(kept: Kept) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RecursionError

    logging.getLogger("zeusd.test").warning("a field", extra={"odd": Odd()})
    assert len(kept.records) == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_has_its_time_level_and_fields(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **given: options.update(given))
    configure("info", form)
    (handler,) = options["handlers"]
    record = logging.makeLogRecord({"name": "zeusd", "msg": "it is full", "created": 3661.0})
    record.__dict__ |= {"levelname": "ERROR", "event": "journal_failed", "gpu": "GPU-0", "msecs": 5}
    line = handler.format(record)
    if form == "text":
        clock = time.strftime("%H:%M:%S", time.localtime(3661))
        assert line == f"{clock} error   it is full [journal_failed] gpu=GPU-0"
    else:
        said = {"level": "error", "logger": "zeusd", "message": "it is full"}
        fields = {"event": "journal_failed", "gpu": "GPU-0"}
        assert json.loads(line) == {"time": "1970-01-01T01:01:01.005Z", **said, **fields}


def test_records_that_differ_and_audit_records_are_all_logged(kept: Kept) -> None:
    log, audit = logging.getLogger("zeusd.test"), logging.getLogger(AUDIT)
    for number in range(20):
        log.warning("the disk is full", extra={"gpu": str(number)})
        log.info("a set")
        audit.warning("restore_failed", extra={"gpu": "GPU-0"})
    assert len(kept.records) == 60
