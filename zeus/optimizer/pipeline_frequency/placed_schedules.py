"""Schedules with a placement of the model's parts on stages: zero-bubble, V-shaped, bidirectional.

The model is divided into parts, and a stage has several of them: every n-th (looped), its own and
the mirrored one (V), or, with two directions, one of each direction. A schedule of
`torch.distributed.pipelining` is such a placement with an order for each rank, its action table.

Sources: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, and "Pipeline Parallelism with
Controllable Memory", NeurIPS 2024; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (DualPipe);
J. Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023 (looped BFS).
"""

from __future__ import annotations

import csv
import heapq
import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import MOST_BYTES, read_model, why
from zeus.optimizer.pipeline_frequency.schedules import (
    BACKWARD,
    FORWARD,
    Graph,
    Instruction,
    Pipeline,
    Way,
    arcs_of,
    check_size,
    gpipe,
    interleaved_1f1b,
    looped,
    one_f_one_b,
)
from zeus_common.text import sentence
from zeus_ipc.parsing import read_file

BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"

_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_NAMES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}

_DURATION = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}
"""Assumed times for the order; real times differ, but orders are fixed before these are known."""


def ordered(name: str, num_stages: int, ways: Sequence[Way], *, split: bool) -> Pipeline:
    """A schedule in which every stage always runs the most urgent work that is ready.

    A backward precedes a forward. The weights' part of a backward runs when nothing else is ready
    or too many microbatches are in flight.
    """
    backward = BACKWARD_INPUT if split else BACKWARD
    last = BACKWARD_WEIGHT if split else BACKWARD
    arcs = arcs_of(ways, backward)
    every = {one for arc in arcs for one in arc}
    after: dict[Instruction, list[Instruction]] = {one: [] for one in every}
    waits = dict.fromkeys(every, 0)
    for tail, head in arcs:
        after[tail].append(head)
        waits[head] += 1
    if split:
        for one in [one for one in every if one.name == BACKWARD_INPUT]:
            weights = Instruction(one.stage, BACKWARD_WEIGHT, one.microbatch, one.chunk)
            after[one].append(weights)
            after[weights], waits[weights] = [], 1
    way_of = {n: way for way in ways for n in way.microbatches}
    held = {(id(way), stage): 0 for way in ways for stage in range(num_stages)}
    admitted: set[tuple[int, int]] = set()
    ready: list[set[Instruction]] = [set() for _ in range(num_stages)]
    for one in every:
        if not waits[one]:
            ready[one.stage].add(one)
    orders: list[list[Instruction]] = [[] for _ in range(num_stages)]
    busy = [False] * num_stages
    running: list[tuple[int, int, Instruction]] = []
    number = itertools.count()
    now = 0

    def may_begin(one: Instruction) -> bool:
        # A microbatch that passes a stage twice keeps its slot from the first time on; otherwise
        # two of them could wait for each other.
        if one.name != FORWARD or (one.stage, one.microbatch) in admitted:
            return True
        way = way_of[one.microbatch]
        visits = way.stages.count(one.stage)
        return held[id(way), one.stage] + visits <= way.in_flight[one.stage]

    def urgency(one: Instruction) -> tuple[int, int, int]:
        kind = {backward: 0, FORWARD: 1, BACKWARD_WEIGHT: 2}[one.name]
        return kind, one.microbatch, -one.chunk

    while True:
        for stage in range(num_stages):
            if busy[stage]:
                continue
            able = [one for one in ready[stage] if may_begin(one)]
            if not able:
                continue
            one = min(able, key=urgency)
            ready[stage].remove(one)
            orders[stage].append(one)
            busy[stage] = True
            way = way_of[one.microbatch]
            if one.name == FORWARD and (stage, one.microbatch) not in admitted:
                admitted.add((stage, one.microbatch))
                held[id(way), stage] += way.stages.count(stage)
            heapq.heappush(running, (now + _DURATION[one.name], next(number), one))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, _, one = heapq.heappop(running)
            busy[one.stage] = False
            if one.name == last:
                held[id(way_of[one.microbatch]), one.stage] -= 1
            for head in after[one]:
                waits[head] -= 1
                if not waits[head]:
                    ready[head.stage].add(head)
    return Pipeline(name, orders, arcs, len(way_of))


def zb_h1(num_stages: int, num_microbatches: int) -> Pipeline:
    """ZB-H1: the memory of 1F1B, with the weights' part of the backward while a stage would
    wait."""
    check_size(num_stages, 2 * num_microbatches)
    there = tuple(range(num_stages))
    way = Way(there, (0,) * num_stages, range(num_microbatches), (num_stages,) * num_stages)
    return ordered("zb-h1", num_stages, [way], split=True)


def zbv(num_stages: int, num_microbatches: int) -> Pipeline:
    """ZBV: two chunks on each stage, in a V shape, with split backwards."""
    return ordered("zbv", num_stages, _v(num_stages, num_microbatches), split=True)


def v_shape(num_stages: int, num_microbatches: int) -> Pipeline:
    """Two chunks on each stage, in a V shape, with whole backwards."""
    return ordered("v-shape", num_stages, _v(num_stages, num_microbatches, 4), split=False)


def dualpipe(num_stages: int, num_microbatches: int) -> Pipeline:
    """DualPipe: half of the microbatches in either direction; each stage holds a part for both.

    A forward and a backward that DualPipe overlaps are two instructions here.
    """
    check_size(num_stages, 2 * num_microbatches)
    if num_microbatches % 2:
        raise PipelineFrequencyError(
            f"DualPipe needs an even number of microbatches, not {num_microbatches}"
        )
    half = num_microbatches // 2
    there, room = tuple(range(num_stages)), tuple(range(num_stages, 0, -1))
    ways = [
        Way(there, (0,) * num_stages, range(half), room),
        Way(there[::-1], (1,) * num_stages, range(half, num_microbatches), room[::-1]),
    ]
    return ordered("dualpipe", num_stages, ways, split=True)


def looped_bfs(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Pipeline:
    """Looped BFS: every chunk runs all its forwards before the next chunk, and likewise its
    backwards."""
    check_size(num_stages, num_microbatches * num_chunks)
    stages = [
        [
            *(
                Instruction(stage, FORWARD, n, chunk)
                for chunk in range(num_chunks)
                for n in range(num_microbatches)
            ),
            *(
                Instruction(stage, BACKWARD, n, chunk)
                for chunk in reversed(range(num_chunks))
                for n in reversed(range(num_microbatches))
            ),
        ]
        for stage in range(num_stages)
    ]
    return Pipeline(
        "looped-bfs",
        stages,
        arcs_of([looped(num_stages, num_microbatches, num_chunks)]),
        num_microbatches,
    )


def from_actions(
    name: str, table: Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]
) -> Pipeline:
    """The schedule of an action table of `torch.distributed.pipelining`.

    Args:
        table: For each rank its actions in order: `schedule.pipeline_order`, or rows of a CSV file.
            An action is, or prints as, a part of the model, a letter and a microbatch: `0F3` (or
            `B` backward, `I` backward for the input, `W` for the weights). Of two that overlap,
            `(0F3;1B2)OVERLAP_F_B`, the first runs first. Others (communication, sharding) and gaps
            are left out.

    Raises:
        PipelineFrequencyError: It is not such a table, or an action is missing.
    """
    rows = [table[rank] for rank in sorted(table)] if isinstance(table, Mapping) else list(table)
    by_stage = [
        [
            (int(part), _NAMES[letter], int(microbatch))
            for action in row
            if action is not None
            for part, letter, microbatch in _ACTION.findall(str(action))
        ]
        for row in rows
    ]
    holder: dict[int, int] = {}
    for stage, actions in enumerate(by_stage):
        for part, _, _ in actions:
            if holder.setdefault(part, stage) != stage:
                raise PipelineFrequencyError(
                    f"part {part} of the model runs on ranks {holder[part]} and {stage}; a "
                    "table in which ranks share a part cannot be planned"
                )
    parts = sorted(holder)
    if not parts or parts != list(range(len(parts))):
        raise PipelineFrequencyError(
            f"the table has actions of the parts {parts} of the model; it needs 0 to the last, in "
            "actions such as 0F3"
        )
    chunk: dict[int, int] = {}
    for part in parts:
        chunk[part] = sum(holder[other] == holder[part] for other in range(part))
    orders = [
        [Instruction(stage, what, n, chunk[part]) for part, what, n in actions]
        for stage, actions in enumerate(by_stage)
    ]
    names = {one.name for order in orders for one in order}
    count = 1 + max(one.microbatch for order in orders for one in order)
    there = set[Instruction]().union(*orders)
    backwards = names & {BACKWARD, BACKWARD_INPUT}
    either = filter(None, ({FORWARD}, backwards))
    for kinds, part, n in itertools.product(either, parts, range(count)):
        if there.isdisjoint(Instruction(holder[part], one, n, chunk[part]) for one in kinds):
            raise PipelineFrequencyError(
                f"the table has no {min(kinds)} of microbatch {n} for part {part} of the model"
            )
    ends = [(holder[part], chunk[part]) for part in parts]

    def at(end: tuple[int, int], kinds: Collection[str], n: int) -> list[Instruction]:
        # A table may split some backwards and leave others whole.
        every = (Instruction(end[0], kind, n, end[1]) for kind in sorted(kinds))
        return [one for one in every if one in there]

    way = [*((end, {FORWARD}) for end in ends), *((end, backwards) for end in ends[::-1])]
    arcs: list[tuple[Instruction, Instruction]] = []
    for (one, other), n in itertools.product(itertools.pairwise(way), range(count)):
        arcs += itertools.product(at(*one, n), at(*other, n))
    return Pipeline(name, orders, arcs, count)


def read_schedule(path: str | os.PathLike[str]) -> Pipeline:
    """Reads a schedule of your own.

    A file that ends with `.csv` is an action table, as `torch.distributed.pipelining` writes it;
    any other is a `schedules.Graph` as JSON.

    Raises:
        PipelineFrequencyError: It is not valid; the message says why.
    """
    name, stem = os.fspath(path), Path(path).stem
    try:
        if not name.endswith(".csv"):
            return Pipeline.of_graph(read_model(path, Graph), stem)
        text = read_file(path, MOST_BYTES).decode()
        return from_actions(stem, [row for row in csv.reader(text.splitlines()) if any(row)])
    except PipelineFrequencyError as error:
        raise PipelineFrequencyError(f"the schedule {name}: {error.message}") from None
    except ValidationError as error:
        raise PipelineFrequencyError(
            f"the schedule {name} is not as expected ({sentence(error)}); it needs "
            '{"stages": [[["forward", 0], ...], ...], "arcs": [[[0, "forward", 0], [1, "forward", '
            "0]], ...]}"
        ) from None
    except (OSError, ValueError) as error:
        raise PipelineFrequencyError(
            f"the schedule {name} cannot be read ({why(error)}); give 1f1b, gpipe, interleaved, "
            "or a JSON or CSV file"
        ) from None


def _v(num_stages: int, num_microbatches: int, room: int = 2) -> list[Way]:
    check_size(num_stages, 4 * num_microbatches)
    there = tuple(range(num_stages))
    chunks = (0,) * num_stages + (1,) * num_stages
    in_flight = (room * num_stages,) * num_stages
    return [Way(there + there[::-1], chunks, range(num_microbatches), in_flight)]


BY_NAME: dict[str, Callable[..., Pipeline]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved_1f1b,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "v-shape": v_shape,
    "zb-h1": zb_h1,
    "zbv": zbv,
    "dualpipe": dualpipe,
}
"""Builders by name."""

_CHUNKED = ("interleaved", "interleaved-1f1b", "looped-bfs")


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 2
) -> Pipeline:
    """A schedule by its name in `BY_NAME`.

    Args:
        num_chunks: Model chunks per stage, for schedules that have several.
    """
    chunks = (num_chunks,) if name in _CHUNKED else ()
    return BY_NAME[name](num_stages, num_microbatches, *chunks)
