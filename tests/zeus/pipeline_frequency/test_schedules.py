from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.zeus.pipeline_frequency.timeline import timeline
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.placed_schedules import BY_NAME, from_actions, read_schedule
from zeus.optimizer.pipeline_frequency.profile import INSTRUCTIONS, InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import (
    Graph,
    Instruction,
    Pipeline,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    whole_iteration,
)


def order(pipeline: Pipeline, stage: int) -> str:
    found = [pipeline.instructions[place] for place in pipeline.stages[stage]]
    return " ".join(
        f"{one.name[0]}{one.microbatch}" + (f".{one.chunk}" if one.chunk else "") for one in found
    )


def equal(stages: int) -> InstructionProfile:
    """Forwards take 1 s and backwards 2 s."""
    return InstructionProfile(
        {
            (stage, name, 0): [Option(1000, 1.0 + number, 100.0)]
            for stage in range(stages)
            for number, name in enumerate(INSTRUCTIONS)
        }
    )


def test_1f1b() -> None:
    pipeline = one_f_one_b(3, 4)
    assert order(pipeline, 0) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert order(pipeline, 1) == "f0 f1 b0 f2 b1 f3 b2 b3"
    assert order(pipeline, 2) == "f0 b0 f1 b1 f2 b2 f3 b3"


def test_fewer_microbatches_than_stages() -> None:
    pipeline = one_f_one_b(4, 2)
    assert [order(pipeline, stage) for stage in range(4)] == [
        "f0 f1 b0 b1", "f0 f1 b0 b1", "f0 f1 b0 b1", "f0 b0 f1 b1"
    ]  # fmt: skip


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (4, 2), (4, 16)])
def test_equal_stages_take_the_time_that_the_papers_say(
    make: object, stages: int, microbatches: int
) -> None:
    """(microbatches + stages - 1) times one forward and one backward."""
    pipeline = make(stages, microbatches)
    end = max(run.end_s for run in timeline(equal(stages), pipeline))
    assert end == pytest.approx(3 * (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 2, 2), (4, 8, 2), (4, 16, 4)])
def test_interleaving_shrinks_the_bubble(stages: int, microbatches: int, chunks: int) -> None:
    """The bubble is the stages - 1 of 1F1B over the chunks: Narayanan et al., SC 2021."""
    pipeline = interleaved_1f1b(stages, microbatches, chunks)
    end = max(run.end_s for run in timeline(equal(stages), pipeline))
    assert end == pytest.approx(3 * (microbatches * chunks + stages - 1))


def test_interleaved_order() -> None:
    pipeline = interleaved_1f1b(2, 2, 2)
    assert order(pipeline, 0) == "f0 f1 f0.1 f1.1 b0.1 b1.1 b0 b1"
    assert order(pipeline, 1) == "f0 f1 f0.1 b0.1 f1.1 b1.1 b0 b1"


def test_one_chunk_is_1f1b() -> None:
    once, plain = interleaved_1f1b(3, 5, 1), one_f_one_b(3, 5)
    assert [order(once, stage) for stage in range(3)] == [order(plain, n) for n in range(3)]
    assert set(once.arcs) == set(plain.arcs)


def test_bad_numbers_are_reported() -> None:
    with pytest.raises(PipelineFrequencyError, match="at least one of its stages"):
        one_f_one_b(0, 4)
    with pytest.raises(PipelineFrequencyError, match="at least one of its microbatches"):
        gpipe(2, 0)
    with pytest.raises(PipelineFrequencyError, match="that 4 stages divide, not 6"):
        interleaved_1f1b(4, 6, 2)
    with pytest.raises(PipelineFrequencyError, match="are the numbers right"):
        one_f_one_b(1000, 1000)


def test_a_custom_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "name": "mine",
                "stages": [
                    [["forward", 0], ["forward", 1], ["backward", 1], ["backward", 0]],
                    [["forward", 1], ["backward", 1], ["forward", 0], ["backward", 0]],
                ],
                "arcs": [
                    [[0, "forward", 1], [1, "forward", 1]],
                    [[0, "forward", 0], [1, "forward", 0]],
                    [[1, "backward", 1], [0, "backward", 1]],
                    [[1, "backward", 0], [0, "backward", 0]],
                ],
            }
        )
    )
    pipeline = read_schedule(path)
    assert (pipeline.name, pipeline.num_stages, pipeline.num_microbatches) == ("mine", 2, 2)
    runs = {run.instruction: run for run in timeline(equal(2), pipeline)}
    assert runs[Instruction(1, "forward", 1)].start_s == 2.0
    assert runs[Instruction(0, "backward", 0)].end_s == 10.0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "it is not valid"),
        ('{"stages": []}', "not as expected"),
        ('{"stages": [[["forward", 0]], []], "arcs": []}', "stage 1 of the schedule has no"),
        ('{"stages": [[["forward", 0], ["forward", 0]]], "arcs": []}', "listed twice"),
        (
            '{"stages": [[["forward", 0]]], "arcs": [[[0, "forward", 0], [0, "backward", 0]]]}',
            "which no stage runs",
        ),
        (
            '{"stages": [[["forward", 0], ["backward", 0]]], '
            '"arcs": [[[0, "backward", 0], [0, "forward", 0]]]}',
            "circular dependencies",
        ),
    ],
)
def test_a_bad_schedule_is_reported(tmp_path: Path, data: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(data)
    with pytest.raises(PipelineFrequencyError, match=says) as error:
        read_schedule(path)
    assert "bad.json" in error.value.message


@pytest.mark.parametrize("name", ["pipe", "gone"])
def test_a_schedule_that_cannot_be_read_is_not_called_malformed(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")  # as of a shell's <(...); nobody writes to it
    says = rf"{name} cannot be read \((it is not a regular file; save|No such file)"
    with pytest.raises(PipelineFrequencyError, match=says):
        read_schedule(tmp_path / name)


UNITS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


def span(pipeline: Pipeline, parts: int) -> float:
    """Iteration time where a microbatch's forward takes a stage 1 s, and its backward 2 s."""
    options = {
        (stage, name, 0): [Option(1000, time_s / parts, 100.0)]
        for stage in range(pipeline.num_stages)
        for name, time_s in UNITS.items()
    }
    return max(run.end_s for run in timeline(InstructionProfile(options), pipeline))


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (4, 8), (3, 12), (8, 8)])
def test_every_microbatch_goes_there_and_back(name: str, stages: int, microbatches: int) -> None:
    pipeline = BY_NAME[name](stages, microbatches)
    assert pipeline.num_stages == stages
    graph = Graph.model_validate_json(pipeline.graph.model_dump_json())
    assert Pipeline.of_graph(graph).arcs == pipeline.arcs
    work = {(one.name, one.microbatch, one.chunk) for one in pipeline.instructions}
    chunks = 1 + max(one.chunk for one in pipeline.instructions)
    split = any(one.name == "backward_weight" for one in pipeline.instructions)
    names = ["forward", "backward_input", "backward_weight"] if split else ["forward", "backward"]
    if name == "dualpipe":
        half = microbatches // 2
        each = {(n, int(n >= half)) for n in range(microbatches)}
    else:
        each = {(n, chunk) for n in range(microbatches) for chunk in range(chunks)}
    assert work == {(what, n, chunk) for what in names for n, chunk in each}
    for order in pipeline.stages:
        assert len(order) == len(names) * len(each)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16), (4, 32)])
def test_zero_bubble_schedules_wait_less_than_1f1b(stages: int, microbatches: int) -> None:
    busy = 3.0 * microbatches
    bubble = span(one_f_one_b(stages, microbatches), 1) - busy
    assert span(BY_NAME["zb-h1"](stages, microbatches), 1) - busy <= 0.6 * bubble
    assert span(BY_NAME["zbv"](stages, microbatches), 2) - busy <= 0.3 * bubble
    assert span(BY_NAME["dualpipe"](stages, microbatches), 1) - busy <= 0.6 * bubble


def test_no_stage_holds_more_than_it_may() -> None:
    """ZB-H1 keeps to the memory of 1F1B's first stage, ZBV to as many chunks of half the size."""
    for name, most in (("zb-h1", 4), ("zbv", 8)):
        pipeline = BY_NAME[name](4, 12)
        for order in pipeline.stages:
            held, peak = 0, 0
            for place in order:
                what = pipeline.instructions[place].name
                held += (what == "forward") - (what == "backward_weight")
                peak = max(peak, held)
            assert peak <= most


def test_the_whole_iteration_has_what_comes_once() -> None:
    pipeline = whole_iteration(one_f_one_b(2, 2), ["all_reduce", "optimizer_step"], ["load"])
    assert order(pipeline, 1) == "l0 f0 b0 f1 b1 a0 o0"
    assert pipeline.num_microbatches == 2


def test_an_action_table_is_read_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0SEND_F1,,0I0,0W0,0B1\n,1F0,1I0,(1F1;1W0)OVERLAP_F_B,1B1\n")
    pipeline = read_schedule(path)
    assert pipeline.name == "mine"
    assert order(pipeline, 0) == "f0 f1 b0 b0 b1"
    places = {one: place for place, one in enumerate(pipeline.instructions)}
    for before, after in (
        (Instruction(0, "forward", 1), Instruction(1, "forward", 1)),
        (Instruction(1, "backward_input", 0), Instruction(0, "backward_input", 0)),
        (Instruction(1, "backward", 1), Instruction(0, "backward", 1)),
    ):
        assert (places[before], places[after]) in pipeline.arcs


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([["0F0"], ["0F1"]], "runs on ranks 0 and 1"),
        ([["0F0"], ["2F0"]], "needs 0 to the last"),
        ([["UNSHARD"]], "needs 0 to the last"),
        ([["0F0", "0B0"], ["1B0", "1F0"]], "circular dependencies"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1"]], "no backward of microbatch 1 for"),
        ([["0F0", "0F1", "0I0", "0I1"], ["1F0", "1I0", "1I1"]], "no forward of microbatch 1 for"),
        ([["0F0", "0F2"], ["1F0", "1F2"]], "no forward of microbatch 1 for part 0"),
    ],
)
def test_a_bad_action_table_is_reported(table: list[list[str]], says: str) -> None:
    with pytest.raises(PipelineFrequencyError, match=says):
        from_actions("bad", table)
