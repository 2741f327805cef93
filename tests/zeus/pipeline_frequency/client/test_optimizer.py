"""The optimizer of one rank: its plan, its server, and failures of both."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import wait_for
from tests.zeus.node import VirtualNode
from tests.zeus.pipeline_frequency.client.fakes import FakeServer, Store, fake_torch
from zeus import _node
from zeus.callback import CallbackSet
from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer, connection, optimizer
from zeus.optimizer.pipeline_frequency.follower import Follower
from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController
from zeus.optimizer.pipeline_frequency.online_profiler import ProfilerSettings
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile

OpenNode = Callable[[str], VirtualNode]
PLAN = [("forward", 1410), ("forward", 1200), ("backward", 900), ("backward", 1005)]
OTHER = [("forward", 1305), ("forward", 1320), ("backward", 1335), ("backward", 1350)]
ONE: dict[str, Any] = {
    "rank": 0,
    "dp_rank": 0,
    "pp_rank": 0,
    "tp_rank": 0,
    "device_id": 0,
    "dp_degree": 1,
    "pp_degree": 1,
    "tp_degree": 1,
    "world_size": 1,
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """torch.distributed is initialised, and its processes meet here."""
    made = Store()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(made))
    monkeypatch.setattr(connection, "report_interval_s", lambda world_size: 0.02)
    monkeypatch.setattr(connection, "BACKOFF_S", (0.02, 0.1))
    monkeypatch.setattr(connection, "POLL_S", 0.01)
    return made


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    made.schedule, made.version = PLAN, 1
    yield made
    made.stop()


class Rank:
    """An optimizer, and the clocks that its GPU was given."""

    def __init__(self, made: PipelineFrequencyOptimizer) -> None:
        self.optimizer = made
        self.clocks: list[int] = []
        controller = self.controller = made._controller
        set_frequency, reset = controller.set_frequency, controller.reset

        def setting(mhz: int) -> None:
            self.clocks.append(mhz)
            set_frequency(mhz)

        def resetting() -> None:
            self.clocks.append(-1)
            reset()

        controller.set_frequency = setting
        controller.reset = resetting

    def step(self, names: list[str] | None = None, plan: list[tuple[str, int]] = PLAN) -> list[int]:
        self.clocks.clear()
        self.optimizer.on_step_begin()
        for name in names or [name for name, _ in plan]:
            self.optimizer.on_instruction_begin(name)
            self.optimizer.on_instruction_end(name)
        self.optimizer.on_step_end()
        return list(self.clocks)


class Job:
    """A server, and ranks that meet in a store; the first GPU of two is that of most."""

    def __init__(self, server: FakeServer, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        self.server, self.store, self._caplog = server, store, caplog
        self.made: list[PipelineFrequencyOptimizer] = []

    def rank(self, **options: Any) -> Rank:
        arguments = {**ONE, "server_url": self.server.url, **options}
        self.made.append(PipelineFrequencyOptimizer(**arguments))
        return Rank(self.made[-1])

    def warnings(self) -> list[str]:
        return warnings(self._caplog)


@pytest.fixture
def job(
    virtual_node: OpenNode,
    store: Store,
    server: FakeServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Job]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    virtual_node("2xa100:setter_ms=0")
    made = Job(server, store, caplog)
    yield made
    for one in made.made:
        one.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


CLOCKS = [mhz for _, mhz in PLAN]
BAD_CLIENTS = [
    ("ALL_PROXY", "socks4://proxy:1080"),
    ("SSL_CERT_FILE", "/nonexistent/ca.pem"),
    ("ZEUS_PFO_TOKEN", "not ascii: \N{SNOWMAN}"),
]


def test_training_runs_under_the_plan_from_its_first_step(job: Job) -> None:
    one = job.rank(job_metadata="gpt3/run 1", schedule="1f1b", num_microbatches=2)
    for iteration in range(5):
        assert one.step() == CLOCKS
        assert one.optimizer.iteration == iteration
    assert one.optimizer.plan_version == 1
    assert one.optimizer.job_id == "job-0"
    [body] = job.server.of("register_job")
    assert body["world_size"] == 1
    assert body["job_metadata"] == "gpt3/run 1"
    assert (body["schedule"], body["num_microbatches"]) == ("1f1b", 2)
    [info] = job.server.of("register_rank")
    assert info["available_frequencies"][:2] == [1410, 1395]
    one.optimizer.on_train_end()
    assert job.warnings() == []


def test_a_setting_that_is_no_clock_is_set_by_the_caller(job: Job) -> None:
    job.server.schedule = [("forward", "overlap"), ("forward", "overlap"), ("backward", 900)]
    applied: list[str] = []
    one = job.rank(apply=applied.append)
    assert one.step(["forward", "forward", "backward"]) == [900]
    assert applied == ["overlap"]


def test_a_plan_with_settings_that_nobody_sets_is_not_run(job: Job) -> None:
    job.server.schedule = [("forward", "overlap"), ("backward", 900)]
    one = job.rank()
    one.step(["forward", "backward"])
    assert one.optimizer.plan_version == 0
    assert any("settings that are neither clocks (overlap)" in line for line in job.warnings())


def test_progress_and_times_are_reported_once_each(job: Job) -> None:
    one = job.rank()
    bounds_s = []
    for _ in range(20):
        begin_s = time.monotonic()
        one.optimizer.on_step_begin()
        for name, _ in PLAN:
            one.optimizer.on_instruction_begin(name)
            time.sleep(0.002)
            one.optimizer.on_instruction_end(name)
        end_s = time.monotonic()
        time.sleep(0.02)  # the gradients' all-reduce
        one.optimizer.on_step_end()
        bounds_s.append(end_s - begin_s)

    def reported() -> dict[int, float]:
        pairs = [tuple(pair) for body in job.server.of("progress") for pair in body["iter_times"]]
        assert len(pairs) == len(dict(pairs))
        return dict(pairs)

    def all_is_reported() -> bool:
        newest = job.server.of("progress")[-1]
        return (len(reported()), newest["iteration"], newest["version"]) == (19, 19, 1)

    wait_for(all_is_reported, "the last iteration, and the times of those before it")
    assert set(reported()) == set(range(19))
    for iteration, took_s in reported().items():
        assert 0.0079 <= took_s <= bounds_s[iteration] + 0.0001, "without the all-reduce"
    timed = [tuple(one) for body in job.server.of("progress") for one in body["instruction_times"]]
    assert {iteration for iteration, *_ in timed} == {7, 15}
    assert {(name, setting) for _, name, setting, _ in timed} == set(PLAN)
    assert len(timed) == 2 * len(set(PLAN))
    assert all(seconds >= 0.002 for *_, seconds in timed)


def test_a_new_plan_begins_with_its_iteration(job: Job) -> None:
    one = job.rank()
    one.step()
    with job.server.guard:
        job.server.version, job.server.at_iteration, job.server.update = 2, 30, OTHER

    def there() -> bool:
        pending = one.optimizer.follower.pending
        return pending is not None and pending.version == 2

    wait_for(there, "the plan to come")
    for iteration in range(1, 60):
        expected = CLOCKS if iteration < 30 else [mhz for _, mhz in OTHER]
        assert one.step() == expected
    wait_for(lambda: job.server.of("progress")[-1]["version"] == 2, "the version to be reported")


def test_an_evaluation_runs_at_default_clocks(job: Job) -> None:
    one = job.rank()
    assert one.step() == CLOCKS
    one.clocks.clear()
    with one.optimizer.paused():
        assert one.clocks == [-1]
        for _ in range(7):
            one.optimizer.on_instruction_begin("forward")
            one.optimizer.on_instruction_end("forward")
        assert set(one.clocks) == {-1}
    assert one.step() == CLOCKS
    assert job.warnings() == []
    assert one.step(["forward", "backward", "backward"]) == [1410, -1, -1]
    assert one.step() == CLOCKS
    assert len(job.warnings()) == 1


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_a_program_does_is_an_error(job: Job, seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    one = job.rank()
    allowed = {-1, *CLOCKS, *(mhz for _, mhz in OTHER)}
    calls: list[Callable[[], object]] = [
        one.optimizer.on_step_begin,
        one.optimizer.on_step_end,
        one.optimizer.on_pause,
        one.optimizer.on_epoch_begin,
        one.optimizer.on_epoch_end,
        lambda: one.optimizer.on_evaluate(0.5),
        lambda: one.optimizer.on_instruction_begin(chance.choice(["forward", "backward", "x"])),
        lambda: one.optimizer.on_instruction_end(chance.choice(["forward", "backward", "x"])),
        lambda: one.optimizer.on_instruction_begin("forward"),
        lambda: one.optimizer.on_instruction_end("forward"),
    ]
    for n in range(400):
        if n == 200:
            with job.server.guard:
                job.server.version, job.server.update = 2, OTHER
        chance.choice(calls)()
    assert set(one.clocks) <= allowed
    assert not any("failed" in one for one in job.warnings())
    one.optimizer.on_step_end()
    one.optimizer.on_step_begin()
    plan = PLAN if one.optimizer.plan_version == 1 else OTHER
    one.clocks.clear()
    for name, _ in plan:
        one.optimizer.on_instruction_begin(name)
    assert one.clocks == [mhz for _, mhz in plan]
    one.optimizer.close()
    for call in calls:
        call()


def test_an_internal_error_ends_the_clocks_and_not_the_training(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job.rank()

    def broken(follower: Follower, name: str) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(Follower, "instruction", broken)
    for _ in range(3):
        one.step()
    assert [text for text in job.warnings() if "a bug" in text] == job.warnings()
    assert len(job.warnings()) == 1
    assert not one.controller.working


# ------------------------------------------------------------------------------------ the arguments


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"world_size": 2}, "world_size is 2, but .* is 1 .* 1 .* 1; give the degrees"),
        ({"dp_degree": 0}, "^dp_degree: .* greater than or equal to 1, not 0$"),
        ({"pp_rank": 1}, "pp_rank 1 is outside the job: pp_rank must be from 0 to 0"),
        ({"rank": -1}, "rank must be"),
        ({"server_url": "master:7787"}, "server_url must be such as"),
        ({"device_id": 9}, "there is no GPU 9"),
        ({"num_microbatches": 0}, "^num_microbatches: .*, not 0$"),
    ],
)
def test_wrong_arguments_are_reported_at_once(job: Job, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineFrequencyOptimizer(**{**ONE, "server_url": "http://127.0.0.1:1", **wrong})


def test_without_torch_distributed_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="init_process_group"):
        PipelineFrequencyOptimizer(**ONE, server_url="http://127.0.0.1:1")


# --------------------------------------------------------------------------------------- the server


def test_a_server_that_is_not_there_costs_nothing_and_is_waited_for(job: Job) -> None:
    port = job.server.port
    job.server.stop()
    one = job.rank(
        server_url=f"http://127.0.0.1:{port}", wait_s=3600.0
    )  # one that refuses is not waited for
    assert one.step() == [-1] * 4
    assert len(job.warnings()) == 1
    assert "cannot be reached" in job.warnings()[0]
    again = FakeServer(port)
    again.schedule, again.version = PLAN, 1
    wait_for(lambda: one.step() == CLOCKS, "the plan to come")
    wait_for(lambda: len(job.warnings()) == 2, "it to be told")
    again.stop()


@pytest.mark.parametrize("environment", BAD_CLIENTS, ids=str)
def test_an_environment_that_rules_out_the_server_is_one_warning(
    job: Job, environment: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*environment)
    began_s = time.monotonic()
    one = job.rank(server_url="https://127.0.0.1:7787", wait_s=60.0)
    others = job.rank(
        server_url="https://127.0.0.1:7787",
        wait_s=60.0,
        rank=1,
        dp_rank=1,
        dp_degree=2,
        world_size=2,
    )
    assert time.monotonic() - began_s < 60
    assert one.step() == others.step() == [-1] * 4
    told = job.warnings()
    assert len(told) == 2
    assert all("ALL_PROXY" in text and "training continues" in text for text in told)


def test_a_server_that_goes_and_forgets_the_job_gets_it_again(job: Job) -> None:
    one = job.rank()
    assert one.step() == CLOCKS
    with job.server.guard:
        job.server.known.clear()
        job.server.known.add("another")
        job.server.schedule, job.server.version, job.server.update = OTHER, 3, OTHER
    wait_for(lambda: one.step() == [mhz for _, mhz in OTHER], "the other plan")
    assert one.optimizer.job_id == "job-1"
    assert len(job.server.of("register_rank")) == 2


def test_why_there_is_no_plan_is_in_the_ranks_log_once(job: Job) -> None:
    job.server.note = "ranks run another order than the schedule 1f1b says"
    one = job.rank()
    wait_for(lambda: len(job.server.of("progress")) >= 3, "some reports")
    assert one.step() == CLOCKS
    (told,) = job.warnings()
    assert told == "the server has no plan: ranks run another order than the schedule 1f1b says"


def test_a_server_that_never_answers_does_not_delay_training(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that would be given up after an hour."""
    monkeypatch.setattr(connection, "READ_S", 3600.0)
    job.server.silent.set()
    one = job.rank(wait_s=0.3)
    for _ in range(5):
        assert one.step() == [-1] * 4
    one.optimizer.on_train_end()
    assert job.server.asked == [], "it has answered nothing yet"


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        ("register_job", (500, {"detail": "oh"})),
        ("register_job", (200, b"<html>")),
        ("register_job", (200, {"not": "a string"})),
        ("register_rank", (422, {"detail": [{"loc": ["body"]}]})),
        ("schedule", (503, {"detail": "not all ranks have asked"})),
        ("schedule", (400, {"detail": "the plan has 3 stages"})),
        ("schedule", (200, {"frequencies": "none"})),
        ("progress", (500, b"\xff\xfe")),
        ("progress", (200, [1, 2])),
    ],
)
def test_the_server_is_asked_again_after_any_answer(
    job: Job, path: str, failure: tuple[int, Any]
) -> None:
    job.server.failures[path] = [failure] * 3
    one = job.rank()
    wait_for(lambda: one.step() == CLOCKS, "the plan to come")
    before = len(job.server.of("progress"))
    wait_for(lambda: len(job.server.of("progress")) > before + 3, "progress to be reported")


def test_a_server_without_plans_that_change_is_enough(job: Job) -> None:
    """ml-energy/zeus's knows no progress."""
    job.server.has_progress = False
    one = job.rank()
    wait_for(lambda: job.warnings(), "it to be told")
    assert one.step() == CLOCKS
    time.sleep(0.1)
    assert len(job.server.of("progress")) == 1
    assert len(job.warnings()) == 1


def test_a_store_that_breaks_is_reported(job: Job) -> None:
    job.store.broken = True
    one = job.rank(wait_s=2.0)
    assert one.step() == [-1] * 4
    assert "store of torch.distributed" in job.warnings()[0]
    job.store.broken = False
    wait_for(lambda: one.step() == CLOCKS, "the plan to come")


def test_without_a_store_training_runs_at_default_clocks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(None))
    one = job.rank()
    assert one.step() == [-1] * 4
    assert "no store" in job.warnings()[0]


def test_several_ranks_meet_through_the_store(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is there first, and the server forgets the job later."""
    degrees = {"pp_degree": 2, "world_size": 2, "wait_s": 0.0}
    numbers = iter([5, 5])
    monkeypatch.setattr(optimizer, "_numbers", numbers)
    later = job.rank(rank=1, pp_rank=1, device_id=1, **degrees)
    assert later.step() == [-1] * 4
    first = job.rank(**degrees)
    wait_for(lambda: first.step() == CLOCKS, "rank 0's plan")
    wait_for(lambda: later.step() == CLOCKS, "rank 1's plan")
    assert first.optimizer.job_id == later.optimizer.job_id == "job-0"
    assert len(job.server.of("register_job")) == 1
    with job.server.guard:
        job.server.known.clear()
        job.server.known.add("another")
    wait_for(
        lambda: first.optimizer.job_id == later.optimizer.job_id == "job-1", "the job to be again"
    )


def test_a_rank_whose_gpu_cannot_be_reached_takes_part(
    store: Store,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "/nonexistent/zeusd.sock")
    monkeypatch.setattr(_node, "_client", None)
    made = PipelineFrequencyOptimizer(**ONE, server_url=server.url)
    one = Rank(made)
    one.step()
    assert server.of("register_rank")[0]["available_frequencies"] == []
    assert "training continues at default clocks" in warnings(caplog)[0]
    made.close()


def test_it_is_a_callback_among_others_whose_clocks_end_with_the_training(job: Job) -> None:
    one = job.rank()

    def train() -> None:
        with CallbackSet([one.optimizer]) as callbacks:
            for _ in callbacks.steps(range(3)):
                for name, _ in PLAN:
                    callbacks.on_instruction_begin(name)
                    callbacks.on_instruction_end(name)
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        train()
    assert one.clocks == CLOCKS * 3
    assert not one.controller.working


# ------------------------------------------------------------------------------------ the profiler


def test_instructions_are_profiled_sent_and_then_planned(
    virtual_node: OpenNode,
    store: Store,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = virtual_node("a100:setter_ms=12")
    work = node.nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    server.schedule, server.version = [], 0
    path = tmp_path / "own.csv"
    settings = ProfilerSettings(every=10, floor_mhz=1100, csv_path=path)
    made = PipelineFrequencyOptimizer(**ONE, server_url=server.url, profile=settings)
    made.clock_ns = node.clock
    chance = random.Random(1)

    def step() -> None:
        made.on_step_begin()
        for name, _ in PLAN:
            node.clock.sleep(chance.uniform(0, 0.04))
            made.on_instruction_begin(name)
            work.run(1, name)
            made.on_instruction_end(name)
        made.on_step_end()

    count = 0
    while made.profiling:
        step()
        count += 1
        assert count < 300
    [sent] = wait_for(lambda: server.of("profile"), "the profile to be sent")
    assert [row["frequency"] for row in sent["rows"]] == [1410, 1410, 1260, 1260, 1110, 1110]
    assert sent["instructions"] == [name for name, _ in PLAN]
    assert sent["p2p_power_w"] == pytest.approx(83.64, rel=0.05)
    profile = InstructionProfile.read(path)
    assert [option.frequency for option in profile.options(0, "forward")] == [1410, 1260, 1110]
    assert profile.options(0, "backward")[0].energy_j == pytest.approx(44.58, rel=0.02)
    assert len(path.read_text().splitlines()[0].split(",")) == 9
    # Until there is a plan the GPU runs at its own clocks; then the plan's.
    step()
    assert made.plan_version == 0
    with server.guard:
        server.version, server.update, server.at_iteration = 1, PLAN, 0

    def planned() -> bool:
        step()
        return made.plan_version == 1

    wait_for(planned, "the plan")
    wait_for(lambda: node.nvml.gpu_clock_mhz(0) == 1005, "the plan's last clock")
    assert warnings(caplog) == []
    assert len(server.of("profile")) == 1
    # Who has forgotten the job gets all of it, also after an error that may hide that.
    with server.guard:
        server.known = {"another"}
    assert wait_for(lambda: server.of("profile")[1:], "the profile to be sent again") == [sent]
    with server.guard:
        server.failures["progress"] = [(503, {"detail": "restored from a backup"})]
    wait_for(lambda: len(server.of("register_rank")) == 3, "the rank to register again")
    assert wait_for(lambda: server.of("profile")[2:], "the profile, too") == [sent]
    # A refusal of the profile does not end the reports, which bring plans.
    with server.guard:
        server.failures["profile"] = [(409, {"detail": "this server has plans"})]
        server.known = {"a third"}
        server.version, server.update = 2, OTHER
    wait_for(lambda: made.plan_version == 2 or step(), "the other plan")
    made.close()
    told = "this server has plans; training continues without that"
    assert sum(told in text for text in warnings(caplog)) == 1


def test_a_failed_profile_is_reported_and_training_continues(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        window_ns = None

        def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
            raise OSError("no sensor today")

    monkeypatch.setattr(FrequencyController, "sensor", lambda _: Broken())
    settings = ProfilerSettings(start_after=0, iterations=1, most_iterations=2)
    one = job.rank(profile=settings)
    one.step()
    count = 0
    while one.optimizer.profiling:
        one.step()
        time.sleep(0.05)  # a clock that was set needs time to be reached
        count += 1
        assert count < 100
    assert "no sensor today" in job.warnings()[0]
    assert one.step()[-1] in (-1, 1005)
