"""Pipeline schedules: the instructions of an iteration and their dependencies.

A schedule is a graph. Each stage runs its instructions in a fixed order. In addition, a forward
waits for the previous stage, and a backward for the next stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.profile import InstructionName, Number

FORWARD, BACKWARD = "forward", "backward"

MOST_INSTRUCTIONS = 200_000
"""Largest plausible schedule."""


class Instruction(NamedTuple):
    """One instruction of an iteration.

    Attributes:
        stage: The stage that runs it, from 0.
        name: Name as in the profile: `forward`, `backward`.
        microbatch: Its microbatch.
        chunk: The stage's model chunk.
    """

    stage: Number
    name: InstructionName
    microbatch: Number = 0
    chunk: Number = 0


class _Listed(NamedTuple):
    """An instruction where its stage is known."""

    name: InstructionName
    microbatch: Number
    chunk: Number = 0


class Graph(BaseModel):
    """The graph of one iteration as a file has it.

    `{"stages": [[["forward", 0], ["backward", 0]], ...], "arcs": [[[0, "forward", 0], [1,
    "forward", 0]], ...]}` has an order for each stage, and pairs of instructions with their stages,
    of which the second waits for the first. The last element of an instruction may be its chunk.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    name: str = ""
    num_microbatches: Annotated[int, Field(ge=1)] | None = None
    stages: list[list[_Listed]] = Field(min_length=1)
    arcs: list[tuple[Instruction, Instruction]]


class Pipeline:
    """The graph of one iteration.

    Args:
        stages: The instructions of each stage in the order in which they run.
        arcs: Pairs (before, after): dependencies between instructions of different stages.

    Attributes:
        instructions: All instructions, stage by stage.
        arcs: Dependencies as pairs of their indices, including the stages' own orders.
        levels: Groups of indices that can be processed together: each group only depends on earlier
            groups.

    Raises:
        PipelineFrequencyError: The graph has a cycle, which is a deadlock.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Sequence[Instruction]],
        arcs: Iterable[tuple[Instruction, Instruction]],
        num_microbatches: int,
    ) -> None:
        self.name = name
        self.num_microbatches = num_microbatches
        self.instructions = tuple(instruction for stage in stages for instruction in stage)
        self.stages: list[list[int]] = []
        index: dict[Instruction, int] = {}
        for number, stage in enumerate(stages):
            if not stage:
                raise PipelineFrequencyError(f"stage {number} of the schedule has no instruction")
            self.stages.append(list(range(len(index), len(index) + len(stage))))
            for instruction in stage:
                if instruction.stage != number:
                    raise PipelineFrequencyError(
                        f"{instruction} is listed under stage {number}; list it under its own"
                    )
                if instruction in index:
                    raise PipelineFrequencyError(f"{instruction} is listed twice in the schedule")
                index[instruction] = len(index)
        pairs: dict[tuple[int, int], None] = {}
        for stage_indices in self.stages:
            for pair in itertools.pairwise(stage_indices):
                pairs[pair] = None
        for before, after in arcs:
            for end in (before, after):
                if end not in index:
                    raise PipelineFrequencyError(f"an arc names {end}, which no stage runs")
            pairs[index[before], index[after]] = None
        self.arcs = tuple(pairs)
        self.levels = levels_of(len(self.instructions), self.arcs)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def graph(self) -> Graph:
        """The graph as a file has it."""
        own = {pair for places in self.stages for pair in itertools.pairwise(places)}
        every = self.instructions
        return Graph.model_construct(
            name=self.name,
            num_microbatches=self.num_microbatches,
            stages=[[_Listed(*every[place][1:]) for place in places] for places in self.stages],
            arcs=[(every[a], every[b]) for a, b in self.arcs if (a, b) not in own],
        )

    @classmethod
    def of_graph(cls, graph: Graph, name: str = "own") -> Pipeline:
        """Checks a graph.

        Args:
            name: The schedule's name if the graph has none.

        Raises:
            PipelineFrequencyError: It is not valid; the message says why.
        """
        stages = [
            [Instruction(stage, *item) for item in order]
            for stage, order in enumerate(graph.stages)
        ]
        microbatches = len({item.microbatch for order in stages for item in order})
        return cls(graph.name or name, stages, graph.arcs, graph.num_microbatches or microbatches)


@dataclass(frozen=True)
class Way:
    """The path of some microbatches through the stages.

    Attributes:
        stages: The stage of each part of the model, from the first part to the last.
        chunks: The chunk number of each part in its stage.
        in_flight: Most of these microbatches whose activations each stage may hold.
    """

    stages: tuple[int, ...]
    chunks: tuple[int, ...]
    microbatches: range
    in_flight: tuple[int, ...] = ()


def looped(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Way:
    """Every microbatch passes all stages once for each chunk."""
    chunks = tuple(chunk for chunk in range(num_chunks) for _ in range(num_stages))
    return Way(tuple(range(num_stages)) * num_chunks, chunks, range(num_microbatches))


def arcs_of(ways: Iterable[Way], backward: str = BACKWARD) -> list[tuple[Instruction, Instruction]]:
    """The dependencies on these paths."""
    arcs: list[tuple[Instruction, Instruction]] = []
    for path in ways:
        for n in path.microbatches:
            there = [
                Instruction(stage, FORWARD, n, chunk)
                for stage, chunk in zip(path.stages, path.chunks, strict=True)
            ]
            back = [Instruction(one.stage, backward, n, one.chunk) for one in reversed(there)]
            whole = [*there, *back]
            arcs += itertools.pairwise(whole)
    return arcs


def one_f_one_b(num_stages: int, num_microbatches: int) -> Pipeline:
    """1F1B: after a warm-up each stage alternates one backward with one forward.

    Source: D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
    """
    return _in_turn("1f1b", num_stages, num_microbatches, 1)


def gpipe(num_stages: int, num_microbatches: int) -> Pipeline:
    """GPipe: each stage runs all forwards, then all backwards in the same order.

    Source: Y. Huang et al., "GPipe", NeurIPS 2019.
    """
    check_size(num_stages, num_microbatches)
    stages = [
        [
            Instruction(stage, name, n)
            for name in ("forward", "backward")
            for n in range(num_microbatches)
        ]
        for stage in range(num_stages)
    ]
    return Pipeline(
        "gpipe", stages, arcs_of([looped(num_stages, num_microbatches)]), num_microbatches
    )


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Pipeline:
    """Interleaved 1F1B: each stage has several chunks of the model, and runs them in turn.

    Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", SC 2021.

    Args:
        num_microbatches: A multiple of `num_stages`.
        num_chunks: Chunks of each stage; the model has `num_stages * num_chunks` parts.

    Raises:
        PipelineFrequencyError: The numbers are not compatible.
    """
    if num_chunks < 1:
        raise PipelineFrequencyError(f"a stage has at least one chunk, not {num_chunks}")
    if num_chunks > 1 and num_stages > 0 and num_microbatches % num_stages:
        raise PipelineFrequencyError(
            f"an interleaved schedule needs a number of microbatches that {num_stages} stages "
            f"divide, not {num_microbatches}"
        )
    return _in_turn("interleaved-1f1b", num_stages, num_microbatches, num_chunks)


def _in_turn(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Pipeline:
    """Chunks in turn, one backward after one forward; with one chunk, 1F1B."""
    total = num_microbatches * num_chunks
    check_size(num_stages, total)

    def work(stage: int, name: str, k: int) -> Instruction:
        turn, place = divmod(k, num_stages * num_chunks)
        chunk, within = divmod(place, num_stages)
        if name == "backward":
            chunk = num_chunks - 1 - chunk
        return Instruction(stage, name, turn * num_stages + within, chunk)

    stages = []
    for stage in range(num_stages):
        warm = num_stages - stage - 1
        if num_chunks > 1:
            warm = 2 * warm + (num_chunks - 1) * num_stages
        # The first forward of the steady phase comes before its backward.
        warm = min(total, warm + 1)
        order = [work(stage, "forward", k) for k in range(warm)]
        for k in range(total):
            order.append(work(stage, "backward", k))
            if warm + k < total:
                order.append(work(stage, "forward", warm + k))
        stages.append(order)
    arcs = arcs_of([looped(num_stages, num_microbatches, num_chunks)])
    return Pipeline(name, stages, arcs, num_microbatches)


def whole_iteration(
    pipeline: Pipeline, after: Sequence[str], before: Sequence[str] = ()
) -> Pipeline:
    """Adds instructions that every stage runs once in an iteration.

    Args:
        after: Names of each stage's instructions at the end, such as `all_reduce`,
            `optimizer_step`.
        before: Names of each stage's instructions at the beginning, such as `load`.
    """
    stages = []
    for number, places in enumerate(pipeline.stages):
        first = [Instruction(number, name) for name in before]
        last = [Instruction(number, name) for name in after]
        stages.append([*first, *(pipeline.instructions[place] for place in places), *last])
    arcs = [(pipeline.instructions[a], pipeline.instructions[b]) for a, b in pipeline.arcs]
    return Pipeline(pipeline.name, stages, arcs, pipeline.num_microbatches)


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Raises PipelineFrequencyError if the numbers are not valid, or implausibly large."""
    for count, what in ((num_stages, "stages"), (num_microbatches, "microbatches")):
        if count < 1:
            raise PipelineFrequencyError(f"a pipeline has at least one of its {what}, not {count}")
    if 2 * num_stages * num_microbatches > MOST_INSTRUCTIONS:
        raise PipelineFrequencyError(
            f"{num_stages} stages with {num_microbatches} microbatches have more than "
            f"{MOST_INSTRUCTIONS} instructions; are the numbers right?"
        )


def levels_of(count: int, arcs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of a graph's nodes, each of which only depends on earlier groups.

    Raises:
        PipelineFrequencyError: The graph has a cycle.
    """
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for tail, head in arcs:
        after[tail].append(head)
        waits[head] += 1
    levels: list[tuple[int, ...]] = []
    ready = [index for index in range(count) if not waits[index]]
    done = 0
    while ready:
        levels.append(tuple(ready))
        done += len(ready)
        following = []
        for tail in ready:
            for head in after[tail]:
                waits[head] -= 1
                if not waits[head]:
                    following.append(head)
        ready = following
    if done < count:
        raise PipelineFrequencyError(
            "the schedule's instructions have circular dependencies; check its order and arcs"
        )
    return tuple(levels)
