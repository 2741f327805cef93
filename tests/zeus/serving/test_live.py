"""The parts beside an engine: recorder, meter, ledger, service."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgpack
import numpy as np
import prometheus_client as prometheus
import pytest

from tests import seeds
from tests.support import running_daemon, wait_for
from tests.zeus.serving.batches import published
from tests.zeus.serving.server import PRIOR, serve, step_of
from zeus.serving import digest as digest_module
from zeus.serving import fit as fit_module
from zeus.serving import ledger as ledger_module
from zeus.serving import metrics as metrics_module
from zeus.serving import recorder as recorder_module
from zeus.serving import service as service_module
from zeus.serving.ledger import Ledger
from zeus.serving.meter import Meter
from zeus.serving.metrics import EnergyCollector, register
from zeus.serving.receiver import Receiver
from zeus.serving.recorder import Recorder
from zeus.serving.service import Service, Shared, StoredWeights, run
from zeus.serving.wire import (
    Arrival,
    Batch,
    EngineStep,
    Finish,
    Owner,
    Unpacker,
    pack,
    pack_request,
    packet,
)
from zeus_common.http_guard import WebServer
from zeus_ipc.errors import RequestRejected
from zeus_ipc.replies import Sample

MS = 10**6

# ------------------------------------------------------------------------------------------- wire


def sent(*messages: object) -> bytes:
    """Messages as they are sent."""
    return packet(map(pack, messages))


def unpack(data: bytes) -> list[object]:
    return list(Unpacker()(data))


def whole(number: int, instants: object, roster: object, *rows: object) -> Batch:
    return Batch("1", number, instants, True, [], roster, *rows)


def test_messages_survive_the_wire():
    step = EngineStep("1", 7, 10, 20, ["a", "b"], [True, False], [5, 1], [0, 9])
    roster = pack_request("a", 5) + pack_request("b", 7)
    assert unpack(sent(step)) == [step]
    assert unpack(sent(whole(7, [10, 20], roster, [5, 10], [5, 1]))) == [step]
    assert unpack(sent(whole(8, [10, 20, 20, 30], roster, [5, 10], [1, 1]))) == [
        EngineStep("1", 8, 10, 20, ["a", "b"], [True, False], [1, 1], [4, 9]),
        EngineStep("1", 9, 20, 30, ["a", "b"], [False, False], [1, 1], [5, 10]),
    ]
    others = [Finish("1", "a", "x", "y"), Arrival("1", "a", 5, 9, "00-1"), Owner("a", "x", "y")]
    assert unpack(sent(*others)) == others


def test_a_step_is_derived_from_the_one_before_and_from_no_other():
    engine = Unpacker()
    roster = pack_request("a", 5) + pack_request("b", 7)
    joined = [pack_request("c", 4), [4], [4]]

    def change(number: int, left: list[str]) -> Batch:
        return Batch("1", number, [20, 30, 30, 40], False, left, *joined)

    def same(number: int, tokens: list[int]) -> Batch:
        return Batch("1", number, [40, 50], False, [], b"", [], tokens)

    assert engine(sent(change(8, ["b"]))) == [], "nothing is known yet"
    engine(sent(whole(7, [10, 20], roster, [5, 10], [5, 1])))
    assert engine(sent(change(8, ["b"]), same(10, []))) == [
        EngineStep("1", 8, 20, 30, ["a", "c"], [False, True], [1, 4], [5, 0]),
        EngineStep("1", 9, 30, 40, ["a", "c"], [False, False], [1, 1], [6, 4]),
        EngineStep("1", 10, 40, 50, ["a", "c"], [False, False], [1, 1], [7, 5]),
    ]
    assert engine(sent(same(12, []))) == [], "a step was lost"
    for wrong in (
        change(11, ["d"]),
        change(11, []),  # c is there already
        same(11, [1]),
    ):
        with pytest.raises(RequestRejected):
            engine(sent(wrong))
        assert engine(sent(same(12, []))) == [], "nor from one that is wrong"
        engine(sent(whole(10, [40, 50], *joined)))


def test_a_packet_of_another_version_is_rejected_with_both_versions():
    with pytest.raises(RequestRejected, match="of version 2, and this process reads 1"):
        unpack(msgpack.packb(("zeus", 2)) + pack(Finish("1", "a")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        pack(Finish("1", "a")),
        packet([]),
        sent(Finish("1", "a")) + b"\x93",
        sent(Finish("1", "a"), Finish("1", 5)),
        sent(EngineStep("1", 7, 30, 20, [], [], [], [])),
        sent(EngineStep("1", 7, -1, 20, [], [], [], [])),
        sent(EngineStep("1", 7, 10, 2**63, [], [], [], [])),
        sent(EngineStep("1", 7, 10, 20, ["a"], [True], [1e10], [0])),
        sent(Arrival("1", "a", 2**63, 1)),
        sent(EngineStep("1", 7, 10, 20, ["a"], [True], [-1], [0])),
        sent(EngineStep("1", 7, 10, 20, ["a"], [True], [math.nan], [0])),
        sent(EngineStep("1", 7, 10, 20, ["a", "a"], [True] * 2, [1] * 2, [0] * 2)),
        sent(EngineStep("1", 7, 10, 20, ["a"], [True], [1, 2], [0])),
        sent(EngineStep(1, 7, 10, 20, [], [], [], [])),
        sent(whole(7, [10, 20], pack_request("a", 5), [0], [1])),
        sent(whole(7, [10, 20], pack_request("a", 5) * 2, [1] * 2, [1] * 2)),
        sent(whole(7, [10, 20], pack_request("a", 5), [1, 2], [1, 2])),
        sent(whole(7, [10, 20], b"\x05", [], [])),
        sent(whole(7, [10, 20], "", [], [])),
        sent(whole(7, [], pack_request("a", 5), [1], [1])),
        sent(whole(7, [10, 20, 20], pack_request("a", 5), [1], [1])),
        sent(whole(7, [10, 20] * 1001, pack_request("a", 5), [1], [1])),
        sent(whole(7, 5, pack_request("a", 5), [1], [1])),
        sent(EngineStep("1", 7, 10, 20, ["a"], [True], ["1"], [0])),
        sent(whole(7, [10, 20], pack_request("a", "5"), [1], [1])),
        sent(whole(7, [20, 10], pack_request("a", 5), [1], [1])),
        sent(Finish("1", 5)),
        sent(Arrival("1", "a", 5, -1)),
        sent(Owner("a", None)),
    ],
)
def test_an_invalid_message_is_rejected(data):
    with pytest.raises(RequestRejected):
        unpack(data)


def test_random_bytes_are_rejected():
    generator = random.Random(seeds.fresh())
    for _ in range(500):
        data = packet([generator.randbytes(generator.randrange(60))])
        try:
            unpack(data)
        except RequestRejected:
            continue


def test_a_recorder_continues_without_a_listener_and_finds_it_later(tmp_path, monkeypatch):
    path = str(tmp_path / "steps.sock")
    recorder = Recorder(path=path)
    recorder.step(0, 1, ["a"], [True], [1], [0])
    assert (recorder.sent, recorder.dropped) == (0, 1)

    monkeypatch.setattr(recorder_module, "RETRY_S", 0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        recorder.step(1, 2, ["a"], [False], [1], [1])
        recorder.finish("a")
        engine, _ = listener.accept()
        with engine:
            assert isinstance(unpack(engine.recv(9999))[0], EngineStep)
            assert unpack(engine.recv(9999)) == [Finish("0", "a")]
            while recorder.dropped == 1:  # never waits: a full buffer drops
                recorder.step(2, 3, ["a"], [False], [1], [1])
    recorder.step(2, 3, ["a"], [False], [1], [1])  # the listener is gone
    recorder.step(2, 3, ["a"], [False], [object()], [1])
    assert recorder.dropped == 4
    recorder.close()
    recorder.step(2, 3, ["a"], [False], [1], [1])


def test_a_recorder_sends_steps_of_the_same_requests_together(tmp_path):
    path = str(tmp_path / "steps.sock")
    roster = pack_request("a", 5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        recorder = Recorder(path=path, hold=True)
        recorder.batch(90 * MS, 100 * MS, [], roster, [5], [5], whole=True)  # sent at once
        for begin in (100, 104, 108, 112, 116):  # the last of them ends 20 ms later
            recorder.batch(begin * MS, (begin + 4) * MS)
        recorder.batch(120 * MS, 145 * MS)  # a long one does not wait
        recorder.batch(145 * MS, 150 * MS)
        recorder.finish("a")  # does not overtake a step
        recorder.batch(150 * MS, 155 * MS, ["a"], pack_request("b", 5), [6], [1])
        recorder.close()
        engine, _ = listener.accept()
        with engine:
            unpack, packets = Unpacker(), []
            while data := engine.recv(9999):
                packets.append(unpack(data))

    assert [len(messages) for messages in packets] == [1, 5, 1, 3]
    assert packets[3][1] == Finish("0", "a")
    steps = [one for messages in packets for one in messages if isinstance(one, EngineStep)]
    assert [one.number for one in steps] == list(range(1, 10))
    assert [one.context for one in steps] == [[0], [5], [6], [7], [8], [9], [10], [11], [5]]
    assert [one.begin_ns // MS for one in steps] == [90, 100, 104, 108, 112, 116, 120, 145, 150]


def test_a_listener_that_missed_a_step_is_to_get_a_whole_one(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.0)
    path = str(tmp_path / "steps.sock")
    recorder = Recorder(path=path)
    roster = pack_request("a", 5)

    def step(*, whole: bool = False) -> bool:
        """Sends one; returns whether the next one is to be whole."""
        rows = ([], roster, [1], [1]) if whole else ()
        recorder.batch(0, 1, *rows, whole=whole)
        return recorder.starts

    assert not step(), "nobody listens"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        assert [step(), step(), step(whole=True), step()] == [True, True, False, False]
        for wrong in ((roster, [object()], [1]), (pack_request("b" * 200_000, 5), [1], [1])):
            recorder.batch(0, 1, [], *wrong)  # cannot be packed, or received
            assert recorder.starts
            assert not step(whole=True)
        while not step():  # until its buffer is full
            pass
        assert step(whole=True), "it was not sent"
        engine, _ = listener.accept()
        with engine:
            unpack, numbers = Unpacker(), []
            for _ in range(recorder.sent):
                numbers += [one.number for one in unpack(engine.recv(9999))]
            assert numbers == [4, 5, 7, *range(9, 9 + len(numbers) - 3)]
            assert [step(whole=True), step()] == [False, False]
            assert [one.number for one in unpack(engine.recv(9999))] == [recorder.number - 1]
    assert not step(), "it is gone"


def test_a_second_listener_leaves_the_first_its_socket(tmp_path):
    path = str(tmp_path / "steps.sock")
    found = []

    def take(message):
        found.append(message)
        return True

    first = Receiver(path, take)
    with pytest.raises(OSError, match="Address already in use") as caught:
        Receiver(path, take)
    assert caught.value.filename == path
    Recorder(path=path).finish("a")
    first.receive()
    assert found == [Finish("0", "a")]

    os.unlink(path)
    second = Receiver(path, take)
    first.close()
    Recorder(path=path).finish("b")
    second.receive()
    assert found[1:] == [Finish("0", "b")]

    second.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(path)
        killed.listen()
    Receiver(path, take).close()
    assert not os.path.exists(path)


def test_steps_of_another_clock_and_of_unknown_engines_are_named(tmp_path, caplog):
    path = str(tmp_path / "steps.sock")
    ledgers = {"0": Ledger(["x"])}
    service = Service(path, ledgers, FakeSensors())
    recorder, other = Recorder(path=path), Recorder("1", path)
    for now in (time.time_ns(), time.monotonic_ns()):
        for _ in range(2):
            recorder.step(now - 2, now - 1, ["a"], [False], [1], [1])
            other.step(now - 2, now - 1, ["b"], [False], [1], [1])
    service.receiver.receive()
    assert ledgers["0"].tokens["decode"] == 2
    assert service.receiver.rejected == 6
    assert [record.message for record in caplog.records] == [
        "steps that end in the future are ignored; their times must be of CLOCK_MONOTONIC "
        "(time.monotonic_ns)",
        "steps of engine '1' are ignored; name its GPUs with --engine 1=GPU,GPU",
    ]
    service.receiver.close()


def test_two_processes_are_not_taken_for_one_engine(tmp_path, caplog):
    path = str(tmp_path / "steps.sock")
    found = []
    receiver = Receiver(path, lambda message: found.append(message.ids[0]) or True)
    first, second = Recorder(path=path), Recorder(path=path)

    def step(recorder: Recorder, name: str) -> list[str]:
        recorder.step(0, 1, [name], [False], [1], [1])
        receiver.receive()
        return found

    assert step(first, "a") == ["a"]
    assert step(second, "b") == step(second, "b") == ["a"]
    assert step(first, "c") == ["a", "c"]
    assert [record.message for record in caplog.records] == [
        "steps of a second engine '0' are ignored; give each engine its own socket "
        "(ZEUS_SERVING_SOCKET)"
    ]
    first.close()
    receiver.receive()
    assert step(second, "d") == ["a", "c", "d"], "as an engine that was restarted"
    receiver.close()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_listener_removes_nothing_but_a_socket_left_behind(tmp_path, kind):
    path = tmp_path / "steps.sock"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "file":
            path.touch()
        else:  # another program's, such as zeusd's
            other.bind(str(path))
            other.listen()
        with pytest.raises(OSError, match="Address already in use"):
            Receiver(str(path), lambda message: True)
    assert path.exists()
    with pytest.raises(OSError, match="too long"):
        Receiver("/" + 200 * "x", lambda message: True)


# ------------------------------------------------------------------------------------------ meter


def test_a_meter_adds_gpus_on_the_updates_of_the_first():
    meter = Meter(["x", "y"])
    for n in range(11):
        seen_ns = 25 * MS if n < 6 else None  # zeusd learns that the counter can be used
        meter.sample(published("x", n * 100 * MS, 5_000_000 * n, n, 1500, seen_ns))
    for n in range(12):
        meter.sample(published("y", n * 90 * MS + 50 * MS, 900_000 * n, n, 1500))

    found = meter.updates()

    assert found is not None
    assert found.begin_ns.tolist() == [n * 100 * MS for n in range(1, 10)]
    assert found.end_ns.tolist() == [n * 100 * MS for n in range(2, 11)]
    assert found.joules == pytest.approx([6.0] * 9)
    assert (found.end_ns - found.seen_begin_ns).tolist() == 4 * [25 * MS] + 5 * [100 * MS]
    assert (found.clock_mhz == 1500).all()
    assert meter.updates() is None


def test_a_restart_of_zeusd_leaves_a_gap_and_counts_nothing_twice():
    meter = Meter(["x"])
    for n in range(5):
        meter.sample(published("x", n * 100 * MS, 1_000_000 * n, n, None))
    first = meter.updates()
    for n in range(5):
        meter.sample(published("x", 2000 * MS + n * 100 * MS, 1_000_000 * n, n, None))
    meter.sample(published("x", 2100 * MS, 9_000_000, 9, None))  # late: already known
    second = meter.updates()

    assert first is not None
    assert second is not None
    assert first.joules.sum() + second.joules.sum() == pytest.approx(8.0)
    assert second.begin_ns[0] == 2000 * MS
    assert np.isnan(first.clock_mhz).all()


# ----------------------------------------------------------------------------------------- ledger


def _tell(
    ledger: Ledger, served, *, lose: range = range(0), gap: range = range(0), poll: bool = True
) -> None:
    steps, updates = served.steps, served.updates
    energy_uj = 0
    ends = np.full(len(served.names), -1)
    ends[steps.request] = steps.step_of_row
    following = 0
    for n in range(steps.count):
        if n not in lose:
            ledger.step(step_of(steps, served.names, n))
        for one in steps.request[steps.first_row[n] : steps.first_row[n + 1]]:
            if ends[one] == n:
                ledger.finish(served.names[one], "t")
        while following < updates.count and updates.end_ns[following] <= steps.end_ns[n]:
            energy_uj += round(updates.joules[following] * 1e6)
            if following not in gap:
                ledger.sample(
                    published("x", int(updates.end_ns[following]), energy_uj, following, None)
                )
            following += 1
        if poll and n % 100 == 0:
            ledger.poll(int(steps.end_ns[n]))


def test_a_ledger_answers_provisionally_and_then_finally():
    served = serve(seeds.fresh(), seconds=50)
    ledger = Ledger(["x"])
    _tell(ledger, served)
    early = [ledger.energy(name) for name in served.names]
    before = ledger.phases
    rows = ledger.settle().rows

    assert any(row is not None and row.provisional and not row.refused for row in early)
    late = ledger.energy(served.names[0])
    assert late is not None
    assert not late.provisional
    totals = ledger.totals
    parts = totals.requests_j + totals.idle_j + totals.unattributed_j
    assert parts == pytest.approx(totals.measured_j)
    assert sum(row.joules for row in rows) == pytest.approx(totals.requests_j)
    after = ledger.phases
    assert all(after[phase] >= before[phase] for phase in before)
    assert sum(after.values()) == pytest.approx(totals.requests_j + totals.idle_j, rel=0.05)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("request_id", ["cmpl-a-0", "cmpl-a-1", "1_cmpl-a-0", "chat", "0_chat"])
def test_the_owner_of_a_request_covers_all_its_sequences(request_id, late):
    ledger = Ledger(["x"])

    def own() -> None:
        for name in ("cmpl-a-0", "chat"):
            ledger.take(Owner(name, "search", "task"))

    if not late:
        own()
    ledger.step(EngineStep("0", 1, 0, 10 * MS, [request_id, "other"], [True] * 2, [5] * 2, [0] * 2))
    for name in (request_id, "other"):
        ledger.finish(name)
    if late:  # a busy ledger read the front end's messages after those of the engine
        own()

    assert {row.request: (row.tenant, row.group) for row in ledger.settle().rows} == {
        request_id: ("search", "task"),
        "other": ("", ""),
    }


def test_idle_energy_is_counted_before_its_hour_is_settled():
    ledger = Ledger(["x"])
    for n in range(41):
        ledger.sample(published("x", n * 100 * MS, 1_000_000 * n, n, None))
    for number, begin in enumerate((0, 8, 1000), 1):  # two close together, one later
        begin_ns = begin * MS
        ledger.step(EngineStep("0", number, begin_ns, begin_ns + 5 * MS, ["a"], [False], [1], [5]))
    ledger.poll(6000 * MS)

    assert ledger.phases["idle"] == pytest.approx(38.0)  # of 40 updates two have a step in them
    ledger.settle()
    assert ledger.phases["idle"] >= 38.0


def test_lost_steps_refuse_the_requests_beside_them():
    served = serve(seeds.fresh(), seconds=120, rate=1)
    middle = served.steps.count // 2
    ledger = Ledger(["x"])
    _tell(ledger, served, lose=range(middle, middle + 3))
    rows = ledger.settle().rows[1:]  # the first may be over before the first sensor update

    assert {row.reason for row in rows if row.refused} == {"3 steps were not received"}
    totals = ledger.totals
    parts = totals.requests_j + totals.idle_j + totals.unattributed_j
    assert parts == pytest.approx(totals.measured_j)


def test_a_ledger_without_zeusd_continues_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(digest_module, "KEPT_NS", 120 * 10**9)
    served = serve(seeds.fresh(), seconds=200, rate=0.5)
    ledger = Ledger(["x"])
    _tell(ledger, served, gap=range(10**9))

    waiting = ledger.digest.steps
    assert sum(part.count for part in waiting) < 123 * 100
    rows = ledger.settle().rows

    assert all(row.refused for row in rows)
    assert ledger.totals.measured_j == 0


def test_weights_survive_and_shorten_the_start(tmp_path):
    path = tmp_path / "state" / "weights.json"
    assert StoredWeights.read(path).weights == StoredWeights.read(None).weights == {}
    ledger = Ledger(["x"])
    _tell(ledger, serve(seeds.fresh(), seconds=50))
    ledger.settle()
    assert ledger.weights
    StoredWeights(weights={"H100|1|m": ledger.weights, "H100|1|other": {1980.0: [1.0]}}).write(path)

    prior = StoredWeights.read(path).weights["H100|1|m"]
    assert prior == ledger.weights
    served = serve(seeds.fresh(), seconds=10)
    late = Ledger(["x"], prior=prior)
    _tell(late, served)
    rows = {row.request: row for row in late.settle().rows}
    errors = [
        abs(rows[name].joules / true - 1)
        for name, true in zip(served.names, served.true_j, strict=True)
        if not rows[name].refused
    ]
    assert np.median(errors) < 0.1

    for text in ("{", '{"version": 2, "weights": {"H100|1|m": {"1980": [1, null]}}}'):
        path.write_text(text)
        assert StoredWeights.read(path).weights == {}
    StoredWeights().write(tmp_path / "state" / "weights.json" / "no")  # logs, and continues


# ---------------------------------------------------------------------------------------- service


class FakeSensors:
    """Samples that a test hands over."""

    def __init__(self) -> None:
        self.samples: list[Sample | Shared] = []

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> list[Sample | Shared]:
        found, self.samples = self.samples, []
        return found


def test_requests_beside_another_tenant_are_refused(tmp_path):
    ledgers = {"0": Ledger(["x"], prior=PRIOR), "1": Ledger(["y"], prior=PRIOR)}
    sensors = FakeSensors()
    service = Service(str(tmp_path / "socket"), ledgers, sensors)
    begin_ns = time.monotonic_ns() - 60 * 10**9
    for n in range(400):
        at_ns = begin_ns + n * 100 * MS
        for number, (engine, gpu) in enumerate([("0", "x"), ("1", "y")]):
            name = f"{engine}-{n // 100}"
            step = EngineStep(engine, n + 1, at_ns, at_ns + 90 * MS, [name], [False], [1], [9])
            service.take(step)
            sensors.samples.append(published(gpu, at_ns + number, n * 10**6, n, None))
    for n in (12, 14):
        sensors.samples.append(("y", begin_ns + (n - 4) * 10**9, begin_ns + n * 10**9, "u5 and u7"))
    service.poll(time.monotonic_ns())

    rows = {row.request: row for one in ledgers.values() for row in one.settle().rows}

    assert {name: row.reason for name, row in rows.items()} == {
        **{f"0-{n}": "" for n in range(4)},
        "1-0": "u5 and u7",
        "1-1": "u5 and u7",
        "1-2": "",
        "1-3": "",
    }
    service.receiver.close()


def test_a_service_accounts_for_what_a_recorder_sends(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "POLL_S", 0.05)
    served = serve(seeds.fresh(), seconds=30, begin_ns=time.monotonic_ns() - 40 * 10**9)
    path = str(tmp_path / "steps.sock")
    sensors = FakeSensors()
    ledgers = {"0": Ledger(["x"], prior=PRIOR)}
    log = tmp_path / "requests.jsonl"
    service = Service(path, ledgers, sensors, log, "m")
    web = WebServer("127.0.0.1", 0, service.respond)
    thread = threading.Thread(target=service.run)
    thread.start()
    recorder = Recorder(path=path)
    steps, updates = served.steps, served.updates
    try:
        for n in range(steps.count):
            before = recorder.dropped
            while True:
                recorder.step(*step_of(steps, served.names, n)[2:])
                if recorder.dropped == before:
                    break
                before, recorder.number = recorder.dropped, recorder.number - 1
        for name in served.names:
            while not _sent(recorder, name):
                pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(path)
            other.send(b"nonsense")
        wait_for(lambda: service.receiver.rejected == 1, "the nonsense to be rejected")
        energy = np.cumsum(np.round(updates.joules * 1e6)).astype(int)
        sensors.samples = [
            published("x", int(t), int(uj), n, 1980)
            for n, (t, uj) in enumerate(zip(updates.end_ns, energy, strict=True))
        ]
        service.poll(time.monotonic_ns())
        with urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/energy/r5") as answer:
            assert json.load(answer)["joules"] > 0
        for path, status in (("energy/nobody", "404"), ("metrics", "501"), ("", "404")):
            with pytest.raises(urllib.error.HTTPError, match=status):
                urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/{path}")
        with urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/totals") as answer:
            assert json.load(answer)["0"]["measured_j"] == 0
    finally:
        service.stop()
        thread.join()
        web.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    totals = lines.pop()["settled"]
    assert {line["request"] for line in lines} == set(served.names)
    assert math.fsum(line["joules"] or 0 for line in lines) == pytest.approx(totals["requests_j"])
    assert totals["measured_j"] == pytest.approx(updates.joules[1:].sum(), rel=1e-5)
    assert not (tmp_path / "steps.sock").exists()


def _count_of(collector: EnergyCollector) -> float | None:
    return collector.registry.get_sample_value(
        "zeus_serving_request_energy_joules_count", {"engine": "0", "model_name": "m"}
    )


def test_a_name_that_is_used_again_is_of_another_request(tmp_path):
    served = serve(seeds.fresh(), seconds=50)
    steps = served.steps
    first, last = np.full(len(served.names), steps.count), np.zeros(len(served.names), np.int64)
    np.minimum.at(first, steps.request, steps.step_of_row)
    np.maximum.at(last, steps.request, steps.step_of_row)
    busy_until: list[int] = []  # by name
    for one in np.argsort(first, kind="stable"):
        name = next((n for n, end in enumerate(busy_until) if end < first[one]), len(busy_until))
        busy_until[name : name + 1] = [last[one]]
        served.names[one] = f"req_{name}"
    assert len(busy_until) < len(first) / 2
    ledger = Ledger(["x"], prior=PRIOR)
    collector = EnergyCollector("m", ledgers := {"0": ledger})
    service = Service(str(tmp_path / "socket"), ledgers, FakeSensors(), collector=collector)

    _tell(ledger, served, poll=False)
    service.poll(int(steps.end_ns[-1]) + 10**10)

    count = _count_of(collector)
    assert count is not None
    ends_ns, sampled_ns = steps.end_ns[last], served.updates.end_ns
    covered = ends_ns <= sampled_ns[sampled_ns <= steps.end_ns[-1]].max()
    assert covered.sum() <= count <= len(first)
    rows = {(row.request, row.begin_ns): row.joules for row in ledger.settle().rows}
    begins = steps.begin_ns[first].tolist()
    joules = [rows[key] for key in zip(served.names, begins, strict=True)]
    assert np.nanmean(np.abs(joules / served.true_j - 1)) < 0.05
    service.receiver.close()


def test_a_request_is_counted_once_with_its_first_figure(tmp_path, monkeypatch):
    served = serve(seeds.fresh(), seconds=50)
    ledger = Ledger(["x"])
    collector = EnergyCollector("m", ledgers := {"0": ledger})
    service = Service(str(tmp_path / "socket"), ledgers, FakeSensors(), collector=collector)

    def counted() -> tuple[float | None, int]:
        service.poll(int(served.steps.end_ns[-1]) + 10**10)
        known = [row for one in served.names if (row := ledger.energy(one)) and not row.refused]
        return _count_of(collector), len(known)

    _tell(ledger, served, poll=False)
    with monkeypatch.context() as early:
        early.setattr(fit_module, "LEAST_UPDATES", 10**6)  # as in a server's first minute
        assert counted() == (0, 0)
    monkeypatch.setattr(ledger_module, "PERIOD_NS", 0)  # settles at each poll
    for _ in range(2):
        count, known = counted()
        assert count == known > 0
    service.receiver.close()


def test_lines_that_cannot_be_written_follow_later_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "PERIOD_NS", 0)  # settles at each poll
    log = tmp_path / "later" / "requests.jsonl"
    ledgers = {"0": Ledger(["x"])}
    service = Service(str(tmp_path / "socket"), ledgers, FakeSensors(), log, "m" * 400)

    def settlements() -> int:
        service.poll(time.monotonic_ns())
        text = log.read_text() if log.exists() else ""
        assert all("settled" in json.loads(line) for line in text.splitlines())
        return text.count("\n")

    assert settlements() == 0
    log.parent.mkdir()
    assert settlements() == 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 100, limits[1]))
    try:
        assert settlements() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert settlements() == 4
    service.receiver.close()


def test_what_cannot_be_used_is_named_at_once(tmp_path, monkeypatch):
    socket_path = str(tmp_path / "socket")
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        run(socket=socket_path, listen="localhost")
    with pytest.raises(ValueError, match="is not the absolute path of a socket"):
        Receiver("nonsense", lambda message: True)
    with running_daemon("--simulate", "v100-pcie", gpus=1) as daemon, socket.socket() as taken:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        log, listen = tmp_path / "no" / "log.jsonl", f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FileNotFoundError) as caught:
            run(socket=socket_path, log_path=log)
        assert caught.value.filename == str(log)
        with pytest.raises(ValueError, match="must be a URL"):
            run(socket=socket_path, otlp="localhost:4318")
        with pytest.raises(ValueError, match="'' is not the absolute path"):
            run(socket="")
        with pytest.raises(OSError, match="Address already in use") as busy:
            run(socket=socket_path, listen=listen)
        assert busy.value.filename == listen


def _sent(recorder: Recorder, name: str) -> bool:
    before = recorder.dropped
    recorder.finish(name)
    return recorder.dropped == before


def test_metrics_are_by_engine_and_never_by_request():
    served = serve(seeds.fresh(), seconds=50)
    ledger, registry = Ledger(["x"]), prometheus.CollectorRegistry()
    _tell(ledger, served)
    collector = EnergyCollector("m", {"0": ledger, "1": Ledger(["y"])}, registry)
    collector.finished("0", ledger.settle().rows)

    text = prometheus.generate_latest(registry).decode()

    labels = '{engine="0",model_name="m",phase="idle"}'
    assert f"zeus_serving_energy_joules_total{labels}" in text
    for engine in "01":
        assert (
            f'zeus_serving_tokens_total{{engine="{engine}",kind="decode",model_name="m"}}' in text
        )
    assert text.count("# TYPE zeus_serving_tokens_total") == 1
    assert _count_of(collector) == sum(
        not row.refused for row in [ledger.energy(n) for n in served.names]
    )
    assert 'zeus_serving_fit_residual_ratio{engine="0",model_name="m"}' in text
    assert "r5" not in text


def test_the_dashboard_asks_for_metrics_that_there_are():
    registry = EnergyCollector("m", {"0": Ledger(["x"])}).registry
    text = prometheus.generate_latest(registry).decode()
    named = re.findall(r"^(?:# HELP )?(zeus_serving_\w+)", text, re.MULTILINE)

    file = Path(__file__).parents[3] / "examples" / "monitoring" / "grafana-serving.json"
    panels = json.loads(file.read_text())["panels"]

    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"zeus_serving_\w+", target["expr"])
    }
    assert len(panels) == 6
    assert len(asked) == 4
    assert asked <= set(named)


def test_an_engine_shows_the_ledgers_metrics_as_its_own(tmp_path, monkeypatch):
    ledgers = {"0": Ledger(["x"])}
    collector = EnergyCollector("m", ledgers)
    service = Service(str(tmp_path / "socket"), ledgers, FakeSensors(), collector=collector)
    web = WebServer("127.0.0.1", 0, service.respond)
    engines = prometheus.CollectorRegistry()
    monkeypatch.setattr(metrics_module, "EVERY_S", 0.2)
    relay = register(f"http://127.0.0.1:{web.server_port}", engines)
    try:
        assert relay is not None
        wait_for(lambda: b"zeus_serving_tokens_total" in prometheus.generate_latest(engines), "it")
        assert register(f"http://127.0.0.1:{web.server_port}", engines) is None
        web.close()
        wait_for(lambda: not prometheus.generate_latest(engines), "an end of what is unknown")
    finally:
        relay.close()
        service.receiver.close()
