"""Format of messages in the store: JSON, mW, short names for frequent fields."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from binascii import crc32
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zeus_common.text import sentence
from zeus_fleet.messages import (
    Budget,
    BudgetDomain,
    Grant,
    GrantPlan,
    LimitEvent,
    NodeReport,
    NodeWork,
)
from zeus_fleet.profiles import ProgressProfile, monotone
from zeus_fleet.quantities import MAX_MW, Power
from zeus_ipc.parsing import Malformed, parse

MAX_SHARED = 2 << 20
"""Largest budget, or part of a plan, bytes; etcd accepts 1.5 MiB."""

MAX_NAME = 200
"""Most characters of a job's name that are kept."""

MAX_WORKS = 256
"""Most jobs of a node, and most points of a job's profile."""

MAX_REPORTED = 2**61
"""Largest number and epoch of a heartbeat. Those of plans go on from it, and may be larger."""

DIGITS = 20
"""Digits of a heartbeat's number, which is padded so that the store can compare two of them."""


def number_key(number: int) -> bytes:
    """The prefix of heartbeat `number`, which compares below that of any later one."""
    return b"%0*d" % (DIGITS, number)


def heartbeat_bytes(beat: NodeReport) -> bytes:
    """A heartbeat."""
    rest = [beat.epoch, beat.held_mw, beat.floor_mw, beat.capacity_mw, beat.wanted_mw]
    return number_key(beat.number) + json.dumps([*rest, beat.stuck_mw, beat.drawn_mw]).encode()


def heartbeat_from(data: bytes) -> NodeReport:
    """The heartbeat that `heartbeat_bytes` wrote.

    Raises:
        Malformed: It is none.
    """
    with _reading("a heartbeat"):
        number, (epoch, *powers_mw) = data[:DIGITS], parse(data[DIGITS:])
        if len(number) != DIGITS or not number.isdigit():
            raise Malformed("it has no number")
        beat = NodeReport(int(number), _whole(epoch, -1, MAX_REPORTED), *map(_mw, powers_mw))
        _whole(beat.number, 0, MAX_REPORTED)
        return beat


def works_bytes(works: Iterable[NodeWork]) -> bytes:
    """Encodes the work of a node."""
    rows = []
    for work in works:
        row: dict[str, Any] = {"job": work.job, "kind": work.kind, "gpus": work.gpus}
        row |= {"min_mw": work.min_mw, "max_mw": work.max_mw}
        if work.profile is not None:
            progress = [round(one, 4) for one in work.profile.progress]
            row["profile"] = [work.profile.limits_mw, progress]
        if work.measuring:
            row["measuring"] = True
        if work.needs_mw is not None:
            row["needs_mw"] = work.needs_mw
        rows.append(row)
    return _json(rows)


def works_from(data: bytes) -> tuple[NodeWork, ...]:
    """Decodes the result of `works_bytes`. An invalid profile counts as unknown.

    Raises:
        Malformed: It is not a result of `works_bytes`.
    """
    with _reading("the work of a node"):
        rows = parse(data)
        if len(rows) > MAX_WORKS:
            raise Malformed(f"it has more than {MAX_WORKS} jobs")
        return tuple(_work_of(row) for row in rows)


def _work_of(row: dict[str, Any]) -> NodeWork:
    gpus = tuple(_whole(gpu, 0, 4096) for gpu in row["gpus"])
    if not gpus:
        raise Malformed("a job has no GPUs")
    return NodeWork(
        str(row["job"])[:MAX_NAME],
        str(row["kind"])[:MAX_NAME],
        gpus,
        _mw(row["min_mw"]),
        _mw(row["max_mw"]),
        profile_of(*row["profile"]) if "profile" in row else None,
        bool(row.get("measuring")),
        _mw(row["needs_mw"]) if "needs_mw" in row else None,
    )


def profile_of(limits_mw: Iterable[int], progress: Iterable[float]) -> ProgressProfile | None:
    """A job's published profile; None if it is not usable.

    If a higher limit has less progress, which is noise, both get their mean.
    """
    try:
        rates = monotone(map(float, itertools.islice(progress, MAX_WORKS + 1)))
        if len(rates) > MAX_WORKS:
            return None
        if not all(map(math.isfinite, rates)):
            return None
        return ProgressProfile(
            tuple(map(_mw, limits_mw)), tuple(rate / rates[-1] for rate in rates)
        )
    except (ValueError, IndexError, ZeroDivisionError):
        return None


def limits_bytes(limits_mw: Mapping[int, int]) -> bytes:
    """Encodes the division of a node's grant, by the GPUs' positions."""
    return _json({str(gpu): limit for gpu, limit in limits_mw.items()})


def limits_from(data: bytes) -> dict[int, int]:
    """Decodes the result of `limits_bytes`.

    Raises:
        Malformed: It is none.
    """
    with _reading("limits"):
        return {int(gpu): _mw(limit) for gpu, limit in parse(data).items()}


def piece_of(node: str) -> int:
    """The number of the piece of a plan with a node's grant."""
    # Number of keys of a plan's grants: a node reads one, a transaction writes all.
    return crc32(node.encode()) % 64


def plan_bytes(plan: GrantPlan) -> bytes:
    """Encodes a plan without its grants."""
    return _json({"token": plan.token, "spare_mw": dict(plan.spare_mw)})


def pieces_of(plan: GrantPlan | None) -> dict[int, bytes]:
    """Encodes the grants of a plan."""
    parts: dict[int, dict[str, list[int]]] = {}
    for node, grant in ({} if plan is None else plan.grants).items():
        part = parts.setdefault(piece_of(node), {})
        part[node] = [grant.epoch, grant.limit_mw, grant.high_mw]
    return {number: _json(part) for number, part in parts.items()}


def plan_from(data: bytes, pieces: Iterable[bytes]) -> GrantPlan:
    """Decodes the plan from `plan_bytes` and `pieces_of`, with the grants of these pieces.

    Raises:
        Malformed: It is none.
    """
    with _reading("the plan"):
        read = parse(data, MAX_SHARED)
        grants = {
            node: Grant(_whole(epoch, 0, 2**62), _mw(limit), _mw(high))
            for piece in pieces
            for node, (epoch, limit, high) in parse(piece, MAX_SHARED).items()
        }
        spare_mw = {name: _mw(spare) for name, spare in read["spare_mw"].items()}
        return GrantPlan(_whole(read["token"], 0, 2**63), spare_mw, grants)


def budget_bytes(budget: Budget) -> bytes:
    """A budget."""
    domains = [
        {
            "name": domain.name,
            "limit_mw": domain.limit_mw,
            "reserve_mw": domain.reserve_mw,
            "nodes": sorted(domain.nodes),
        }
        for domain in budget.domains
    ]
    fields: dict[str, Any] = {"domains": domains, "floors_mw": dict(budget.floors_mw)}
    fields["leaving"] = sorted(budget.leaving)
    if budget.standing_mw is not None:
        fields["standing_mw"] = budget.standing_mw
        fields["events"] = [asdict(event) for event in budget.events]
    return _json(fields)


def budget_from(data: bytes) -> Budget:
    """Decodes the budget from `budget_bytes`.

    Raises:
        Malformed: It is none.
    """
    with _reading("the budget"):
        read = parse(data, MAX_SHARED)
        domains = tuple(
            BudgetDomain(
                one["name"], _mw(one["limit_mw"]), frozenset(one["nodes"]), _mw(one["reserve_mw"])
            )
            for one in read["domains"]
        )
        events = tuple(_event_of(**event) for event in read.get("events", ()))
        leaving, standing = frozenset(read["leaving"]), read.get("standing_mw")
        floors = {node: _mw(floor) for node, floor in read["floors_mw"].items()}
        return Budget(domains, floors, leaving, None if standing is None else _mw(standing), events)


def _event_of(
    name: str, limit_mw: int, start_s: float, end_s: float, ramp_mw_per_s: int = 0
) -> LimitEvent:
    # Latest time of an event, in the year 9892.
    if not max(abs(start_s), abs(end_s)) <= 2.5e11:
        raise Malformed("an event's time is out of range")
    return LimitEvent(str(name), _mw(limit_mw), float(start_s), float(end_s), _mw(ramp_mw_per_s))


class _Domain(BaseModel):
    """A domain of a budget in TOML."""

    model_config = ConfigDict(extra="forbid")

    name: str
    limit_w: Power
    nodes: frozenset[str]
    reserve_w: Power = 0


class _BudgetTable(BaseModel):
    """A budget in TOML; see `docs/operate/fleet.md`."""

    model_config = ConfigDict(extra="forbid")

    name: str = "site"
    limit_w: Power
    nodes: dict[str, Power]
    reserve_w: Power = 0
    domain: list[_Domain] = []
    leaving: frozenset[str] = frozenset()


def budget_from_table(table: dict[str, Any]) -> Budget:
    """Parses an operator's budget in TOML, with power in W.

    Raises:
        ValueError: It is none; the sentence says why.
    """
    try:
        read = _BudgetTable.model_validate(table)
    except ValidationError as error:
        raise ValueError(
            f"the budget is not as in docs/operate/fleet.md: {sentence(error)}"
        ) from None
    if strange := read.leaving - read.nodes.keys():
        raise ValueError(f"{min(strange)} is leaving, but has no floor; list it in [nodes]")
    site = BudgetDomain(read.name, read.limit_w, frozenset(read.nodes), read.reserve_w)
    others = (BudgetDomain(one.name, one.limit_w, one.nodes, one.reserve_w) for one in read.domain)
    return Budget((site, *others), read.nodes, read.leaving)


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Any error of the block means that a value is not what it should be."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, ArithmeticError, ValueError) as error:
        raise Malformed(f"not {what}: {error!s:.200}") from None


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Malformed(f"{value!r:.40} is no whole number from {least} to {most}")
    return value


def _mw(value: object) -> int:
    return _whole(value, 0, MAX_MW)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
