"""A probe's report: one JSON object, with units in its names. Published as `zeusctl.probe/1`.

It has no host name or user, and identifies boards only on request.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from zeusd.energy.probed.counter import CounterEnergy, WindowError
from zeusd.energy.probed.period import UpdatePeriod
from zeusd.energy.probed.window import VisibleWindow

SCHEMA = "zeusctl.probe/1"

POWERS = ("power_instant_mw", "module_power_instant_mw", "power_usage_mw")
COUNTERS = ("energy_field_mj", "energy_counter_mj")
"""Candidates for power and for the energy counter: the first that a GPU offers is used."""


@dataclass(frozen=True)
class Software:
    """The machine that the probe ran on."""

    zeusd: str
    binding: str
    driver: str
    nvml: str | None
    cuda_driver: str | None
    python: str
    kernel: str
    machine: str
    root: bool
    """Whether the probe ran as root."""


@dataclass(frozen=True)
class Answer:
    """Result of one read."""

    call: str
    code: int
    """The driver's return code; 0: it answered."""
    text: str
    """`ok`, or what the code means."""


@dataclass(frozen=True)
class ProbedClocks:
    """Graphics clocks at one memory clock, descending."""

    memory_mhz: int
    gpu_mhz: list[int]


@dataclass(frozen=True)
class ProbedPowerLimits:
    """Power limits, watts."""

    smallest_w: float
    largest_w: float
    default_w: float | None
    requested_w: float | None
    enforced_w: float | None


@dataclass(frozen=True)
class ProbedIdentity:
    """Identity of a board: only with `--identify`."""

    uuid: str | None
    serial: str | None
    pci_address: str | None
    chassis: str | None = None
    """Serial number of the chassis."""
    fabric_cluster: str | None = None
    """UUID of the NVLink fabric, hexadecimal."""


@dataclass(frozen=True)
class Processes:
    """What the driver reports about the processes on a GPU."""

    compute: int | None
    graphics: int | None
    pids_visible: int
    """How many of them exist under the listed pid in this pid namespace."""
    memory_known: int
    """How many of them have their memory listed."""


@dataclass(frozen=True)
class ProbedState:
    """State of the GPU when the probe began."""

    gpu_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: int | None
    utilization_percent: int | None
    memory_used_mib: int | None


@dataclass(frozen=True)
class EstimatedPoint:
    """A GPU's power at a clock."""

    gpu_mhz: int
    memory_mhz: int | None
    power_w: float
    time_ms: int | None
    """The driver's measure of speed."""


@dataclass(frozen=True)
class DriverEstimates:
    """What the driver itself estimates, from its newest samples of the GPU's work."""

    samples: int
    """How many it has."""
    points: list[EstimatedPoint]
    observed: EstimatedPoint | None = None
    """Not estimated, but seen."""
    most_efficient: EstimatedPoint | None = None
    fastest: EstimatedPoint | None = None
    headroom_w: float | None = None
    """Below the power limit."""


@dataclass(frozen=True)
class Latency:
    """How long one call took, over `calls` calls; microseconds."""

    p50_us: float
    p99_us: float
    max_us: float
    calls: int


@dataclass(frozen=True)
class CallLatency:
    """Latency of one call: alone, and while all GPUs are queried."""

    call: str
    alone: Latency | None
    together: Latency | None


@dataclass(frozen=True)
class ProbedSensor:
    """Observations of one sensor.

    Powers are in mW and energies in mJ, as NVML has them. `alone` is its updates while only this
    GPU was read, `together` while all GPUs were, `under_load` during bursts of load. Phases of
    `together` count from one instant, `ProbeReport.phases_from_ns`.
    """

    readings: int
    failures: dict[str, int]
    """Failed readings by return code."""
    reading_gap_ms: float
    """Median time between two readings."""
    longest_gap_ms: float
    first: int | None
    last: int | None
    smallest: int | None
    largest: int | None
    mean: float | None
    resolution: int | None
    """Common divisor of the differences between readings; None: too few differ to tell."""
    alone: UpdatePeriod | None
    together: UpdatePeriod | None
    under_load: UpdatePeriod | None

    @property
    def period(self) -> UpdatePeriod | None:
        """Its updates, if they showed: rounded readings of an idle GPU never change."""
        return self.together or self.alone or self.under_load

    @property
    def moved(self) -> bool:
        """Whether two of its readings ever differed."""
        return self.smallest != self.largest


@dataclass(frozen=True)
class Loaded:
    """Results of known bursts of load."""

    load: str
    bursts: int
    windows: dict[str, VisibleWindow]
    """By sensor; for the energy counter, of its mean power between updates."""
    counter_windows: list[WindowError] = field(default_factory=list)
    """Energy read off the counter at both ends of a burst, against the plateau of power."""


@dataclass(frozen=True)
class Doubt:
    """An impossible answer of the driver, or one that contradicts others."""

    subject: str
    text: str


@dataclass(frozen=True)
class ProbedGpu:
    """One GPU."""

    index: int
    name: str | None
    vbios_version: str | None
    architecture: int | None
    """NVML's number."""
    compute_capability: list[int] | None
    pci_device_id: str | None
    """Device and vendor, hexadecimal."""
    memory_mib: int | None
    modes: dict[str, int | list[int]]
    power_limits: ProbedPowerLimits | None
    clocks: list[ProbedClocks]
    state: ProbedState
    processes: Processes
    answers: dict[str, Answer]
    latency: dict[str, CallLatency]
    sensors: dict[str, ProbedSensor]
    counter: CounterEnergy | None
    """The energy counter beside integrated power, while all GPUs were read."""
    counter_total_j: float | None
    """The counter at the end, counted from its own epoch."""
    loaded: Loaded | None
    doubts: list[Doubt] = field(default_factory=list)
    place: dict[str, dict[str, int]] = field(default_factory=dict)
    """Answers of `platform` and `fabric`, where the driver has them."""
    estimates: DriverEstimates | None = None
    identity: ProbedIdentity | None = None

    @property
    def power_sensor(self) -> str | None:
        """The power sensor to compare with: the instant one if there is one."""
        return next((name for name in POWERS if name in self.sensors), None)

    @property
    def counter_sensor(self) -> str | None:
        """The energy counter's name among the sensors."""
        return next((name for name in COUNTERS if name in self.sensors), None)


@dataclass(frozen=True)
class Unopened:
    """A GPU that this process cannot open."""

    index: int
    code: int
    text: str


@dataclass(frozen=True)
class ProbeReport:
    """A probe's report.

    Attributes:
        at: When the probe ended, ISO 8601.
        simulated: The node that was simulated; None: GPUs of this machine, or a stand-in for them.
        stand_in: Whether the library was given with `--library`: it may be a stand-in.
        seconds: Time that the probe took.
        phases_from_ns: Zero of phases, ns of CLOCK_MONOTONIC.
        uptime_s: Time since the machine was started, if known.
    """

    at: str
    simulated: str | None
    stand_in: bool
    seconds: float
    phases_from_ns: int
    uptime_s: float | None
    software: Software
    gpus: list[ProbedGpu]
    unopened: list[Unopened]
    sandbox: dict[str, list[str]] | None = None
    """With `--in-unit`: `same` lists the reads that give the same answer inside the sandbox of
    zeusd's unit, `differs` describes the others."""

    def to_json(self) -> str:
        """The report as text."""
        body = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(_rounded(body), indent=1)


def now() -> str:
    """This moment in UTC, without the microseconds."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


def from_json(text: str) -> dict[str, Any]:
    """Reads a report that someone sent, as plain data.

    Raises:
        ValueError: It is not a report; the message says why.
    """
    try:
        body = json.loads(text)
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    return body


def _rounded(value: Any) -> Any:
    """Rounds floats to seven significant digits: no figure is more accurate."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
