"""The journal's entries: their one form in memory, their keys, and their JSON.

`parse` makes an entry of a record; from then on it is typed. `zeusd.records` lists the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from zeus_ipc.controls import SPECS, Control, ControlValue
from zeusd.core.model import ProcessIdentity
from zeusd.restore_rule import OURS

PENDING, LOSS, CEILING = "pending", "loss", "ceiling"
OBSERVED, INITIAL, RESTING = "observed", "initial", "resting"
GPU, DRIVER, STOPPING, QUIESCED = "gpu", "driver", "stopping", "quiesced"
"""First parts of keys."""

LISTED = 16
"""Most values that a record lists; then it starts again with the newest."""

E = TypeVar("E", bound="Recorded")


def key_of(kind: str, gpu: str, control: Control, *names: str) -> str:
    """The key of an entry about one control."""
    return "/".join((kind, gpu, control.value, *names))


_adapters: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: type[Recorded]) -> TypeAdapter[Any]:
    """What validates and dumps entries of a kind; made when the first one comes."""
    made = _adapters.get(kind.__name__)
    return _adapters.setdefault(kind.__name__, TypeAdapter(kind)) if made is None else made


class Recorded:
    """An entry of the journal."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The entry, as its record has it."""
        made: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return made

    @classmethod
    def from_json(cls: type[E], entry: dict[str, Any]) -> E:
        """Reads a record.

        Raises:
            ValueError: It is not one that `to_json` made.
        """
        made: E = _adapter(cls).validate_python(entry)
        return made


@dataclass(frozen=True, slots=True)
class Kept(Recorded):
    """One value of a control."""

    value: ControlValue


@dataclass(frozen=True, slots=True)
class Mark(Recorded):
    """An entry that counts by being there; `since_ns`: from when on, CLOCK_MONOTONIC."""

    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class DriverEntry(Recorded):
    """The load of the driver that all other entries are about, and how the helper reaches it."""

    id: str
    settle_s: float
    vendor: str | None = None
    library: str | None = None
    module: str | None = None
    sysfs: str | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Strange(Recorded):
    """An entry that this zeusd does not understand, and keeps as it is."""

    entry: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The entry as it was found."""
        return self.entry


@dataclass(frozen=True, slots=True)
class CeilingEntry(Recorded):
    """One upper bound.

    Attributes:
        deadline_ns: CLOCK_BOOTTIME time at which `fallback` replaces `value`; None: never.
        fallback: The bound after the deadline; None: the ceiling ends.
        control_group: Of a job whose control group has another name than the ceiling.
    """

    value: ControlValue
    uid: int = 0
    deadline_ns: int | None = None
    fallback: ControlValue | None = None
    control_group: str = ""


@dataclass(frozen=True, slots=True)
class Loss(Recorded):
    """A process whose lease on a control was revoked or expired: it must acquire it again.

    Attributes:
        reason: Why, as a clause: `its heartbeat stopped for 15 s`.
        uid: That process's user.
    """

    gpu: str
    control: Control
    process: ProcessIdentity
    reason: str
    uid: int = -1

    @property
    def key(self) -> str:
        """Key of the entry."""
        return key_of(LOSS, self.gpu, self.control, "{}.{}".format(*self.process))


@dataclass(frozen=True, slots=True)
class PendingRestore(Recorded):
    """One control that is, or may be, away from its restore target.

    Attributes:
        holder: The process whose end causes the restore.
        client: The client object within it, see `Request.client`.
        target: The control's restore target.
        values: Values that zeusd may have written; empty if none.
        doubts: Those that were never confirmed by reading, newest last.
        overwrite: What the restore may overwrite, see `restore_rule`.
        ending: Why the lease has ended, even if its holder is running; empty while it has not.
        command: Name of the holder's program.
        job: The holder's job, empty if none.
    """

    gpu: str
    control: Control
    holder: ProcessIdentity
    uid: int
    client: str
    since_ns: int
    ttl_ns: int
    target: ControlValue
    values: tuple[ControlValue, ...]
    doubts: tuple[ControlValue, ...] = ()
    overwrite: str = OURS
    ending: str = ""
    acquired: bool = False
    recoveries: int = 0
    command: str = ""
    job: str = ""

    @property
    def key(self) -> str:
        """Key of the entry."""
        return key_of(PENDING, self.gpu, self.control)

    def covers(self, other: PendingRestore) -> bool:
        """Whether a restore from this record is correct whenever one from the other record is.

        Then a write that the other announces need not wait for it: both have the same holder and
        target, and this one lists every value of the other, or that value is the target. For a
        control that cannot be read, it is enough that the record says it was changed. A control
        that is shared with other programs needs a record for each change.
        """
        if SPECS[self.control].merges or not self._is_of(other):
            return False
        return (not self.ending or bool(other.ending)) and self._lists(other)

    def leads_to(self, other: PendingRestore) -> bool:
        """Whether the other record is of a restore that this one causes anyway, perhaps to another
        target. Then a full disk does not prevent it: each zeusd derives its own target."""
        mine = self.holder == other.holder and other.ending != ""
        if SPECS[self.control].merges:
            return mine and self.values == other.values
        return mine and self._lists(other)

    def _is_of(self, other: PendingRestore) -> bool:
        return (
            self.target == other.target
            and self.holder == other.holder
            and self.overwrite == other.overwrite
        )

    def _lists(self, other: PendingRestore) -> bool:
        if not SPECS[self.control].readable:
            return bool(self.values)
        # A value that the device may round needs its own record; but a rounded target is a correct
        # restore.
        fine = (self.target, other.target)
        return all(
            value in known or value in fine
            for known, said in ((self.doubts, other.doubts), (self.values, other.values))
            for value in said
        )

    def following(self, earlier: Recorded | None) -> PendingRestore:
        """This record, with the values of an earlier one of the same lease unless they are many: a
        value that a lease sets again then needs no sync."""
        spec = SPECS[self.control]
        if spec.merges or not spec.readable:
            return self
        if not isinstance(earlier, PendingRestore) or not self._is_of(earlier):
            return self
        both = replace(
            self,
            values=_joined(earlier.values, self.values),
            doubts=_joined(earlier.doubts, self.doubts),
        )
        return self if len(both.values) > LISTED else both


def _joined(
    old: tuple[ControlValue, ...], new: tuple[ControlValue, ...]
) -> tuple[ControlValue, ...]:
    return (*(value for value in old if value not in new), *new)


_KINDS: dict[str, type[Recorded]] = {
    PENDING: PendingRestore,
    LOSS: Loss,
    CEILING: CeilingEntry,
    **dict.fromkeys((OBSERVED, INITIAL, RESTING), Kept),
    **dict.fromkeys((GPU, STOPPING, QUIESCED), Mark),
    DRIVER: DriverEntry,
}


def parse(key: str, entry: dict[str, Any]) -> Recorded:
    """Makes an entry of a record; `Strange`, if it cannot be understood."""
    kind = _KINDS.get(key.partition("/")[0])
    if kind is None:
        return Strange(entry)
    try:
        return kind.from_json(entry)
    except (ValidationError, RecursionError):
        return Strange(entry)
