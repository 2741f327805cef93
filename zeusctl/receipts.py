"""Receipts as text and in the formats of benchmarks, and what makes two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zeus_common.receipts import GpuReceipt, Receipt
from zeus_common.text import duration, number
from zeusctl.entities import span


def differences(first: Receipt, second: Receipt) -> list[str]:
    """Why two receipts are not comparable; empty: they are."""
    texts = [
        f"{reason}, in the {place}"
        for place, one in (("first", first), ("second", second))
        for reason in one.reasons
    ]
    if len(first.gpus) != len(second.gpus):
        return [*texts, f"{len(first.gpus)} GPUs in the first, {len(second.gpus)} in the second"]
    for what, one, other in _conditions(first, second):
        if one != other:
            texts.append(
                f"{what}: {one or 'unknown'} in the first, {other or 'unknown'} in the second"
            )
    return texts


def _conditions(first: Receipt, second: Receipt) -> Iterator[tuple[str, object, object]]:
    yield "driver", first.driver, second.driver
    yield "simulated GPUs", first.simulated or "no", second.simulated or "no"
    for one, other in zip(first.gpus, second.gpus, strict=True):
        gpu = f"GPU {one.index}"
        yield f"{gpu}, product", one.name, other.name
        yield f"{gpu}, VBIOS", one.vbios, other.vbios
        yield f"{gpu}, method", one.method, other.method
        yield f"{gpu}, power limit", _limit_text(one), _limit_text(other)
        yield f"{gpu}, in force", _in_force(one), _in_force(other)


def _in_force(one: GpuReceipt) -> str:
    texts = [
        f"{each.control} {each.new}"
        for each in one.changes
        if each.before and each.new not in ("unlocked", "none")
    ]
    return ", ".join(sorted(text for text in texts if "power_limit" not in text)) or "nothing set"


def _limit_text(one: GpuReceipt) -> str:
    watts = sorted({limit.power_limit_w for limit in one.power_limits})
    return " to ".join(f"{each:g} W" for each in dict.fromkeys([*watts[:1], *watts[-1:]]))


def lengths_note(first: Receipt, second: Receipt) -> str:
    """What to consider before the energies of comparable receipts are; empty: nothing."""
    # A change of energy is shown to 0.1 %.
    if math.isclose(first.time_s, second.time_s, rel_tol=0.0005):
        return ""
    one, other = (number(each.time_s, "s", 3) for each in (first, second))
    return (
        f"the intervals differ in length, {one} and {other}: compare their energies only if both "
        "did the same work, otherwise their mean power"
    )


def energy_and_power(first: Receipt, second: Receipt) -> Iterator[str]:
    """Energy and mean power of two valid receipts, side by side."""
    one_j, other_j = first.energy_j or 0.0, second.energy_j or 0.0
    one_w, other_w = one_j / first.time_s, other_j / second.time_s
    for what, unit, one, other in (
        ("energy", "J", one_j, other_j),
        ("mean power", "W", one_w, other_w),
    ):
        more = f" ({100 * (other / one - 1):+.1f} %)" if one else ""
        yield f"{what}: {one:.1f} {unit} in the first, {other:.1f} {unit} in the second{more}"


def inferencex(one: Receipt) -> dict[str, Any]:
    """The power fields of an aggregate of InferenceX (`power_metric_schema_version` 2), without
    those by token: a receipt knows no tokens.
    """
    fields: dict[str, Any] = {"power_metric_schema_version": 2, "power_valid": int(one.valid)}
    if one.valid and one.energy_j is not None:
        watts = one.energy_j / one.time_s
        fields["avg_power_w"] = round(watts / len(one.gpus), 3)
        fields["avg_total_gpu_power_w"] = round(watts, 3)
        fields["total_gpu_energy_j"] = round(one.energy_j, 3)
    return fields


def aiperf(one: Receipt) -> dict[str, Any]:
    """The telemetry of an export of AIPerf 0.8 (`TelemetryExportData`): energy and mean power."""
    gpus = {}
    for gpu in one.gpus:
        metrics: dict[str, Any] = {}
        if gpu.energy_j is not None:
            metrics["energy_consumption"] = {"unit": "MJ", "avg": gpu.energy_j / 1e6}
            metrics["gpu_power_usage"] = {"unit": "W", "avg": gpu.average_power_w}
        names = {"gpu_index": gpu.index, "gpu_name": gpu.name, "gpu_uuid": gpu.uuid}
        gpus[f"gpu_{gpu.index}"] = {**names, "hostname": one.host, "metrics": metrics}
    times = {"start_time": one.since.isoformat(), "end_time": one.until.isoformat()}
    endpoints = {"endpoints_configured": ["zeusd"], "endpoints_successful": ["zeusd"]}
    return {"summary": {**endpoints, **times}, "endpoints": {"zeusd": {"gpus": gpus}}}


def page(one: Receipt) -> Iterator[str]:
    """The receipt as text."""
    short = one.time_s < 60
    since, until = (
        instant.isoformat(" ", "milliseconds" if short else "seconds")
        for instant in (one.since, one.until)
    )
    took = number(one.time_s, "s", 3) if short else duration(one.time_s)
    yield f"Receipt: {since} to {until} ({took}) on {one.host}"
    also = [f"zeusd {one.zeusd}", f"driver {one.driver or 'unknown'}"]
    also += [one.subject] if one.subject else []
    yield ", ".join([*also, "simulated GPUs"] if one.simulated else also)
    yield ""
    for gpu in one.gpus:
        energy = "unknown"
        if gpu.energy_j is not None:
            energy = (
                f"{gpu.energy_j:.1f} J ± {gpu.uncertainty_j:.1f} J, {gpu.average_power_w:.1f} W"
            )
        parts = [gpu.name, *([f"VBIOS {gpu.vbios}"] if gpu.vbios else []), f"by {gpu.method}"]
        parts += [f"limit {_limit_text(gpu)}"] if gpu.power_limits else []
        parts += [span(mhz[0], mhz[-1], "MHz")] if (mhz := gpu.gpu_clock_mhz) else []
        yield f"GPU {gpu.index}  {energy}  ({', '.join(parts)})"
        for reason, seconds in gpu.limited_s.items():
            if seconds:
                yield f"       limited by {reason} for {seconds:.1f} s"
        for user in gpu.occupants:
            yield f"       {'' if user.own else 'also '}used by {user.who}"
    if len(one.gpus) > 1 and one.energy_j is not None:
        yield f"all    {one.energy_j:.1f} J ± {one.uncertainty_j:.1f} J"
    yield ""
    yield "valid" if one.valid else "NOT VALID:"
    yield from (f"- {reason}" for reason in one.reasons)
