"""Reads outside the core: concurrent ones are one call, and recent values are reused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeusd.core.world import GPU0, GPU1, World
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.replies import (
    EnergyReading,
    GpuProcesses,
    GpuState,
    PowerReading,
    ProcessInfo,
    SupportedClocks,
    WindowEnergies,
)
from zeus_ipc.requests import request_adapter
from zeus_ipc.wire import Message
from zeusd.core.effects import Read, ReadingMade
from zeusd.runtime.historian import LookUp
from zeusd.runtime.reads import PROCESSES_NS, Reads

PERIOD_NS = 20_000_000


class Scene:
    """`Reads`, with workers, a sampler and a clock that a test controls."""

    def __init__(self) -> None:
        self.world = World(limits_mw=(300_000, 300_000))
        self.now_ns = 1_000_000_000
        self.timers: list[tuple[int, Any]] = []
        self.calls: list[Read] = []
        self.look_ups: list[LookUp] = []
        self.replies: list[tuple[int, dict[str, Any]]] = []
        self.reads = Reads(
            self.world.core,
            self,  # the reactor's part
            self,  # the sampler's part
            self.calls.append,
            lambda conn, body: self.replies.append((conn, decode_reply(encode(body)))),
            clock_ns=lambda: self.now_ns,
        )
        self.world.connect(1, uid=65534)

    def call_later(self, delay_s: float, callback: Any) -> None:
        self.timers.append((self.now_ns + int(delay_s * 1e9), callback))

    def period_ns(self, name: str) -> int:
        return PERIOD_NS

    def limited_ms(self, name: str) -> dict[str, int]:
        return {"power": 400}

    def energy_scope(self, name: str) -> str:
        return "gpu"

    def sample_ns(self) -> int:
        return self.now_ns

    def look_up(self, look_up: LookUp) -> None:
        self.look_ups.append(look_up)

    def ask(self, op: str, conn: int = 1, number: int = 7, **arguments: Any) -> None:
        message = {"v": 1, "id": number, "op": op, **arguments}
        request = request_adapter.validate_python(message)
        assert Reads.serves(request)
        self.reads.request(conn, request)

    def state(self, *gpus: str, **arguments: Any) -> None:
        self.ask("state", gpus=list(gpus or (GPU0,)), **arguments)

    def finish(self, power_mw: int = 5) -> None:
        """The oldest call returns."""
        call = self.calls.pop(0)
        self.reads.done(call.ticket, _read(call.reading, power_mw))

    def advance(self, ns: int) -> None:
        self.now_ns += ns
        due = [one for one in self.timers if one[0] <= self.now_ns]
        self.timers = [one for one in self.timers if one[0] > self.now_ns]
        for _, timer in due:
            timer()


def _read(reading: ReadingMade, power_mw: int) -> Message:
    """A worker's answer."""
    processes = [
        ProcessInfo(pid=uid, uid=uid, command="x", job="7", memory_mib=1, compute=True)
        for uid in (65534, 1)
    ]
    unknown = [
        name
        for name, one in GpuState.model_fields.items()
        if one.is_required() and name not in ("t_ns", "power_mw")
    ]
    answers: dict[ReadingMade, Message] = {
        ReadingMade.STATE: GpuState(t_ns=1, power_mw=power_mw, **dict.fromkeys(unknown)),
        ReadingMade.ENERGY: EnergyReading(t_ns=1, energy_mj=1),
        ReadingMade.POWER: PowerReading(
            t_ns=1, instant_mw=power_mw, average_mw=None, memory_average_mw=None
        ),
        ReadingMade.CLOCKS: SupportedClocks(memory_mhz=[], gpu_mhz={}),
        ReadingMade.PROCESSES: GpuProcesses(t_ns=1, processes=processes),
    }
    return answers[reading]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_anyone_may_read(scene: Scene) -> None:
    scene.state()
    scene.finish(17)
    ((conn, reply),) = scene.replies
    state = reply["result"]["gpus"][GPU0]
    assert (conn, reply["id"], state["power_mw"]) == (1, 7, 17)
    assert state["locked_gpu_clocks_mhz"] is None


def test_equal_readings_at_the_same_time_are_one(scene: Scene) -> None:
    for op in ("state", "energy", "power", "clocks", "processes"):
        for number in range(10):
            scene.ask(op, number=number, gpus=[GPU0])
        assert len(scene.calls) == 1
        scene.finish()
        assert [reply["id"] for _, reply in scene.replies] == list(range(10))
        scene.replies.clear()


def test_a_state_is_as_good_as_new_for_two_update_periods(scene: Scene) -> None:
    scene.state()
    scene.finish(17)
    scene.now_ns += 2 * PERIOD_NS - 1
    scene.state()
    assert scene.calls == []
    assert scene.replies[-1][1]["result"]["gpus"][GPU0]["power_mw"] == 17
    scene.now_ns += 1
    scene.state()
    assert len(scene.calls) == 1


def test_a_state_from_before_a_write_counts_no_more(scene: Scene) -> None:
    scene.state()
    scene.finish(17)
    scene.reads.written(GPU0)
    scene.state()
    assert len(scene.calls) == 1, "what was known is not the answer"
    scene.reads.written(GPU0)
    scene.state(number=8)
    assert len(scene.calls) == 2, "nor is a reading that was under way"
    scene.finish(1)
    scene.state(number=9)
    scene.finish(2)
    found = {reply["id"]: reply["result"]["gpus"][GPU0]["power_mw"] for _, reply in scene.replies}
    assert (found[8], found[9]) == (2, 2)


def test_processes_are_listed_once_a_second_during_any_write(scene: Scene) -> None:
    scene.ask("processes", gpus=[GPU0])
    scene.finish()
    scene.reads.written(GPU0)
    scene.now_ns += PROCESSES_NS - 1
    scene.ask("processes", gpus=[GPU0])
    assert scene.calls == []
    scene.now_ns += 1
    scene.ask("processes", gpus=[GPU0])
    assert len(scene.calls) == 1


def test_which_process_it_is_concerns_its_own_user_and_administrators(scene: Scene) -> None:
    scene.world.connect(2, uid=0, on_host=True)
    for conn in (1, 2):
        scene.ask("processes", conn=conn, gpus=[GPU0])
    scene.finish()
    user, root = (reply["result"]["gpus"][GPU0]["processes"] for _, reply in scene.replies)
    who = ("uid", "pid", "command", "job")
    assert [[one[name] for name in who] for one in user] == [
        [65534, 65534, "x", "7"],
        [1, None, None, None],
    ]
    assert [one["pid"] for one in root] == [65534, 1]


def test_other_readings_are_never_old(scene: Scene) -> None:
    for op in ("energy", "power"):
        for _ in range(2):
            scene.ask(op, gpus=[GPU0])
            assert len(scene.calls) == 1
            scene.finish()


def test_locked_clocks_are_of_now_and_not_of_the_reading(scene: Scene) -> None:
    scene.state()
    scene.world.call(1, "set", gpus=[GPU0], control="gpu_clocks", value=[500, 900])
    scene.finish()
    state = scene.replies[-1][1]["result"]["gpus"][GPU0]
    assert state["locked_gpu_clocks_mhz"] == [500, 900]


def test_a_gpu_that_does_not_answer_costs_the_others_nothing(scene: Scene) -> None:
    scene.state(GPU0, GPU1, deadline_ns=scene.now_ns + 1_000_000_000)
    scene.calls.reverse()
    scene.finish(17)
    scene.advance(900_000_000)
    assert scene.replies == []
    scene.advance(200_000_000)
    gpus = scene.replies[0][1]["result"]["gpus"]
    assert gpus[GPU0]["error"]["code"] == "deadline_exceeded"
    assert gpus[GPU1]["power_mw"] == 17
    scene.finish()
    assert len(scene.replies) == 1
    assert scene.timers == []


def test_each_request_expires_at_its_own_deadline_and_one_without_never(scene: Scene) -> None:
    scene.state(number=1)
    assert scene.timers == []
    for number, delay_ns in ((2, 50_000_000), (3, 10_000_000), (4, 90_000_000)):
        scene.state(number=number, deadline_ns=scene.now_ns + delay_ns)
    assert len(scene.timers) == 2  # the last one is looked at when the earlier ones are over
    expired = []
    for _ in range(100):
        scene.advance(1_000_000)
        expired.append([reply["id"] for _, reply in scene.replies])
    assert [expired[at] for at in (9, 10, 49, 50, 89, 90)] == [
        [], [3], [3], [3, 2], [3, 2], [3, 2, 4]
    ]  # fmt: skip
    scene.finish(17)
    assert scene.replies[-1][1]["id"] == 1
    assert scene.timers == []


def test_requests_of_one_connection_are_bounded_and_its_end_frees_them(scene: Scene) -> None:
    scene.world.connect(2)
    for number in range(65):
        scene.state(number=number)
    assert [(body["id"], body["error"]["code"]) for _, body in scene.replies] == [
        (64, "overloaded")
    ]
    scene.state(conn=2)
    scene.reads.closed(1)
    scene.finish()
    assert [conn for conn, _ in scene.replies[1:]] == [2]
    for number in range(64):
        scene.state(number=number, conn=1)
    assert all("error" not in body for _, body in scene.replies[1:])


def test_late_unknown_or_unreachable_requests_fail_at_once(scene: Scene) -> None:
    scene.state(deadline_ns=scene.now_ns - 1)
    assert scene.replies[-1][1]["error"]["code"] == "deadline_exceeded"
    scene.state("GPU-x")
    assert scene.replies[-1][1]["result"]["gpus"]["GPU-x"]["error"]["code"] == "unknown_gpu"
    scene.ask("windows", sources=["GPU-x"], windows=[])
    assert scene.replies[-1][1]["result"]["sources"]["GPU-x"]["error"]["code"] == "unknown_gpu"
    scene.world.core.node.quiesced_ns = 1
    scene.state()
    assert scene.replies[-1][1]["result"]["gpus"][GPU0]["error"]["code"] == "quiesced"
    assert scene.calls == []


def test_windows_of_several_gpus_are_one_look_up(scene: Scene) -> None:
    scene.world.core.node.owner_of = {65534: 1000}.__getitem__  # subordinate uids share a turn
    scene.ask("windows", sources=[GPU0, GPU1], windows=[1, 2, 0])
    (look_up,) = scene.look_ups
    assert (look_up.names, look_up.user) == ((GPU0, GPU1), 1000)
    for name in look_up.names:
        look_up.results[name] = WindowEnergies(
            energy_uj=[5], uncertainty_uj=[1], begins_ns=0, tick_ns=1
        )
    look_up.done(look_up)
    sources = scene.replies[-1][1]["result"]["sources"]
    assert {name: one["energy_uj"] for name, one in sources.items()} == {GPU0: [5], GPU1: [5]}


def test_a_reply_reports_what_failed_unasked(scene: Scene) -> None:
    scene.world.ask(1, "set", gpus=["GPU-x"], control="power_limit", value=[1], block=False)
    scene.state()
    scene.finish()
    assert scene.replies[-1][1]["deferred"]["count"] == 1
    scene.ask("energy", gpus=[GPU0])
    scene.finish()
    assert "deferred" not in scene.replies[-1][1]


def test_while_leases_are_kept_for_the_next_zeusd_nobody_is_answered(scene: Scene) -> None:
    scene.world.apply(scene.world.core.stop(scene.now_ns, restore=False))
    scene.state()
    assert (scene.calls, scene.replies) == ([], [])
