"""`instrument`, with real schedules of torch.distributed.pipelining in one process."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.late import late
from tests.zeus.pipeline_frequency import heard as heard_calls
from zeus.optimizer.pipeline_frequency.placed_schedules import from_actions
from zeus.optimizer.pipeline_frequency.schedules import interleaved_1f1b

torch = late("torch")
dist = late("torch.distributed")
pipelining = late("torch.distributed.pipelining")
ours = late("zeus.optimizer.pipeline_frequency.torch_pipelining")

MICROBATCHES = 4


def table_of(name: str, ranks: int, microbatches: int, parts: int) -> dict[int, list[Any]]:
    """The actions of all ranks, without their processes."""
    schedule = object.__new__(getattr(pipelining.schedules, f"Schedule{name}"))
    values = {"pp_group_size": ranks, "n_local_stages": parts, "_n_microbatches": microbatches}
    values |= {"_num_stages": ranks * parts, "num_stages": ranks * parts, "_stages": [None] * parts}
    values |= {"number_of_rounds": microbatches // ranks, "microbatches_per_round": ranks}
    vars(schedule).update(rank=0, enable_zero_bubble=True, **values)
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


@pytest.mark.parametrize(
    ("name", "parts"),
    [("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 1)]
    + [("LoopedBFS", 2), ("Interleaved1F1B", 2), ("DualPipeV", 2)],
)
def test_torchs_own_action_tables_are_schedules(name: str, parts: int) -> None:
    ranks, microbatches = 4, 8
    pipeline = from_actions(name, table_of(name, ranks, microbatches, parts))
    assert (pipeline.num_stages, pipeline.num_microbatches) == (ranks, microbatches)
    forwards = [one for one in pipeline.instructions if one.name == "forward"]
    assert len(forwards) == ranks * parts * microbatches
    # All that waits for another rank: forwards and backwards of all parts but the first.
    stage = [one.stage for one in pipeline.instructions]
    crossing = sum(stage[a] != stage[b] for a, b in pipeline.arcs)
    same = 1 if name in ("ZBVZeroBubble", "DualPipeV") else 0
    assert crossing == 2 * microbatches * (ranks * parts - 1 - same)


class Heard(heard_calls.Heard):
    """Records the begin and the end of each instruction.

    Attributes:
        computing: Whether it also records when the model computes.
    """

    computing = False

    def on_instruction_begin(self, name: str) -> None:
        self.events.append(f"{name} begins")

    def on_instruction_end(self, name: str) -> None:
        self.events.append(f"{name} ends")

    def instructions(self) -> list[str]:
        """Their names; each ended before the next began."""
        inner = self.events[1:-1]
        begins, ends = inner[::2], inner[1::2]
        names = [event.removesuffix(" begins") for event in begins]
        assert ends == [f"{name} ends" for name in names]
        assert (self.events[0], self.events[-1]) == ("step begins", "step ends")
        return names


def scale(seen: Callable[[], None]) -> torch.nn.Module:
    """Calls `seen` while it computes."""

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen()
            return x * self.weight

    return Scale()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def make(kind: Any, stages: int, heard: Heard) -> tuple[Any, list[pipelining.PipelineStage]]:
    """A schedule of stages that are all in this process."""
    cpu = torch.device("cpu")

    def seen() -> None:
        if heard.computing:
            heard.events.append("computes")

    made = [pipelining.PipelineStage(scale(seen), number, stages, cpu) for number in range(stages)]
    several = stages > 1 or kind is pipelining.ScheduleInterleaved1F1B
    return kind(made if several else made[0], MICROBATCHES, loss_fn=loss), made


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def one(heard: Heard) -> tuple[Any, Any]:
    """1F1B of one stage, instrumented, and the stage."""
    schedule, (stage,) = make(pipelining.Schedule1F1B, 1, heard)
    ours.instrument(schedule, stage, heard)
    return schedule, stage


def train(schedule: Any) -> None:
    schedule.step(torch.ones(MICROBATCHES, 1), target=torch.zeros(MICROBATCHES, 1))


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("Schedule1F1B", ["forward", "backward"] * MICROBATCHES),
        ("ScheduleGPipe", ["forward"] * MICROBATCHES + ["backward"] * MICROBATCHES),
    ],
)
def test_a_step_is_its_instructions_in_their_order(
    heard: Heard, kind: str, order: list[str]
) -> None:
    schedule, (stage,) = make(getattr(pipelining, kind), 1, heard)
    ours.instrument(schedule, stage, heard)
    for _ in range(2):
        heard.events.clear()
        train(schedule)
        assert heard.instructions() == order
    assert stage.submod.weight.grad is not None


def test_an_instruction_holds_its_computing_and_nothing_else_does(
    heard: Heard, one: tuple[Any, Any]
) -> None:
    schedule, _ = one
    train(schedule)  # the first step also tries the model, to learn its shapes
    heard.events.clear()
    heard.computing = True
    train(schedule)
    places = [n for n, event in enumerate(heard.events) if event == "computes"]
    assert len(places) == MICROBATCHES
    for place in places:
        assert heard.events[place - 1 : place + 2] == ["forward begins", "computes", "forward ends"]


def test_stages_that_share_a_process_share_its_instructions(heard: Heard) -> None:
    schedule, stages = make(pipelining.ScheduleInterleaved1F1B, 2, heard)
    ours.instrument(schedule, stages, heard)
    train(schedule)
    counts = collections.Counter(heard.instructions())
    assert counts == {"forward": 2 * MICROBATCHES, "backward": 2 * MICROBATCHES}


def test_a_backward_in_two_parts_is_two_instructions(heard: Heard) -> None:
    schedule, stages = make(pipelining.ScheduleInterleavedZeroBubble, 2, heard)
    ours.instrument(schedule, stages, heard)
    train(schedule)
    counts = collections.Counter(heard.instructions())
    assert counts["forward"] == 2 * MICROBATCHES
    assert counts["backward"] + counts["backward_input"] == 2 * MICROBATCHES
    assert counts["backward_input"] == counts["backward_weight"]
    assert counts["backward_weight"] > 0


def test_an_evaluation_is_a_pause(heard: Heard, one: tuple[Any, Any]) -> None:
    schedule, _ = one
    ones = torch.ones(MICROBATCHES, 1)
    schedule.eval(ones, target=ones)
    with torch.no_grad():
        schedule.eval(ones, target=ones)
    assert heard.events == ["pause", "pause"]
    heard.events.clear()
    train(schedule)  # and training is training again
    assert len(heard.instructions()) == 2 * MICROBATCHES


def test_another_schedule_of_the_same_stage_has_no_instructions(
    heard: Heard, one: tuple[Any, Any]
) -> None:
    _, stage = one
    forward_only = pipelining.ScheduleGPipe(stage, MICROBATCHES)
    with torch.no_grad():
        forward_only.step(torch.ones(MICROBATCHES, 1))
    assert heard.events == []


def test_after_a_step_that_failed_an_evaluation_is_a_pause_and_a_step_a_step(
    heard: Heard, one: tuple[Any, Any]
) -> None:
    schedule, stage = one
    train(schedule)
    forward = stage.submod.forward
    stage.submod.forward = lambda x: x.no_such_thing
    with pytest.raises(RuntimeError, match="failed to run forward"):
        train(schedule)
    stage.submod.forward = forward
    stage.clear_runtime_states()
    schedule._internal_losses.clear()
    heard.events.clear()
    schedule.eval(torch.ones(MICROBATCHES, 1), target=torch.ones(MICROBATCHES, 1))
    assert heard.events == ["pause"]
    heard.events.clear()
    train(schedule)
    assert len(heard.instructions()) == 2 * MICROBATCHES


def test_losses_and_outputs_pass_through(one: tuple[Any, Any]) -> None:
    schedule, _ = one
    losses: list[torch.Tensor] = []
    ones = torch.ones(MICROBATCHES, 1)
    output = schedule.step(ones, target=ones, losses=losses)
    assert output.tolist() == [[2.0]] * MICROBATCHES
    assert [found.item() for found in losses] == [1.0] * MICROBATCHES


@pytest.mark.parametrize("numbers", [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3)])
def test_the_planners_interleaved_order_is_that_of_torch(numbers: tuple[int, int, int]) -> None:
    ranks, microbatches, chunks = numbers
    planned = interleaved_1f1b(ranks, microbatches, chunks)
    names = {"F": "forward", "B": "backward"}
    table = table_of("Interleaved1F1B", ranks, microbatches, chunks)
    for rank, indices in enumerate(planned.stages):
        order = [planned.instructions[index] for index in indices]
        assert [(one.name, one.microbatch, one.chunk) for one in order] == [
            (names[action.computation_type.value], action.microbatch_index, stage // ranks)
            for action in table[rank]
            if action is not None and (stage := action.stage_index) is not None
        ]


class OnGpu:
    """A stage that claims to have a GPU."""

    def __init__(self, events: list[str]) -> None:
        self.device = torch.device("cuda", 1)
        self.events = events

    def forward_one_chunk(self, chunk: int) -> None:
        self.events.append("launched")

    def backward_one_chunk(self, chunk: int) -> None:
        self.events.append("launched")

    def step(self) -> None:
        self.forward_one_chunk(0)
        self.backward_one_chunk(0)


@pytest.mark.parametrize("synchronize", [True, False])
def test_a_gpu_is_waited_for_before_its_clock_is_set(
    heard: Heard, synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: heard.events.append(f"waited for {device}")
    )
    stage = OnGpu(heard.events)
    ours.instrument(stage, stage, heard, synchronize=synchronize)
    stage.step()
    waited = ["waited for cuda:1"] if synchronize else []
    assert heard.events == [
        "step begins",
        *(*waited, "forward begins", "launched", "forward ends"),
        *(*waited, "backward begins", "launched", "backward ends"),
        "step ends",
    ]
