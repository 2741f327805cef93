"""Reads steps, updates and tenants from files, and checks that their figures are possible.

Files in other units, or of other clocks, would give wrong figures without any error. So what no GPU
does is refused, with the likely reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from zeus.serving.columns import Floats, Ints, StepColumns, Updates, by_end, clipped
from zeus.serving.fit import MOST_PLACES
from zeus_common.tables import Amount, Nanoseconds, TableError, TablePart, Text, read, read_columns

SHORTEST_STEP_NS = 1e5
"""Most steps of an engine are longer: each launches kernels."""
SHORTEST_UPDATE_NS = 1e6
"""Most updates of a sensor are longer; those of GPUs take 20 ms and more."""
USUAL_NS = (1e7, 1e11)
"""A step or update in the right unit probably takes from 10 ms to 100 s."""
LONGEST_NS = 1e12
"""Most steps and updates are shorter."""
POWER_W = (1.0, 20_000.0)
"""Power of the GPUs of an engine."""
COUNTED = 8
"""So many updates whose energies only grow are readings of a counter."""
BRIEF_S = 2.0
"""Power below the least for longer is that of a sensor that failed; a smaller shift between the
files may be the sensor's own delay."""
SHIFTED = 0.7
"""Power and work that correlate so well at a shift, and half as well without, are shifted."""

TIMES = {"microseconds": 1e3, "milliseconds": 1e6, "seconds": 1e9}
"""Units that files have by mistake, in ns."""
ENERGIES = {"millijoules": 1e-3, "kilojoules": 1e3, "microjoules": 1e-6}
"""The same, in J."""


class StepRow(NamedTuple):
    """A request in a step."""

    step: Text
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    request: Text
    phase: Literal["prefill", "decode"]
    tokens: Amount
    context: Amount


class UpdateRow(NamedTuple):
    """An update of a sensor."""

    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    joules: Amount
    seen_begin_ns: Nanoseconds | None = None
    seen_end_ns: Nanoseconds | None = None
    clock_mhz: Amount | None = None


class TenantRow(NamedTuple):
    """The tenant of a request."""

    request: Text
    tenant: Text


def read_steps(path: Path) -> tuple[StepColumns, list[str]]:
    """Reads steps, one row per request and step.

    Returns:
        The steps in the order of their ends, and the names of the requests in the order in which
        the file has them.

    Raises:
        TableError: The file, or a row of it, is wrong.
    """
    names: dict[str, int] = {}
    labels: dict[str, int] = {}
    table = _whole(path, StepRow, {"step": labels, "request": names})
    of = table.columns
    step, request, begin, end = (of[name] for name in ("step", "request", "begin_ns", "end_ns"))
    _each(begin <= end, table, lambda n: f"begin_ns {begin[n]} is after end_ns {end[n]}")
    _consistent(table, list(names))
    in_steps = np.argsort(step, kind="stable")
    first = np.searchsorted(step[in_steps], np.arange(len(labels) + 1))
    heads = in_steps[first[:-1]]
    _usual(path, "steps", end[heads] - begin[heads], SHORTEST_STEP_NS)
    steps = StepColumns(
        begin[heads],
        end[heads],
        first.astype(np.int64),
        request[in_steps],
        (of["phase"] == "prefill")[in_steps],
        of["tokens"][in_steps],
        of["context"][in_steps],
    )
    return by_end(steps), list(names)


def read_updates(path: Path) -> Updates:
    """Reads a sensor's updates, in any order.

    Raises:
        TableError: The file, or a row of it, is wrong.
    """
    table = _whole(path, UpdateRow, {})
    begin, end, joules = (table.columns[name] for name in ("begin_ns", "end_ns", "joules"))
    _each(begin < end, table, lambda n: f"begin_ns {begin[n]} is not before end_ns {end[n]}")
    first = table.columns.get("seen_begin_ns", begin)
    last = table.columns.get("seen_end_ns", end)
    first, last = (
        np.where(seen == _EMPTY_NS, whole, seen) for seen, whole in ((first, begin), (last, end))
    )
    _each(
        (begin <= first) & (first < last) & (last <= end),
        table,
        lambda n: f"the seen part {first[n]} to {last[n]} is not within the update",
    )
    order = np.argsort(begin, kind="stable")
    over = np.flatnonzero(begin[order][1:] < end[order][:-1])
    if over.size:
        earlier, later = sorted(order[over[0] : over[0] + 2], key=lambda n: table.lines[n])
        table.wrong(later, f"the update overlaps the one of {table.word} {table.lines[earlier]}")
    clock = table.columns.get("clock_mhz", np.full(begin.size, np.nan))
    updates = Updates(*(part[order] for part in (begin, end, joules, first, last, clock)))
    _usual(path, "updates", end - begin, SHORTEST_UPDATE_NS)
    _possible(table, updates, order)
    return updates


def read_tenants(path: Path) -> dict[str, str]:
    """Reads the tenant of each request.

    Raises:
        TableError: The file, or a row of it, is wrong.
    """
    tenants: dict[str, str] = {}
    for place, (request, tenant) in read(path, TenantRow):
        if tenants.setdefault(request, tenant) != tenant:
            raise TableError(f"{place}: request {request!r} has two tenants")
    return tenants


def check_clocks(steps: StepColumns, updates: Updates) -> None:
    """Checks that the times of both are of one clock.

    Raises:
        TableError: They do not overlap, or work and power fit at another shift only.
    """
    if not (steps.count and updates.count):
        return
    spans = [(int(one.begin_ns.min()), int(one.end_ns.max())) for one in (steps, updates)]
    begin, end = (max(one[0] for one in spans), min(one[1] for one in spans))
    if begin >= end:
        (step, step_end), (update, update_end) = spans
        raise TableError(
            f"the steps ({step} to {step_end} ns) and the updates ({update} to {update_end} ns) do "
            "not overlap; give the times of both in nanoseconds of one clock"
        )
    shift_s = _shift_s(steps, updates, min(one[0] for one in spans), max(one[1] for one in spans))
    if shift_s:
        raise TableError(
            f"the power rises {abs(shift_s):.3g} s {'after' if shift_s > 0 else 'before'} the "
            "steps, and is low while they run; give the times of both files of one clock"
        )


# ---------------------------------------------------------------------------------------- internals

_EMPTY_NS = np.iinfo(np.int64).min


def _whole(path: Path, row: Callable[..., Any], numbered: dict[str, dict[str, int]]) -> TablePart:
    """A table as arrays; the texts of some columns as numbers, in the order of appearance."""
    parts: list[dict[str, Any]] = []
    lines, word = [np.zeros(0, np.int64)], "line"
    for part in read_columns(path, row):
        word = part.word
        lines.append(np.array(part.lines, np.int64))
        arrays: dict[str, Any] = {}
        for name, cells in part.columns.items():
            if name in numbered:
                add, size = numbered[name].setdefault, numbered[name].__len__
                arrays[name] = np.array([add(cell, size()) for cell in cells], np.int64)
            elif name.endswith("_ns"):
                known = (_EMPTY_NS if cell is None else cell for cell in cells)
                arrays[name] = np.fromiter(known, np.int64, len(cells))
            else:
                arrays[name] = np.array(cells, None if name == "phase" else np.float64)
        parts.append(arrays)
    if not parts:
        raise TableError(f"{path} has no rows, so there is nothing to attribute")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TablePart(path, word, np.concatenate(lines).tolist(), columns)


def _each(good: Any, table: TablePart, say: Callable[[int], str]) -> None:
    if not good.all():
        n = int(np.argmin(good))
        table.wrong(n, say(n))


def _consistent(table: TablePart, names: list[str]) -> None:
    """Checks that rows of one step agree on its instants and name each request once."""
    columns = (table.columns[name] for name in ("step", "request", "begin_ns", "end_ns"))
    step, request, begin, end = columns
    order = np.lexsort((request, step))
    before, after = order[:-1], order[1:]
    same = step[before] == step[after]
    twice = np.flatnonzero(same & (request[before] == request[after]))
    apart = np.flatnonzero(same & ((begin[before] != begin[after]) | (end[before] != end[after])))
    for wrong, what in (
        (twice, "request {!r} is in this step twice"),
        (apart, "begin_ns or end_ns is not that of another row of the same step"),
    ):
        if wrong.size:
            n = max(before[wrong[0]], after[wrong[0]], key=lambda n: table.lines[n])
            table.wrong(n, what.format(names[request[n]]))


def _usual(path: Path, what: str, lengths_ns: Ints, least_ns: float) -> None:
    """Checks the unit of times by the usual length of what they delimit."""
    length_ns = float(np.median(lengths_ns))
    if least_ns <= length_ns <= LONGEST_NS:
        return
    unit = _likely(length_ns, USUAL_NS, TIMES)
    why = f"are the times {unit}?" if unit else "are they of another unit? Or of two clocks?"
    raise TableError(
        f"{path}: {what} are {length_ns:.3g} ns long, but times are in nanoseconds; {why}"
    )


def _likely(value: float, usual: tuple[float, float], units: dict[str, float]) -> str:
    """The unit in which a value would be a usual one; empty: none."""
    return next((unit for unit, one in units.items() if usual[0] <= value * one <= usual[1]), "")


def _possible(table: TablePart, updates: Updates, order: Ints) -> None:
    """Checks the unit of energies by the power."""
    grows = np.diff(updates.joules)
    if grows.size >= COUNTED and (grows >= 0).all() and (grows > 0).mean() > 0.5:
        raise TableError(
            f"{table.path}: joules only grow; give the energy of each update, not the readings of "
            "a counter"
        )
    power_w = updates.joules / updates.length_s
    usual_w = float(np.median(power_w))
    unit = _likely(usual_w, POWER_W, {"": 1.0, **ENERGIES})
    if unit:
        raise TableError(
            f"{table.path}: the power is {usual_w:.3g} W, which no GPU draws; are the joules "
            f"{unit}?"
        )
    _each(
        power_w[np.argsort(order)] <= POWER_W[1],
        table,
        lambda n: (
            f"joules is {table.columns['joules'][n]:g}, in an update of "
            f"{(table.columns['end_ns'][n] - table.columns['begin_ns'][n]) / 1e9:g} s; no GPU "
            f"draws more than {POWER_W[1]:g} W"
        ),
    )
    if usual_w < POWER_W[0]:
        raise TableError(f"{table.path}: the power is {usual_w:.3g} W, which is too low for a GPU")
    silent = np.concatenate([[False], power_w < POWER_W[0], [False]])
    for first, end in np.flatnonzero(np.diff(silent)).reshape(-1, 2).tolist():
        length_s = (updates.end_ns[end - 1] - updates.begin_ns[first]) / 1e9
        if length_s > BRIEF_S:
            table.wrong(
                order[first],
                f"the power is below {POWER_W[0]:g} W for {length_s:.3g} s from here; leave out "
                "updates in which the sensor failed",
            )


def _shift_s(steps: StepColumns, updates: Updates, begin: int, end: int) -> float:
    """The time by which power follows work, if that is far and they do not fit without; else 0."""
    period_ns = float(np.median(updates.end_ns - updates.begin_ns))
    period_ns = max(period_ns, (end - begin) / MOST_PLACES)
    edges = np.arange(2 + int((end - begin) / period_ns), dtype=np.float64) * period_ns
    work, works = _per_bin(edges, begin, clipped(steps))
    power, powers = _per_bin(edges, begin, updates)
    size = 2 * work.size

    def products(one: Floats, other: Floats) -> Any:
        """Sums of products at each shift of the other."""
        return np.fft.irfft(np.conj(np.fft.rfft(one, size)) * np.fft.rfft(other, size), size)

    norms = np.sqrt(np.maximum(products(work**2, powers) * products(works, power**2), 0.0))
    overlap = products(works, powers)
    # A shift that leaves little in common fits by chance.
    known = (overlap > overlap.max() / 3) & (norms > 1e-9 * norms.max())
    fits = np.where(known, products(work, power) / np.where(known, norms, 1.0), 0.0)
    shifts_s = np.fft.fftfreq(size, 1 / size) * period_ns / 1e9
    best = int(np.argmax(fits))
    without = fits[np.abs(shifts_s) <= BRIEF_S].max()
    return float(shifts_s[best]) if fits[best] >= SHIFTED and without < fits[best] / 2 else 0.0


def _per_bin(edges_ns: Floats, base_ns: int, spans: StepColumns | Updates) -> tuple[Floats, Floats]:
    """Divides time at work, or energy, among bins; each less the mean, and where it is known."""
    amounts = spans.joules if isinstance(spans, Updates) else spans.end_ns - spans.begin_ns
    after = np.cumsum(amounts)
    instants = np.stack([spans.begin_ns - base_ns, spans.end_ns - base_ns], 1).ravel()
    amount = np.interp(edges_ns, instants, np.stack([after - amounts, after], 1).ravel())
    known = ((edges_ns[1:] > instants[0]) & (edges_ns[:-1] < instants[-1])).astype(np.float64)
    per_bin = np.diff(amount)
    return (per_bin - per_bin.sum() / known.sum()) * known, known
