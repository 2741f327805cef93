"""Who asks the ledger for much waits for it, and nobody else."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import TIMEOUT_S, wait_for
from zeus_ipc import replies
from zeus_ipc.errors import ErrorCode
from zeus_ipc.requests import Allocate, GetUsage
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure
from zeusd.ledger import schema
from zeusd.ledger.usage import Reader, UsageAnswer
from zeusd.runtime import usages
from zeusd.runtime.accounting import ENDING, FOLDER, Accounting
from zeusd.runtime.usages import BUSY, MAX_WAITING

FLOODER, HONEST = 1001, 1002


class Ledger:
    """An accounting service in whose ledger the flooder's queries have no end until `end`."""

    def __init__(self, accounting: Accounting) -> None:
        self.accounting = accounting
        self._ticket = 0
        self.answers: queue.Queue[tuple[int, object]] = queue.Queue()
        self.running: set[int] = set()
        self.end = threading.Event()

    def ask(self, uid: int, conn: int = 0) -> int:
        request = GetUsage(id=1, edges=[0, 900], by="user")
        return self._submit(LedgerCall(self._next(), request, uid, uid, conn))

    def allocate(self) -> int:
        request = Allocate(id=1, gpus=["GPU-0"], name="7", uid=HONEST)
        return self._submit(LedgerCall(self._next(), request))

    def answer(self) -> tuple[int, object]:
        return self.answers.get(timeout=TIMEOUT_S)

    def closed(self, conn: int) -> None:
        self.accounting.closed(conn)

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _submit(self, call: LedgerCall) -> int:
        self.accounting.submit(call, lambda *answer: self.answers.put(answer))
        return call.ticket


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    accounting = Accounting(
        str(tmp_path), "boot", lambda: ("GPU-0", "GPU-1"), lambda _: None, ignored_units=()
    )
    made = Ledger(accounting)

    def usage_of(
        reader: Reader, request: GetUsage, uid: int | None
    ) -> Generator[None, None, UsageAnswer]:
        made.running.add(uid or 0)
        while uid != HONEST and not made.end.is_set():
            yield
        made.running.discard(uid or 0)
        return UsageAnswer([], [0])

    monkeypatch.setattr(usages, "usage_of", usage_of)
    accounting.start()
    yield made
    made.end.set()
    accounting.stop()


def test_a_ledger_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 9.99).__next__)
    monkeypatch.setattr("zeusd.runtime.accounting.time", clock)
    (tmp_path / FOLDER).touch()
    ledger = Ledger(Accounting(str(tmp_path), "boot", lambda: ["GPU-0"], lambda _: None))
    ticket = ledger.allocate()
    ledger.accounting.start()
    answered, refused = ledger.answer()
    assert (answered, refused.code) == (ticket, ErrorCode.LEDGER_FAILED)
    (tmp_path / FOLDER).unlink()
    answers = (ledger.answer()[1] for _ in iter(ledger.allocate, None))
    wait_for(lambda: isinstance(next(answers), replies.EmptyResult), "the ledger to open")
    ledger.accounting.stop()


def test_neither_writes_nor_other_users_wait_for_a_long_query(ledger: Ledger) -> None:
    flood = {ledger.ask(FLOODER) for _ in range(MAX_WAITING)}
    wait_for(lambda: FLOODER in ledger.running, "the query to begin")
    for ask in (ledger.allocate, lambda: ledger.ask(HONEST), ledger.allocate):
        ticket = ask()
        answered, result = ledger.answer()
        assert answered == ticket
        assert isinstance(result, (replies.EmptyResult, replies.Usage))
    assert ledger.accounting.unheld == ["GPU-1"]
    ledger.end.set()
    assert {ledger.answer()[0] for _ in flood} == flood


def test_a_stop_waits_for_no_query_and_takes_no_more(ledger: Ledger) -> None:
    asked = {ledger.ask(FLOODER) for _ in range(3)}
    wait_for(lambda: FLOODER in ledger.running, "the query to begin")
    ledger.accounting.refuse_all()
    asked.add(ledger.ask(HONEST))
    answers = [ledger.answer() for _ in asked]
    assert {ticket for ticket, _ in answers} == asked
    assert [result for _, result in answers] == [ENDING] * 4


def test_a_user_has_a_bounded_number_of_queries(ledger: Ledger) -> None:
    for _ in range(MAX_WAITING):
        ledger.ask(FLOODER)
    assert ledger.answers.empty()
    ticket = ledger.ask(FLOODER)
    answered, result = ledger.answer()
    assert answered == ticket
    assert (result.code, "of this user's" in result.message) == (ErrorCode.OVERLOADED, True)
    assert ledger.ask(HONEST) == ledger.answer()[0]


def test_all_users_together_have_a_bounded_number_of_queries(ledger: Ledger) -> None:
    for number in range(256):
        ledger.ask(2000 + number // MAX_WAITING)
    assert ledger.answers.empty()
    assert (ledger.ask(HONEST), BUSY) == ledger.answer()


def test_what_an_ended_connection_asked_is_not_answered(ledger: Ledger) -> None:
    dead = [ledger.ask(FLOODER, conn=1) for _ in range(MAX_WAITING - 1)]
    lives = ledger.ask(FLOODER, conn=2)
    wait_for(lambda: FLOODER in ledger.running, "the query to begin")
    ledger.closed(1)
    for ticket in dead:
        answered, result = ledger.answer()
        assert answered == ticket
        assert isinstance(result, Failure)
    ledger.end.set()
    assert ledger.answer()[0] == lives
    assert ledger.answers.empty()


def test_beyond_a_burst_a_user_has_a_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only while queries run: the flooder's does not end, and no longer runs."""
    schema.open_ledger(tmp_path).close()
    steps = {FLOODER: 0, HONEST: 0}
    now_ns = 10**12

    def usage_of(
        reader: Reader, request: GetUsage, uid: int | None
    ) -> Generator[None, None, UsageAnswer]:
        nonlocal now_ns
        for _ in range(10 if uid == HONEST else 1_000_000):
            steps[uid] += 1
            now_ns += 1_000_000
            yield
        return UsageAnswer([], [0])

    monkeypatch.setattr(usages, "usage_of", usage_of)
    monkeypatch.setattr(usages, "BURST_NS", 100_000_000)
    monkeypatch.setattr(usages, "LEAST_NS", 0)
    answers: queue.Queue[int] = queue.Queue()
    one = usages.Usages(
        {"gpu": str(tmp_path)},
        lambda: None,
        lambda call, _: answers.put(call.ticket),
        lambda: now_ns,
    )
    one.start()
    request = GetUsage(id=1, edges=[0, 900], by="user")
    one.submit(LedgerCall(0, request, FLOODER, FLOODER))
    wait_for(lambda: steps[FLOODER] >= 100, "the burst")
    for ticket in range(1, 6):
        one.submit(LedgerCall(ticket, request, HONEST, HONEST))
        assert answers.get(timeout=TIMEOUT_S) == ticket
    assert steps[HONEST] == 50
    assert steps[FLOODER] <= 200
    one.stop()
