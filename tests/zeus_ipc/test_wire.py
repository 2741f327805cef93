"""Messages, codec and errors: what both sides must agree on."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
from collections.abc import Callable
from itertools import islice
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import msgpack
import numpy as np
import pynvml
import pytest
from pydantic import ValidationError

from tests import seeds
from zeus_ipc import Client, __version__, errors, replies
from zeus_ipc.codec import decode_request, encode, id_of
from zeus_ipc.controls import AMD_PROFILES, PROFILES, SPECS, Control
from zeus_ipc.diagnosis import unreachable
from zeus_ipc.limited import cause, cause_text
from zeus_ipc.operations import OPERATIONS
from zeus_ipc.parsing import Malformed
from zeus_ipc.replies import ErrorBody, Sample, UsageSum
from zeus_ipc.requests import NO_END_NS, NOBODY, Request, SetControl, request_adapter
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH, socket_path
from zeus_ipc.stream import SampleStream
from zeus_ipc.wire import MAX_REQUEST_BYTES, PROTOCOL_VERSION, Message

ARGUMENTS: dict[str, dict[str, object]] = {
    "state": {"gpus": ["GPU-1"]},
    "energy": {"gpus": ["GPU-1"]},
    "power": {"gpus": ["GPU-1"]},
    "clocks": {"gpus": ["GPU-1"]},
    "processes": {"gpus": ["GPU-1"]},
    "windows": {"sources": ["GPU-1", "cpu:0"], "windows": [1, 2, 0, 2, 3, 1]},
    "timeline": {"sources": ["GPU-1"], "domain": "average_power", "start_ns": 1, "end_ns": 2},
    "set": {"gpus": ["GPU-1"], "control": "gpu_clocks", "value": [600, 900]},
    "allocate": {"gpus": ["GPU-1"], "name": "ml/train-0", "kind": "pod", "uid": 1000, "weight": 2},
    "deallocate": {"name": "1234", "run": "sEKNKTV3WPV500"},
    "usage": {"edges": [0, 900], "by": "job", "uid": 1000, "name": "1234"},
    "forget_user": {"uid": 1000},
    "set_ceiling": {"gpus": ["GPU-1"], "name": "fleet", "value": [200_000]},
    "publish_profile": {"gpus": ["GPU-1"], "limits_mw": [100_000, 200_000], "progress": [0.5, 1.0]},
    "reset": {"gpus": ["GPU-1"], "control": "gpu_clocks"},
    "acquire": {"gpus": ["GPU-1"], "controls": ["power_limit"]},
    "release": {"whose": "user", "pids": [7], "job": "1234"},
    "restore": {"gpus": ["GPU-1"], "controls": ["gpu_clocks"]},
    "persist": {"gpus": ["GPU-1"], "controls": ["power_limit"]},
    "audit": {"after": 3, "before": 9, "limit": 5},
}


def test_the_registry_has_every_request() -> None:
    assert [one.request for one in OPERATIONS.values()] == [*get_args(Request)]


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_survives_the_wire(op: str) -> None:
    message = {"v": 1, "id": 3, "op": op, **ARGUMENTS.get(op, {})}
    request = request_adapter.validate_python(decode_request(encode(message)))
    assert request.op == op
    assert request.id == 3
    for name, value in ARGUMENTS.get(op, {}).items():
        assert getattr(request, name) == value


DEFAULTS: dict[str, dict[str, object]] = {
    "timeline": {"domain": "power", "end_ns": NO_END_NS, "limit": 4096},
    "set": {"block": True},
    "reset": {"block": True},
    "release": {"whose": "process"},
    "set_ceiling": {"control": "power_limit"},
    "allocate": {"kind": "job", "uid": NOBODY},
    "deallocate": {"kind": "job"},
    "usage": {"by": "user", "device": "gpu"},
    "audit": {"before": 2**62, "limit": 50},
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_is_omitted_is_zero_or_none_except_here(op: str) -> None:
    """Clients in other languages rely on it."""
    fields = OPERATIONS[op].request.model_fields
    omitted = {name: one.default for name, one in fields.items() if not one.is_required()}
    assert omitted.pop("v") == PROTOCOL_VERSION
    assert omitted.pop("op") == op
    assert {name: value for name, value in omitted.items() if value} == DEFAULTS.get(op, {})


def test_what_a_reply_omits_is_zero_or_none_except_here() -> None:
    kinds = [one for one in vars(replies).values() if isinstance(one, type)]
    omitted = {
        f"{kind.__name__}.{name}": one.default
        for kind in kinds
        if issubclass(kind, Message)
        for name, one in kind.model_fields.items()
        if not one.is_required()
    }
    assert {name: value for name, value in omitted.items() if value} == {
        "GpuState.energy_scope": "gpu",
        "EnergyReading.scope": "gpu",
        "Held.uid": NOBODY,
    }


class Asked(Exception):
    """Instead of an answer: what was asked."""


def ask(message: dict[str, Any], timeout_s: float) -> NoReturn:
    raise Asked(message)


NAMED = {"gpus": ["GPU-1"], "name": "7"}
CALLS: list[tuple[Callable[[Client], object], str, dict[str, object]]] = [
    (lambda c: c.state("GPU-1"), "state", {"gpus": ["GPU-1"]}),
    (lambda c: c.clocks("GPU-1"), "clocks", {"gpus": ["GPU-1"]}),
    (lambda c: c.energy(["GPU-1"]), "energy", {"gpus": ["GPU-1"]}),
    (lambda c: c.power("GPU-1"), "power", {"gpus": ["GPU-1"]}),
    (lambda c: c.processes("GPU-1"), "processes", {"gpus": ["GPU-1"]}),
    (lambda c: c.stream("GPU-1"), "windows", {"sources": ["GPU-1"], "windows": []}),
    (lambda c: c.lost_leases(3, 1.0), "heartbeat", {"losses": 3}),
    (lambda c: c.node(), "hello", {"client_version": __version__}),
    *(
        (methodcaller(op), op, {})
        for op in ("leases", "heartbeat", "quiesce", "resume", "policy", "metrics")
    ),
    (
        lambda c: c.windows(["GPU-1", "cpu:0"], [(1, 2, True), (2, 3, False)], limited=True),
        "windows",
        {"sources": ["GPU-1", "cpu:0"], "windows": [1, 2, 1, 2, 3, 0], "limited": True},
    ),
    (
        lambda c: c.timeline("GPU-1", "gpu_clock", -5, 9),
        "timeline",
        {"sources": ["GPU-1"], "domain": "gpu_clock", "start_ns": 0, "end_ns": 9},
    ),
    (
        lambda c: c.set(["GPU-1"], "power_profile", [4, 1], together=True),
        "set",
        {"gpus": ["GPU-1"], "control": "power_profile", "value": [4, 1], "together": True},
    ),
    (
        lambda c: c.set_memory_clocks("GPU-1", 5, 9, block=False),
        "set",
        {"gpus": ["GPU-1"], "control": "memory_clocks", "value": [5, 9], "block": False},
    ),
    (
        lambda c: c.set_persistence_mode("GPU-1", True),
        "set",
        {"gpus": ["GPU-1"], "control": "persistence_mode", "value": [1]},
    ),
    (
        lambda c: c.reset("GPU-1", "gpu_clocks"),
        "reset",
        {"gpus": ["GPU-1"], "control": "gpu_clocks"},
    ),
    (
        lambda c: c.acquire("GPU-1", ["gpu_clocks"], ttl_s=1.5, together=True),
        "acquire",
        {"gpus": ["GPU-1"], "controls": ["gpu_clocks"], "ttl_ms": 1500, "together": True},
    ),
    (lambda c: c.acquire("GPU-1", [], ttl_s=1e-9), "acquire", {"ttl_ms": 1}),
    (
        lambda c: c.release("GPU-1", ["gpu_clocks"], whose="all", pids=(7,), job="x" * 64),
        "release",
        {"gpus": ["GPU-1"], "controls": ["gpu_clocks"], "whose": "all", "pids": [7]}
        | {"job": "x" * 64},
    ),
    (lambda c: c.release(), "release", {"gpus": [], "whose": "process", "pids": [], "job": ""}),
    (
        lambda c: c.restore("GPU-1", ["gpu_clocks"], ["7"], forget=True),
        "restore",
        {"gpus": ["GPU-1"], "controls": ["gpu_clocks"], "jobs": ["7"], "forget": True},
    ),
    (lambda c: c.restore(), "restore", {"gpus": [], "controls": [], "jobs": [], "forget": False}),
    (
        lambda c: c.persist(["GPU-1"], ["power_limit"]),
        "persist",
        {"gpus": ["GPU-1"], "controls": ["power_limit"]},
    ),
    (
        lambda c: c.set_ceiling("GPU-1", "7", 5, ttl_s=2.5, fallback_mw=4, control_group="g"),
        "set_ceiling",
        {**NAMED, "value": [5], "ttl_ms": 2500, "fallback": [4], "control_group": "g"}
        | {"until_boot_ns": 0},
    ),
    (
        lambda c: c.set_ceiling("GPU-1", "7", None, until_boot_ns=8),
        "set_ceiling",
        {**NAMED, "value": None, "ttl_ms": 0, "fallback": None, "until_boot_ns": 8},
    ),
    (
        lambda c: c.publish_profile("GPU-1", {9: 1, 5: 0.5}, measuring=True, needs_mw=6),
        "publish_profile",
        {"limits_mw": [5, 9], "progress": [0.5, 1.0], "measuring": True, "needs_mw": 6},
    ),
    (
        lambda c: c.allocate("GPU-1", "7", kind="pod", run="r", uid=5, weight=2, parts=3),
        "allocate",
        {**NAMED, "kind": "pod", "run": "r", "uid": 5, "weight": 2, "parts": 3},
    ),
    (lambda c: c.allocate("GPU-1", "7"), "allocate", {**NAMED, "kind": "job", "uid": NOBODY}),
    (
        lambda c: c.deallocate("7", kind="pod", run="r", gpus="GPU-1"),
        "deallocate",
        {**NAMED, "kind": "pod", "run": "r"},
    ),
    (lambda c: c.deallocate("7"), "deallocate", {"name": "7", "gpus": [], "run": None}),
    (
        lambda c: c.usage([0, 900], "job", uid=5, name="7", device="cpu", by_method=True),
        "usage",
        {"edges": [0, 900], "by": "job", "uid": 5, "name": "7", "device": "cpu", "gpus": []}
        | {"by_method": True, "offset": 0},
    ),
    (lambda c: c.forget_user(5), "forget_user", {"uid": 5}),
    (lambda c: c.audit(after=3, limit=5), "audit", {"after": 3, "limit": 5}),
    (lambda c: c.audit(limit=-1), "audit", {"after": 0, "limit": 1}),
]


@pytest.mark.parametrize(("call", "op", "arguments"), CALLS)
def test_a_call_asks_for_what_its_arguments_say(
    call: Callable[[Client], object], op: str, arguments: dict[str, object]
) -> None:
    transport: Any = SimpleNamespace(request=ask, send=ask, close=lambda: None, used=False)
    with Client(transport=transport, heartbeat=False) as client:
        with pytest.raises(Asked) as asked:
            call(client)
    message = asked.value.args[0]
    assert {name: message.get(name) for name in ("op", *arguments)} == {"op": op, **arguments}


def answering(*results: dict[str, Any], asked: list[dict[str, Any]] | None = None) -> Client:
    """A client whose requests have these results, in order, and are in `asked`."""
    left = iter(results)

    def request(message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if asked is not None:
            asked.append(message)
        return {"id": 1, **next(left)}

    transport: Any = SimpleNamespace(request=request, close=lambda: None, used=False)
    return Client(transport=transport, heartbeat=False)


def test_answers_in_parts_are_joined() -> None:
    asked: list[dict[str, Any]] = []
    part = {"t_ns": [1, 2], "values": [5, 6], "more": True}
    last = {"t_ns": [3], "values": [7], "more": False}
    results = [{"result": {"sources": {"GPU-1": one}}} for one in (part, last)]
    with answering(*results, asked=asked) as client:
        assert client.timeline("GPU-1") == [(1, 5), (2, 6), (3, 7)]
    assert [one["start_ns"] for one in asked] == [0, 3]
    energies = {"uncertainty_uj": [1], "limited_ms": {"heat": [0]}, "begins_ns": 0, "tick_ns": 9}
    results = [
        {"result": {"sources": {"GPU-1": {**energies, "energy_uj": [one]}}}} for one in (5, 6)
    ]
    with answering(*results, asked=asked) as client:
        windows = [(0, one, False) for one in range(257)]
        joined = client.windows("GPU-1", windows)["GPU-1"]
    assert (joined.energy_uj, joined.uncertainty_uj) == ([5, 6], [1, 1])
    assert joined.limited_ms == {"heat": [0, 0]}
    assert [len(one["windows"]) // 3 for one in asked[2:]] == [256, 1]
    names = [name for name, one in UsageSum.model_fields.items() if one.is_required()]
    one_sum = {**dict.fromkeys(names, 1), "kind": "job", "name": "7", "run": "", "methods": []}
    sums = {"sums": [one_sum], "metered_uj": [0], "begins_s": None}
    results = [{"result": {**sums, "more": more}} for more in (True, False)]
    with answering(*results, asked=asked) as client:
        assert len(client.usage([0, 900]).sums) == 2
    assert [one["offset"] for one in asked[4:]] == [0, 1]


def test_lost_leases_are_pairs_of_gpu_and_control() -> None:
    beat = {"leases": 1, "ttl_ms": 1, "lost": [["GPU-1", "power_limit"]]}
    with answering({"result": beat}) as client:
        assert client.lost_leases(0, 1.0) == [("GPU-1", "power_limit")]


def test_audit_pages_are_joined_the_oldest_first() -> None:
    fields = {"t_ns": 1, "last_ns": 1, "count": 1, "warning": False, "event": "set", "gpu": None}
    asked: list[dict[str, Any]] = []
    pages = [range(6, 56), range(1, 6)]
    results = [
        {"result": {"records": [{**fields, "number": number} for number in page], "dropped": 0}}
        for page in pages
    ]
    with answering(*results, asked=asked) as client:
        found = client.audit(limit=60).records
    assert [one.number for one in found] == [*range(1, 56)]
    assert [(one["before"], one["limit"]) for one in asked] == [(2**62, 50), (6, 10)]


def test_a_stream_ends_when_it_is_closed_and_counts_what_was_lost() -> None:
    known = [name for name, one in Sample.model_fields.items() if one.is_required()]
    fields = {**dict.fromkeys(known, 1), "gpu": "GPU-1"}
    numbers = iter([1, None, 4, 2, 3, None, 5])

    def receive(timeout_s: float) -> dict[str, object] | None:
        number = next(numbers)
        return None if number is None else {**fields, "number": number}

    closed: list[bool] = []
    subscription: Any = SimpleNamespace(receive=receive, close=lambda: closed.append(True))
    with SampleStream(subscription) as stream:
        seen = [(one.number, one.lost) for one in islice(stream, 3)]
        assert seen == [(1, 0), (4, 2), (2, 0)], "zeusd was restarted, and counts from 0"
        assert [asyncio.run(stream.__anext__()).number for _ in range(2)] == [3, 5]
    assert (stream.lost, closed, [*stream], stream.receive(0)) == (3, [True], [], None)


def test_an_answer_of_another_form_is_an_error() -> None:
    with answering({"result": []}, {"error": {"code": "gpu_lost", "message": "gone"}}) as client:
        with pytest.raises(errors.RequestRejected, match="cannot read the answer to metrics"):
            client.metrics()
        with pytest.raises(errors.GpuLost, match="gone"):
            client.heartbeat()


def test_what_fails_on_several_gpus_names_each_and_on_one_is_its_error() -> None:
    held = {"error": {"code": "lease_held", "message": "another holds it"}}
    found = {"GPU-1": held, "GPU-2": {}, "GPU-3": {"error": {**held["error"], "code": "gpu_lost"}}}

    def answer(message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return {"id": 1, "result": {"gpus": {name: found[name] for name in message["gpus"]}}}

    transport: Any = SimpleNamespace(request=answer, close=lambda: None, used=False)
    with Client(transport=transport, heartbeat=False) as client:
        with pytest.raises(errors.SeveralGpusFailed, match="2 GPUs failed; the first: ") as failed:
            client.persist([*found], ["power_limit"])
        kinds = {name: type(error) for name, error in failed.value.errors.items()}
        assert kinds == {"GPU-1": errors.LeaseHeld, "GPU-3": errors.GpuLost}
        with pytest.raises(errors.LeaseHeld):
            client.persist("GPU-1", ["power_limit"])


def test_a_jobs_name_has_a_greatest_length() -> None:
    transport: Any = SimpleNamespace(request=ask, close=lambda: None, used=False)
    with Client(transport=transport, heartbeat=False) as client:
        with pytest.raises(errors.RequestRejected, match="at most 64 characters, not 65"):
            client.release(job="x" * 65)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": ["200000"]},
        {"value": [200_000.0]},
        {"value": [True]},
        {"value": [-1]},
        {"value": [2**70]},
        {"gpus": []},
        {"gpus": [""]},
        {"gpus": ["x" * 97]},
        {"gpus": ["x"] * 65},
        {"gpus": [1]},
        {"block": 1},
        {"deadline_ns": -1},
        {"client": "x" * 33},
        {"id": -1},
    ],
)
def test_a_request_of_another_form_is_refused(changes: dict[str, object]) -> None:
    message = {"v": 1, "id": 3, "op": "set", **ARGUMENTS["set"]}
    assert isinstance(request_adapter.validate_python(message), SetControl)
    with pytest.raises(ValidationError):
        request_adapter.validate_python({**message, **changes})


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("windows", {"windows": [1, 2]}, "three numbers"),
        ("windows", {"windows": [2, 1, 0]}, "ends before it begins"),
        ("windows", {"windows": [-1, 1, 0]}, "greater than or equal"),
        ("windows", {"windows": [1, 2, 0] * 257}, "at most 768"),
        ("windows", {"windows": [1, 2, 0] * 100, "sources": ["GPU-1"] * 64}, "ask in parts"),
        ("windows", {"sources": []}, "at least 1"),
        ("publish_profile", {"progress": [1.0]}, "one progress for each limit"),
        ("publish_profile", {"limits_mw": [2, 2]}, "limits must ascend"),
        ("usage", {"edges": [0, 899]}, "multiples of 900 s"),
        ("usage", {"edges": [900, 900]}, "edges must ascend"),
        ("usage", {"edges": [0]}, "at least 2"),
        ("usage", {"by": "gpu"}, "by job or by pod only"),
    ],
)
def test_a_request_that_means_nothing_is_refused_with_the_reason(
    op: str, changes: dict[str, object], reason: str
) -> None:
    message = {"v": 1, "id": 3, "op": op, **ARGUMENTS[op]}
    with pytest.raises(ValidationError, match=reason):
        request_adapter.validate_python({**message, **changes})


BETWEEN = "must be between"


@pytest.mark.parametrize(
    ("control", "value", "fault"),
    [
        ("power_limit", [1], None),
        ("power_limit", [100_000_000], None),
        ("power_limit", [0], f"power_limit {BETWEEN} 1 and 100000000"),
        ("power_limit", [100_000_001], f"power_limit {BETWEEN} 1 and 100000000"),
        ("power_limit", [], "power_limit takes 1 number, not 0"),
        ("power_limit", [5, 6], "power_limit takes 1 number, not 2"),
        ("gpu_clocks", [], None),
        ("gpu_clocks", [0, 5], None),
        ("gpu_clocks", [5, 5], None),
        ("gpu_clocks", [5], "gpu_clocks takes 2 numbers, not 1"),
        ("gpu_clocks", [0, 100_001], f"gpu_clocks {BETWEEN} 0 and 100000"),
        (
            "gpu_clocks",
            [9, 5],
            "cannot set gpu_clocks to 9 to 5 MHz: the minimum is above the maximum",
        ),
        ("persistence_mode", [0], None),
        ("persistence_mode", [2], f"persistence_mode {BETWEEN} 0 and 1"),
        ("power_profile", [], None),
        ("power_profile", [0, 254] * 16, None),
        ("power_profile", [0, 255], f"power_profile {BETWEEN} 0 and 254"),
        ("power_profile", [1] * 33, "power_profile takes at most 32 numbers, not 33"),
    ],
)
def test_what_no_gpu_could_take_is_a_fault(
    control: str, value: list[int], fault: str | None
) -> None:
    assert SPECS[Control(control)].fault(value) == fault


VALUES = [
    ("power_limit", [150_500], "150.5 W"),
    ("gpu_clocks", [], "unlocked"),
    ("gpu_clocks", [5, 9], "5-9 MHz"),
    ("memory_clocks", [5, 5], "5 MHz"),
    ("persistence_mode", [1], "on"),
    ("persistence_mode", [0], "off"),
    ("power_profile", [0, 4, 100], "max-p, network, profile-100"),
    ("power_profile", [], "none"),
]


@pytest.mark.parametrize(("control", "value", "text"), VALUES)
def test_a_value_has_a_text_which_is_read_back(control: str, value: list[int], text: str) -> None:
    spec = SPECS[Control(control)]
    assert spec.text(value) == text
    if text != "unlocked":
        assert list(spec.parse(f" {text} ")) == value


@pytest.mark.parametrize(
    ("control", "text", "said"),
    [
        ("power_limit", "1,2", "'1,2' is not a power limit; write watts, such as 250"),
        ("power_limit", "0.9", "'0.9' is out of range: a power limit is 1 to 100000 W"),
        ("gpu_clocks", "1,2,3", "is not a graphics clock; write MHz: 1200, or a range such as 900"),
        ("persistence_mode", "1", "'1' is neither on nor off"),
        (
            "power_profile",
            "max-p,x",
            "'x' is not a workload power profile; write names such as max",
        ),
    ],
)
def test_a_text_that_is_no_value_says_what_to_write(control: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        SPECS[Control(control)].parse(text)


def test_why_clocks_are_limited_is_said_with_the_author_of_the_limit() -> None:
    texts = {
        "heat": "limited by heat",
        "power": "at the power limit",
        "power:BMC": "at a limit of the BMC",
        "power:lease": "at a lease's limit",
        "power:rack:1": "at the ceiling rack:1",
    }
    assert {name: cause_text(name) for name in texts} == texts
    assert [cause("power", "rack1"), cause("power", None), cause("heat", "rack1")] == [
        *("power:rack1", "power", "heat")
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(), "there is no such socket; start zeusd, or name its socket"),
        (ConnectionRefusedError(), "is not a socket; name zeusd's socket in ZEUSD_SOCK_PATH"),
        (PermissionError(), "ask the administrator for the right to use it"),
        (OSError(36, "File name too long"), "File name too long; check the path"),
        (TimeoutError(), None),
        (BrokenPipeError(), None),
    ],
)
def test_why_zeusd_cannot_be_reached(tmp_path: Path, error: OSError, said: str | None) -> None:
    (tmp_path / "file").touch(0o600)
    reason = unreachable(str(tmp_path / "file"), error)
    assert (reason is None) == (said is None)
    assert str(said or None) in str(reason)


def test_profiles_have_the_numbers_of_nvml() -> None:
    names = {number: name for number, name in PROFILES.items() if number not in AMD_PROFILES}
    assert len(names) == pynvml.NVML_POWER_PROFILE_MAX
    for number, name in names.items():
        constant = f"NVML_POWER_PROFILE_{name.upper().replace('-', '_')}"
        assert getattr(pynvml, constant) == number


def test_profiles_are_known_by_name_and_number_and_limits_in_either_unit() -> None:
    profile, limit = SPECS[Control.POWER_PROFILE], SPECS[Control.POWER_LIMIT]
    named = {" MAX_Q ": 1, "profile-7": 7, "7": 7, "254": 254, "255": None, "no": None}
    assert {name: profile.member_number(name) for name in named} == named
    assert profile.normal([4, 1, 4]) == (1, 4)
    assert limit.span_text(100_000, 250_500) == "100 to 250.5 W"
    said = "did you mean 200 W (200000 in the protocol)?"
    meant = {200: said, 200_000_000: said, 5: "", 301: "", 99: ""}
    assert {value: limit.meant(value, 100_000, 300_000) for value in meant} == meant


LARGE = 2**62


@pytest.mark.parametrize(
    "arguments",
    [
        {"op": "windows", "sources": ["G" * 96] * 64, "windows": [LARGE, LARGE, 1] * 64},
        {"op": "windows", "sources": ["G" * 96] * 16, "windows": [LARGE, LARGE, 1] * 256},
        {"op": "acquire", "gpus": ["G" * 96] * 64, "controls": ["persistence_mode"] * 8},
    ],
    ids=["sources", "windows", "acquire"],
)
def test_the_largest_requests_fit_the_size_limit(arguments: dict[str, object]) -> None:
    usual = {"v": 1, "id": 2**63 - 1, "deadline_ns": 2**63 - 1, "client": "c" * 32}
    data = encode({**usual, **arguments})
    assert len(data) <= MAX_REQUEST_BYTES
    request_adapter.validate_python(decode_request(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb(7),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": b"bytes"}),
        msgpack.packb({"a": msgpack.ExtType(4, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1, 2)}),
        msgpack.packb({"a": list(range(1025))}),
        msgpack.packb({"a": "x" * (MAX_REQUEST_BYTES + 1)}),
        msgpack.packb({str(n): n for n in range(33)}),
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a" + b"\x91" * 2000 + b"\x01",
        msgpack.packb({"a": 1}) + b"more",
        b"\x81\xa1a\xa2\xff\xff",
    ],
)
def test_invalid_maps_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_request(data)


def test_who_sent_an_invalid_map_is_told_its_id() -> None:
    body = msgpack.packb({"op": b"bytes", "long": ["x" * 9000], "id": 7, "more": 1})
    assert [id_of(body), id_of(body[:-3]), id_of(body[:9]), id_of(b"\xc1")] == [7, 7, 0, 0]


def test_random_bytes_only_ever_give_a_map_or_a_decode_error() -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    good = encode({"v": 1, "id": 3, "op": "state", "gpus": ["GPU-1"]})
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            message = decode_request(bytes(data))
        except Malformed:
            continue
        try:
            request_adapter.validate_python(message)
        except ValidationError:
            continue


def test_integers_of_numpy_are_integers_and_others_are_named() -> None:
    assert decode_request(encode({"mw": np.int64(200_000), "n": np.uint8(3)})) == {
        "mw": 200_000,
        "n": 3,
    }
    for value in (object, {1}):
        with pytest.raises(TypeError, match="cannot be part of a request"):
            encode({"mw": value})
    with pytest.raises(errors.RequestRejected, match="a number is too large"):
        encode({"mw": 10**25})


CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type)
    and issubclass(cls, errors.ZeusIpcError)
    and cls not in (errors.SeveralGpusFailed, errors.DeferredSetFailed)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_cross_the_wire_and_process_boundaries(cls: type[errors.ZeusIpcError]) -> None:
    error = cls("what to do", gpu="GPU-1", details={"holder": 7, "device_code": 15})
    body = ErrorBody(code=error.code, message=error.message, gpu=error.gpu, details=error.details)
    back = errors.from_wire(body.model_dump())
    assert type(back) is cls
    for other in (back, pickle.loads(pickle.dumps(error))):
        assert (other.code, other.message, other.gpu, other.device_code, other.details) == (
            *(cls.code, "what to do", "GPU-1", 15, {"holder": 7, "device_code": 15}),
        )


def test_no_two_classes_share_a_code_and_unknown_codes_keep_their_name() -> None:
    codes = [cls.code for cls in CLASSES if cls is not errors.ZeusIpcError]
    assert len(codes) == len(set(codes))
    future = errors.from_wire({"code": "from_the_future", "message": "x"})
    assert type(future) is errors.ZeusIpcError
    assert future.code == "from_the_future"


def test_the_socket_is_the_argument_then_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "/env")
    assert (socket_path("/given"), socket_path()) == ("/given", "/env")
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "")
    assert (socket_path(), socket_path("")) == (DEFAULT_SOCKET_PATH, DEFAULT_SOCKET_PATH)
