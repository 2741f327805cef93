"""The JSON output of each verb. Once released, fields of a schema are added and never changed.

Units are in the names: watts, joules, megahertz, degrees Celsius, seconds. Times are ISO 8601 with
their zone. None: the GPU does not offer it, or the reader may not see it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from zeus_common.checks import Check
from zeus_common.text import split
from zeusctl.columns import Columns, Entity, column, columns_of
from zeusctl.entities import (
    Allocation,
    Ceiling,
    Event,
    Gpu,
    KnownGpu,
    Lease,
    Measured,
    Module,
    Node,
    Outcome,
    Permitted,
    Process,
    SetValue,
    UsedEnergy,
)

REPORTS: dict[str, type[ReportHeader]] = {}
"""Reports by the name in their schema."""


def _plain(one: Any) -> Any:
    """A time or an entity as JSON has it."""
    return one.isoformat() if isinstance(one, datetime) else vars(one)


class ReportHeader(Entity):
    """The fields that begin every report."""

    SCHEMA: ClassVar[str]

    schema: str = ""
    """`zeusctl.NAME/1`."""
    at: datetime
    """When it was made."""

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.SCHEMA = f"zeusctl.{name}/1"
        REPORTS[name] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", self.SCHEMA)

    def json(self) -> str:
        """The report in one line. Pydantic would first build a validator that nothing needs."""
        form: Any = {"default": _plain, "separators": (",", ":"), "allow_nan": False}
        return json.dumps(self, ensure_ascii=False, **form)


class StatusReport(ReportHeader, name="status"):
    """`zeusctl status`."""

    node: Node
    gpus: list[Gpu]
    leases: list[Lease]
    processes: list[Process] | None
    """With --processes only."""
    ceilings: list[Ceiling]
    modules: list[Module]
    """Superchips, each once."""


class ProcessesReport(ReportHeader, name="processes"):
    """`zeusctl processes`."""

    processes: list[Process]
    errors: list[str]
    """Why those of other GPUs cannot be listed."""


class LeasesReport(ReportHeader, name="leases"):
    """`zeusctl leases`."""

    leases: list[Lease]
    ceilings: list[Ceiling]


class GpusReport(ReportHeader, name="gpus"):
    """`zeusctl gpus`."""

    gpus: list[KnownGpu]


def _split(report: ShowReport) -> str:
    return split(report.known.runtime_indices) if report.known.mig_enabled else ""


def _clocks(control: str) -> Callable[[ShowReport], str]:
    """The text of the clocks that a control chooses from."""

    def text(report: ShowReport) -> str:
        mhz = getattr(report, f"{control}_mhz")
        if not mhz:
            return "-"
        text = ", ".join(map(str, sorted(mhz))) + " MHz"
        if len(mhz) > 4:
            text = f"{min(mhz)} to {max(mhz)} MHz in {len(mhz)} steps"
        return text if control in report.known.controls else f"{text}; they cannot be locked"

    return text


class ShowReport(ReportHeader, name="show"):
    """`zeusctl show`."""

    known: KnownGpu = column(title="split", page=_split)
    now: Gpu = column(title="profiles", page=lambda one: ", ".join(one.known.power_profiles))
    leases: list[Lease]
    you_may: list[Permitted]
    memory_clocks_mhz: list[int] = column(title="memory clocks", page=_clocks("memory_clocks"))
    gpu_clocks_mhz: list[int] = column(title="graphics clocks", page=_clocks("gpu_clocks"))
    """At the highest memory clock."""
    energy_last_hour_j: float | None = column(title="energy, last hour")
    processes: list[Process]
    ceilings: list[Ceiling]


SHOW: Columns[ShowReport] = columns_of(ShowReport)


class SetReport(ReportHeader, name="set"):
    """`zeusctl set`, when the values are in force."""

    settings: list[SetValue]
    kept: str
    """command: while it runs. process: until Ctrl-C. persisted: until `zeusctl reset`. ceiling: as
    a bound for everyone (--ceiling)."""


class ResetReport(ReportHeader, name="reset"):
    """`zeusctl reset`."""

    outcomes: list[Outcome]
    revoked: list[Lease]
    """Leases that others lost as a result."""


class ReleaseReport(ReportHeader, name="release"):
    """`zeusctl release`."""

    released: int


class MeasureReport(ReportHeader, name="measure"):
    """`zeusctl measure`."""

    command: list[str]
    exit_code: int
    time_s: float
    sources: list[Measured]
    gpu_energy_j: float | None
    """Of all GPUs together."""


class FileWritten(ReportHeader, name="done"):
    """`zeusctl record`, `plot` and `man`: the file written."""

    path: str
    rows: int
    """Samples, points or pages."""


class QuiesceReport(ReportHeader, name="quiesce"):
    """`zeusctl quiesce`."""

    quiesced: bool
    """Whether all device files of the driver are closed."""
    open: list[str]
    pending_restores: list[str]
    """Controls that could not be restored before closing."""


class ResumeReport(ReportHeader, name="resume"):
    """`zeusctl resume`."""

    gpus: list[KnownGpu]


class EnergyReport(ReportHeader, name="energy"):
    """`zeusctl energy`."""

    by: str
    sums: list[UsedEnergy]
    metered_j: float | None
    """The GPUs' counters; None: the request excluded something."""
    begins: datetime | None
    """The first day in the ledger; None: it is empty."""


class AllocateReport(ReportHeader, name="allocate"):
    """`zeusctl allocate`."""

    kind: str
    name: str
    gpus: list[int]


class AllocationsReport(ReportHeader, name="allocations"):
    """`zeusctl allocations`."""

    allocations: list[Allocation]


class DeallocateReport(ReportHeader, name="deallocate"):
    """`zeusctl deallocate`."""

    kind: str
    name: str
    ended: int
    """How many GPUs it held."""
    energy: list[UsedEnergy]
    """Its energy, run by run."""


class ForgetReport(ReportHeader, name="forget"):
    """`zeusctl forget`."""

    accounts: int
    """Number of the user's accounts."""


class DoctorReport(ReportHeader, name="doctor"):
    """`zeusctl doctor`."""

    healthy: bool
    checks: list[Check]


class ComparisonReport(ReportHeader, name="comparison"):
    """`zeusctl receipt --compare`."""

    comparable: bool
    reasons: list[str]
    """Why not."""
    note: str
    """What to consider before their energies are compared. Empty: nothing."""


class AuditReport(ReportHeader, name="audit"):
    """`zeusctl audit`."""

    events: list[Event]
    dropped: int
    """Number of older records that only zeusd's log still has."""


class Failed(ReportHeader, name="error"):
    """The output of a verb that fails with `--json`; the message is on standard error too."""

    code: str
    """As in the protocol, or `usage` or `failed`."""
    message: str
    exit_code: int


def schemas() -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each published JSON schema, including those of probe and exercise."""
    from zeus_common import receipts
    from zeusctl.exercise import report as exercise
    from zeusd.energy.probed import report as probe

    return {
        **{name: partial(_schema, kind, kind.SCHEMA) for name, kind in REPORTS.items()},
        "receipt": partial(_schema, receipts.Receipt, receipts.SCHEMA),
        "probe": partial(_schema, probe.ProbeReport, probe.SCHEMA),
        "exercise": partial(_schema, exercise.ExerciseReport, exercise.SCHEMA),
    }


def _schema(report: type, name: str) -> dict[str, Any]:
    """A report's schema; `$id` has the version."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(report).json_schema(mode="serialization")
    own = {"schema": {"const": name, "title": "Schema", "type": "string"}}
    return {"$id": name, **schema, "properties": own | schema["properties"] | own}
