"""Adapters of engines, against stand-ins with the attributes of the real ones."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq

from tests.support import wait_for
from tests.zeus.serving.batches import Recorded
from zeus.serving import asgi
from zeus.serving.asgi import EnergyHeader
from zeus.serving.forward_pass import ForwardPass, LedgerPasses, decode, follow
from zeus.serving.vllm import probe as vllm_probe
from zeus.serving.vllm import stats as vllm_stats
from zeus.serving.vllm.stats import EnergyStatLogger, Finished, FrontEnd
from zeus.serving.wire import EngineStep
from zeus_ipc.errors import RequestRejected

# ------------------------------------------------------------------------------------------- vLLM


def _scheduler_class() -> type:
    class Scheduler:
        """Schedules as the test says, and advances requests at once, as vLLM does."""

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.plan: list[tuple[dict[str, int], set[str]]] = []

        def add(self, name: str, prompt: int) -> None:
            self.requests[f"{name}-0123abcd"] = SimpleNamespace(
                external_req_id=name, num_prompt_tokens=prompt, num_computed_tokens=0
            )

        def schedule(self) -> Any:
            planned, finished = self.plan.pop(0)
            for one, tokens in planned.items():
                self.requests[one].num_computed_tokens += tokens
            return SimpleNamespace(num_scheduled_tokens=planned, finished_req_ids=finished)

        def update_from_output(self, output: Any, model_output: Any) -> str:
            return "outputs"

    return Scheduler


class Counted(Recorded):
    """Counts batches that were sent whole."""

    whole = 0

    def batch(self, *batch: Any) -> None:
        self.whole += len(batch) > 2 and batch[-1]
        super().batch(*batch)


@pytest.fixture
def probed(monkeypatch):
    """A scheduler with the probe, and what records its steps."""
    cls, recorded = _scheduler_class(), Counted()
    for _ in range(2):  # twice wraps once
        assert vllm_probe.install(cls)
    monkeypatch.setattr(vllm_probe, "Recorder", lambda *_, **__: recorded)
    return cls(), recorded


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_steps_of_the_same_requests_are_derived_from_the_first(probed, ahead):
    scheduler, recorded = probed
    scheduler.add("a", 3)
    scheduler.add("b", 5)
    a, b = scheduler.requests
    prompts, both, drafts = {a: 3, b: 5}, {a: 1, b: 1}, {a: 3, b: 1}
    plans = [prompts, *[both] * 6, *[drafts] * 3, *[both] * 6, {b: 1}, *[both] * 6]
    scheduler.plan = [(dict(plan), set()) for plan in plans]
    expected, under_way = [], []

    def update() -> None:
        plan = under_way.pop(0)
        if plan is drafts:  # two of a's tokens are rejected
            scheduler.requests[a].num_computed_tokens -= 2
        assert scheduler.update_from_output(None, None) == "outputs"

    for plan in plans:
        before = {one: scheduler.requests[one].num_computed_tokens for one in plan}
        scheduler.schedule()
        under_way.append(plan)
        expected.append([before[one] for one in plan])
        if len(under_way) > ahead:
            update()
    while under_way:
        update()

    assert [context for *_, context in recorded.steps] == expected
    assert [tokens for _, _, tokens, _ in recorded.steps] == [list(p.values()) for p in plans]
    # Prompts, drafts, b alone, and the step after each; one more while drafts may be rejected.
    assert recorded.whole == 5 + 3 + 2 * ahead


def test_the_vllm_probe_does_not_take_a_request_for_the_one_before_under_its_id(probed):
    scheduler, recorded = probed
    for prompt in (5, 50):
        scheduler.add("a", prompt)
        (a,) = scheduler.requests
        finished = {a} if prompt == 50 else set()  # the one before
        scheduler.plan = [({a: 5}, finished), ({}, set()), ({a: 1}, set())]
        for _ in range(3):  # the second schedules nothing, which is no step
            scheduler.update_from_output(scheduler.schedule(), None)
        scheduler.requests.clear()
    two = [SimpleNamespace(external_req_id="b", num_computed_tokens=0) for _ in range(2)]
    scheduler.requests.update(zip(("b-1", "b-2"), two, strict=True))
    scheduler.plan = [({"b-1": 1, "b-2": 1}, set())]  # at the same time
    scheduler.update_from_output(scheduler.schedule(), None)

    assert recorded.steps == [
        (["a"], [True], [5], [0]),
        (["a"], [False], [1], [5]),
        (["a"], [True], [5], [0]),
        (["a"], [True], [1], [5]),
        (["b", "b-2"], [False, False], [1, 1], [0, 0]),
    ]


def test_a_vllm_that_lacks_something_continues(probed, caplog):
    assert not vllm_probe.install(type("Scheduler", (), {}))
    scheduler, recorded = probed
    scheduler.requests["a"] = SimpleNamespace(num_computed_tokens=0)
    scheduler.plan = [({"a": 5}, set()), ({"a": 1}, set())]
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), None)
    # Neither an outer id nor a prompt's length: the engine's id, and all is decode.
    assert recorded.steps == [(["a"], [False], [5], [0]), (["a"], [False], [1], [5])]

    # An attribute that the probe reads is no longer what it was.
    scheduler.requests["b"] = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=[0])
    scheduler.plan = [({"b": 1}, set()), ({"b": 1}, set())]
    for _ in range(2):
        assert scheduler.update_from_output(scheduler.schedule(), None) == "outputs"
    assert len(recorded.steps) == 2
    assert caplog.text.count("the energy probe of vLLM stops") == 1


def test_an_engine_that_can_have_no_probe_continues(caplog):
    class Closed(_scheduler_class()):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_zeus_probe":
                raise AttributeError(name)
            super().__setattr__(name, value)

    vllm_probe.install(Closed)
    scheduler = Closed()
    scheduler.plan = [({}, set())] * 2
    for _ in range(2):
        assert scheduler.update_from_output(scheduler.schedule(), None) == "outputs"
    messages = [record.message for record in caplog.records]
    stops = "the energy probe of Closed stops, the engine continues: AttributeError: _zeus_probe"
    assert messages == [stops] * 2, "once for each method"


def test_the_vllm_plugin_does_nothing_unless_asked(monkeypatch):
    cls = _scheduler_class()
    plain = cls.schedule
    home = ModuleType("vllm.v1.core.sched.scheduler")
    home.Scheduler = cls
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.33.0"
    for name in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.delenv("ZEUS_SERVING", raising=False)
    vllm_probe.register()
    assert cls.schedule is plain

    monkeypatch.setenv("ZEUS_SERVING", "steps")
    vllm_probe.register()
    assert cls.schedule is not plain

    del home.Scheduler
    vllm_probe.register()  # reports it and continues


# --------------------------------------------------------------------------- forward-pass metrics

PASS = [1, "worker-3", 0, 17, 0.02, [1, 512, 0.0, 100, 3, 900, 2.0], [4, 0, 0.0, 0, 0]]


def test_a_forward_pass_is_a_step_of_equal_rows():
    found = decode(msgpack.packb(PASS), 10**9)

    ids = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    prefill, tokens, context = [True, False, False, False], [512, 1, 1, 1], [100, 300, 300, 300]
    step = EngineStep("0", 18, 980_000_000, 10**9, ids, prefill, tokens, context)
    assert found == ForwardPass("worker-3", step, 4, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb(PASS[:4]),
        msgpack.packb({"version": 1}),
        msgpack.packb([*PASS[:5], [-1, 0, 0, 0, 0, 0], PASS[6]]),
        msgpack.packb([*PASS[:5], [10**9, 0, 0, 0, 0, 0], PASS[6]]),
        msgpack.packb([*PASS[:4], "soon", *PASS[5:]]),
        msgpack.packb([*PASS[:5], {"prefills": 1}, PASS[6]]),
        msgpack.packb([*PASS[:2], math.inf, *PASS[3:]]),
        msgpack.packb([*PASS[:6], [10**9, 0]]),
        msgpack.packb([*PASS[:6], [0]]),
    ],
)
def test_an_invalid_forward_pass_is_rejected(data):
    with pytest.raises(RequestRejected):
        decode(data, 10**9)


def test_passes_are_dated_by_their_arrival_and_nonsense_is_named_once(caplog):
    context = zmq.Context.instance()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    told: list[Any] = []
    before_ns = time.monotonic_ns()
    end = follow(f"tcp://127.0.0.1:{port}", told.append)
    try:
        assert publisher.poll(10_000)
        publisher.recv()  # the subscription is there
        for _ in range(2):
            publisher.send(b"nonsense")
        publisher.send_multipart([b"", msgpack.packb(PASS)])
        wait_for(lambda: told, "the pass")
    finally:
        end()
        publisher.close()
    (step,) = told
    assert before_ns < step.end_ns < time.monotonic_ns()
    assert step.end_ns - step.begin_ns == 20_000_000
    assert caplog.text.count("this is not a message of forward-pass metrics") == 1
    with pytest.raises(ValueError, match="cannot listen to nowhere"):
        follow("nowhere", told.append)


def test_forward_passes_reach_a_ledger_in_blocks():
    told: list[Any] = []
    feed = LedgerPasses(told.append)
    for number in (998, 999, 1000):
        feed(decode(msgpack.packb([*PASS[:3], number, "forward", *PASS[4:]]), 20_000_000))

    assert [type(one).__name__ for one in told] == [
        "EngineStep",
        "EngineStep",
        *["Finish"] * 4,
        "EngineStep",
    ]
    assert [one.number for one in told if isinstance(one, EngineStep)] == [999, 1000, 1001]
    assert told[0].ids[0] == "prefill-0#0"
    assert {one.request for one in told[2:6]} == set(told[0].ids)
    assert told[6].ids[0] == "prefill-0#1"


# ------------------------------------------------------------------------------------------- ASGI

TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("/v1/chat/completions", b"abc", b"chatcmpl-abc"),
        ("/v1/completions", b"abc", b"cmpl-abc-0"),
        ("/generate", b"abc", b"abc"),
        ("/generate", b"x" * 500, None),
        ("/generate", b"", None),
    ],
)
def test_a_response_says_where_its_energy_is(path, given, expected):
    seen: list[bytes] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(b"x-request-id", given)]}
    asyncio.run(EnergyHeader(app)(scope, None, send))

    assert len(seen) == 1
    assert 0 < len(seen[0]) <= 200
    header = dict(sent[0]["headers"])
    assert header[b"a"] == b"b"
    assert header[b"x-energy-request"] == (expected or seen[0])
    assert sent[1] == {"type": "http.response.body", "body": b"x"}


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({}, None),
        ({"X-Tenant": "search"}, ("abc", "search", "")),
        ({"traceparent": TRACE, "baggage": "a=b"}, ("abc", "", "ab" * 16)),
        ({"traceparent": TRACE, "baggage": "zeus.group=rollout"}, ("abc", "", "rollout")),
    ],
)
def test_headers_name_tenant_and_group(monkeypatch, headers, owner):
    monkeypatch.setenv("ZEUS_SERVING_TENANT_HEADER", "x-tenant")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    monkeypatch.setattr(asgi.Recorder, "owner", lambda recorder, *one: sent.append(one))
    middleware = EnergyHeader(app)
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", b"abc"), *given]}
    asyncio.run(middleware(scope, None, None))
    assert sent == ([owner] if owner else [])


def test_other_protocols_than_http_pass():
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    asyncio.run(EnergyHeader(app)({"type": "lifespan"}, None, None))
    assert seen == [{"type": "lifespan"}]


# ------------------------------------------------------------------------ vLLM's front end alone


def test_a_request_that_never_ends_does_not_hold_up_its_steps_forever():
    front = FrontEnd()
    front.iteration(0, 2, [])
    front.iteration(10**9, 2, [Finished("a", 0.5, 1.0, 5, 0, 2)])

    assert list(front.ready(2 * 10**9)) == []
    found, ended = zip(*front.ready(130 * 10**9), strict=True)
    assert [one[2] for one in found] == [["a"], ["a"]]
    assert [one[3] for one in found] == [[True], [False]]
    assert ended == ([], ["a"])


def test_the_stat_logger_is_silent_unless_asked_and_with_several_servers(monkeypatch, tmp_path):
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=1))
    monkeypatch.delenv("ZEUS_SERVING", raising=False)
    recorders: list[Recorded] = []
    monkeypatch.setattr(
        vllm_stats, "Recorder", lambda engine: recorders.append(Recorded()) or recorders[-1]
    )
    EnergyStatLogger(config)
    assert recorders == []
    monkeypatch.setenv("ZEUS_SERVING", "stats")
    several = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=4))
    EnergyStatLogger(several)
    assert recorders == []

    logger = EnergyStatLogger(config)
    (recorded,) = recorders
    logger.log_engine_initialized()
    logger.log()
    logger.record(None, None)
    logger.record(SimpleNamespace(), SimpleNamespace())  # nothing that it reads is there
    stats = SimpleNamespace(
        request_id="a",
        num_prompt_tokens=9,
        num_cached_tokens=4,
        num_generation_tokens=1,
        prefill_time=3600.0,
        decode_time=0.0,
    )
    logger.record(
        SimpleNamespace(num_running_reqs=0),
        SimpleNamespace(finished_requests=[stats, SimpleNamespace()]),
        None,
        engine_idx=0,
        extra=1,
    )
    assert recorded.finished == ["a"]
    assert recorded.steps[-1][0] == ["a"]
    assert sum(step[2][0] for step in recorded.steps) == pytest.approx(5)


def test_an_engine_relays_the_metrics_of_the_ledger_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relayed: list[str] = []
    monkeypatch.setattr(vllm_stats, "register", relayed.append)
    monkeypatch.delenv("ZEUS_SERVING_METRICS", raising=False)
    EnergyStatLogger(SimpleNamespace())
    assert relayed == []
    monkeypatch.setenv("ZEUS_SERVING_METRICS", "http://127.0.0.1:9462")
    EnergyStatLogger(SimpleNamespace())
    assert relayed == ["http://127.0.0.1:9462"]
