"""Restores what a zeusd that is gone left pending. Standard library only: no zeusd is needed.

Ceilings with a deadline fall back, too, where no zeusd will keep the deadline.

`zeusd restore` runs it, and the units run this file itself with the system's Python, so that it
works when the installation is broken. It may run any number of times, beside anything: while a
zeusd is running, it does nothing.

What a journal looks like is defined once for the daemon and for this helper, in `zeusd.records`;
what counts as the same process is defined here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

if not __package__:
    # Run as a file: what it shares with zeusd lies beside it, installed or in a checkout. Last on
    # the path, so that nothing there stands in for a module of the standard library.
    _here = Path(__file__).resolve().parent
    sys.path.append(str(_here.parent if _here.name == "zeusd" else _here))

from zeus_ipc.controls import SPECS, Control
from zeusd.records import Entry, Replayed, doubts_of, record, replay
from zeusd.restore_rule import (
    HIGHER,
    OURS,
    Failed,
    Look,
    Plan,
    Put,
    Result,
    Step,
    Value,
    read_settled,
    restore_steps,
    write_merged,
    write_verified,
)

DEFAULT_STATE_DIR = "/run/zeusd/state"
EMBEDDED_STATE_DIR = "/run/zeusd/embedded"
JOURNAL_NAME = "journal"
EMBEDDED_PREFIX = "embedded-"
DRIVER_MODULE = "/sys/module/nvidia"

GPU_TIMEOUT_S = 20.0
"""If a GPU's driver does not answer for this long, the helper goes on to the other GPUs."""

GRACE_S = 5.0
"""How long to wait for a zeusd that failed to come back before restoring everything without it."""

_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 2, 3, 13
CONTROLS = frozenset(control.value for control in SPECS)


# ------------------------------------------------------------------------------- shared with zeusd


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def driver_id(module: str = DRIVER_MODULE) -> str:
    """Names this very load of the driver; limits and locked clocks do not survive another.

    The version, and the inode of the module's directory in sysfs, which each load makes again.
    """
    try:
        inode = os.stat(module).st_ino
    except OSError:
        return "none"
    try:
        version = Path(module, "version").read_text().strip()
    except OSError:
        version = "?"
    return f"{version}/{inode}"


def is_trusted(found: os.stat_result) -> bool:
    """Whether a state file is a plain file of this user's that nobody else may write."""
    mine = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return mine and stat.S_ISREG(found.st_mode)


def pidfd_inodes_are_unique() -> bool:
    """From Linux 6.9 on each process has a pidfd inode of its own, never reused within a boot."""
    first, second = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid() or 1)
    try:
        return os.fstat(first).st_ino != os.fstat(second).st_ino
    finally:
        os.close(first)
        os.close(second)


def process_cookie(pid: int, pidfd: int, unique_inodes: bool) -> int:
    """A number that no other process of this boot with that pid has.

    Raises:
        OSError, ValueError, IndexError: It is gone.
    """
    if unique_inodes:
        return os.fstat(pidfd).st_ino
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rpartition(")")[2].split()[19])


def open_process(pid: int, cookie: int, unique_inodes: bool) -> int | None:
    """A pidfd for exactly this process, or None if it has exited. Zombies have exited."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        if process_cookie(pid, pidfd, unique_inodes) == cookie and not poll.poll(0):
            return pidfd
    except (OSError, ValueError, IndexError):
        pass
    os.close(pidfd)
    return None


# -------------------------------------------------------------------------------------- the helper


class _DriverError(Exception):
    """A call failed.

    Attributes:
        invalid: Because the device does not take the value.
        missing: Because the library lacks the function, or the GPU the feature.
    """

    def __init__(self, text: str, invalid: bool, missing: bool = False) -> None:
        super().__init__(text)
        self.invalid = invalid
        self.missing = missing


class _Driver(Protocol):
    """What a vendor's driver must do here."""

    def handle(self, uuid: str) -> Any:
        """The GPU of a UUID."""

    def read(self, gpu: Any, control: str) -> Value:
        """The present value of a control that can be read."""

    def write(self, gpu: Any, control: str, value: Value) -> None:
        """Sets a control."""

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""

    def close(self) -> None:
        """Shuts the library down."""


class _Nvml:
    """The dozen calls that are needed, straight to libnvidia-ml."""

    def __init__(self, library: str | None) -> None:
        self._library = ctypes.CDLL(library or "libnvidia-ml.so.1")
        self("nvmlInit_v2")

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        code = _FUNCTION_NOT_FOUND if function is None else function(*arguments)
        if code != 0:
            missing = code in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
            raise _DriverError(f"{name} returned {code}", code == _INVALID_ARGUMENT, missing)

    def handle(self, uuid: str) -> ctypes.c_void_p:
        gpu = ctypes.c_void_p()
        self("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(gpu))
        return gpu

    def read(self, gpu: Any, control: str) -> Value:
        """The present value of a control that can be read."""
        if control == Control.POWER_PROFILE.value:
            return tuple(self._profiles(gpu).requested())
        value = ctypes.c_uint()
        self(_GETTERS[control], gpu, ctypes.byref(value))
        return (value.value,)

    def _profiles(self, gpu: Any) -> Any:
        from zeusd.devices.nvml.profiles import ProfileTable

        return ProfileTable(self, gpu, lambda error: getattr(error, "missing", False))

    def write(self, gpu: Any, control: str, value: Value) -> None:
        if control == Control.POWER_PROFILE.value:
            self._profiles(gpu).write(value)
            return
        setter, reset = _SETTERS[control]
        if value or reset is None:
            self(setter, gpu, *(ctypes.c_uint(part) for part in value))
        else:
            self(reset, gpu)

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        """Smallest and largest value that the control takes."""
        low, high = ctypes.c_uint(), ctypes.c_uint()
        self(_RANGES[control], gpu, ctypes.byref(low), ctypes.byref(high))
        return low.value, high.value

    def close(self) -> None:
        self("nvmlShutdown")


class _Amd:
    """AMD's, by zeusd's own backend: it needs no packages, and its rules are long."""

    def __init__(self, library: str | None, sysfs: str) -> None:
        from zeusd.devices.amd.backend import AmdBackend
        from zeusd.devices.port import DeviceError, Outcome

        self._error, self._invalid = DeviceError, Outcome.INVALID
        self._backend = AmdBackend(library, sysfs)
        with self._translated():
            self._backend.init()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise _DriverError(str(error), error.outcome is self._invalid) from None

    def handle(self, uuid: str) -> Any:
        with self._translated():
            for index in range(self._backend.device_count()):
                gpu = self._backend.device_handle(index)
                if self._backend.uuid(gpu) == uuid:
                    return gpu
        raise _DriverError(f"there is no GPU {uuid}", invalid=False)

    def read(self, gpu: Any, control: str) -> Value:
        with self._translated():
            return self._backend.read_control(gpu, Control(control))

    def write(self, gpu: Any, control: str, value: Value) -> None:
        with self._translated():
            self._backend.write_control(gpu, Control(control), value)

    def range(self, gpu: Any, control: str) -> tuple[int, int]:
        with self._translated():
            return self._backend.control_range(gpu, Control(control))

    def close(self) -> None:
        with self._translated():
            self._backend.shutdown()


def _open(driver: Entry, library: str | None) -> _Driver:
    """The driver that a journal names; journals of 0.1 name no vendor, and mean NVIDIA."""
    library = library or driver.get("library")
    if driver.get("vendor") == "amd":
        return _Amd(library, str(driver.get("sysfs", "/sys")))
    return _Nvml(library)


_GETTERS = {
    "power_limit": "nvmlDeviceGetPowerManagementLimit",
    "persistence_mode": "nvmlDeviceGetPersistenceMode",
}
_SETTERS = {
    "power_limit": ("nvmlDeviceSetPowerManagementLimit", None),
    "gpu_clocks": ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"),
    "memory_clocks": ("nvmlDeviceSetMemoryLockedClocks", "nvmlDeviceResetMemoryLockedClocks"),
    "persistence_mode": ("nvmlDeviceSetPersistenceMode", None),
}
_RANGES = {"power_limit": "nvmlDeviceGetPowerManagementLimitConstraints"}
"""NVML's functions, by control."""


@dataclass
class _PendingRestore:
    key: str
    entry: Entry
    holder_lives: bool
    then: Entry | None = None
    """What the key holds afterwards."""


class _Journal:
    """One journal that nobody owns, locked, and its pending restores."""

    def __init__(
        self, path: Path, boot: str, entries: dict[str, Entry], say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._boot = boot
        self._entries = entries
        self._say = say
        self._guard = threading.Lock()

    @property
    def driver(self) -> Entry:
        return self._entries.get("driver", {})

    def pending(
        self, everything: bool, unique_inodes: bool
    ) -> tuple[list[_PendingRestore], list[str]]:
        """What has to be restored now, and the keys of entries that are not understood."""
        everything = everything or "stopping" in self._entries
        found, strange = [], []
        for key, entry in self._entries.items():
            if not key.startswith("debt/"):
                continue
            if not _is_debt(entry):
                strange.append(key)
                continue
            pidfd = open_process(int(entry["pid"]), int(entry["cookie"]), unique_inodes)
            if pidfd is not None:
                os.close(pidfd)
            if everything or pidfd is None or entry.get("ending"):
                found.append(
                    _PendingRestore(key, self._bounded(entry), holder_lives=pidfd is not None)
                )
        return [*found, *(self._lowered() if everything else ())], strange

    def _bounded(self, restore: Entry) -> Entry:
        """A pending restore, to nothing above the ceilings: they may have been set after it."""
        control = f"{restore['gpu']}/{restore['control']}"
        target = tuple(restore["target"])
        for key, entry in self._entries.items():
            if key.startswith(f"ceiling/{control}/") or key == f"pin/{control}":
                target = _least(target, entry, restore["control"])
        return {**restore, "target": [*target]}

    def _lowered(self) -> Iterator[_PendingRestore]:
        """What ceilings fall back to at a deadline that no zeusd will keep."""
        for key, entry in self._entries.items():
            kind, *names = key.split("/", 3)
            if kind != "ceiling" or len(names) != 3 or entry.get("deadline_ns") is None:
                continue
            fallback = entry.get("fallback")
            lower: Entry = {"gpu": names[0], "control": names[1], "target": fallback, "values": []}
            lower |= {"overwrite": HIGHER, "pid": 0, "cookie": 0}
            if _is_debt(lower):
                then = {**entry, "value": fallback, "deadline_ns": None, "fallback": None}
                yield _PendingRestore(key, lower, holder_lives=False, then=then)

    def settle(self, one: _PendingRestore) -> None:
        """Mark as restored. A holder that is running learns of its loss from the next zeusd."""
        key, restore = one.key, one.entry
        data = record(self._boot, key, one.then)
        if one.holder_lives:
            loss = {name: restore[name] for name in ("gpu", "control", "pid", "cookie")}
            loss["reason"] = "zeusd had failed, and everything was restored"
            name = f"lost/{loss['gpu']}/{loss['control']}/{loss['pid']}.{loss['cookie']}"
            data = record(self._boot, name, loss) + data
        try:
            with self._guard:
                fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.write(fd, data)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            # The next reader finds the control at its target, and does not write.
            self._say(f"{self.path}: cannot be written ({error.strerror}), {key} stays in it")


def _least(target: Value, ceiling: Entry, control: str) -> Value:
    """The lower of a target and what a ceiling allows now; the target, if it is no ceiling."""
    if not SPECS[Control(control)].ceilings:
        return target
    deadline, bound = ceiling.get("deadline_ns"), ceiling.get("value")
    if type(deadline) is int and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= deadline:
        bound = ceiling.get("fallback")
    known = isinstance(bound, list) and all(type(part) is int for part in bound)
    return min(target, tuple(bound)) if known and bound else target


def _is_debt(entry: Entry) -> bool:
    """Whether an entry has what a restore needs; one of another version may lack it."""
    try:
        numbers = [entry["pid"], entry["cookie"], *entry["target"]]
        numbers += [part for value in entry["values"] for part in value]
        known = entry["control"] in CONTROLS and isinstance(entry["gpu"], str)
    except (KeyError, TypeError):
        return False
    return known and all(type(number) is int for number in numbers)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether nobody owns the journal; keeps it from others meanwhile."""
    # For reading, because the disk may be full or read-only.
    flags = os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(f"{path}.lock", flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        yield True  # where no lock can be made, nobody has one
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _read(path: Path, boot: str) -> Replayed:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        if not is_trusted(os.fstat(fd)):
            raise ValueError("it is not a file of this user that only this user may write")
        return replay(file.read(), boot)


def _put_back(
    driver: _Driver, journal: _Journal, restore: _PendingRestore, say: Callable[[str], None]
) -> bool:
    entry = restore.entry
    uuid, control = str(entry["gpu"]), str(entry["control"])
    what = f"{control} of {uuid}"
    try:
        plan = _plan(entry)
    except (KeyError, ValueError, TypeError):
        say(f"{what}: its journal entry is not understood; left alone")
        return False
    try:
        result = _carry_out(plan, driver, driver.handle(uuid), control)
    except _DriverError as error:
        result = Result("failed", plan.target, trouble=error)
    text = SPECS[Control(control)].text
    if result.pending:
        why = result.trouble
        if result.kept and result.holds is not None:
            why = f"the driver accepted it and the GPU still holds {text(result.holds)}"
        say(f"{what}: could not be restored ({why}); run this again when the GPU answers")
        return False
    if result.kind == "untouched":
        say(f"{what}: was never changed")
    elif result.kind == "already_back":
        say(f"{what}: is restored already")
    elif result.kind == "changed_outside" and result.found is not None:
        say(f"{what}: someone else set {text(result.found)} meanwhile; left alone")
    else:
        say(f"{what}: restored to {text(result.target if result.holds is None else result.holds)}")
    journal.settle(restore)
    return True


def _plan(entry: dict[str, Any]) -> Plan:
    spec = SPECS[Control(entry["control"])]
    return Plan(
        target=tuple(entry["target"]),
        values=tuple(tuple(value) for value in entry["values"]),
        doubts=tuple(tuple(value) for value in doubts_of(entry)),
        readable=spec.readable,
        rounding=spec.rounding,
        refused_target=spec.refused_target,
        overwrite=str(entry.get("overwrite", OURS)),
        merges=spec.merges,
    )


def _carry_out(plan: Plan, driver: _Driver, gpu: Any, control: str) -> Result:
    """The steps of the one restore rule, one call after another."""
    steps, answer = restore_steps(plan), None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        try:
            answer = _step(step, plan, driver, gpu, control)
        except _DriverError as error:
            answer = Failed(error, error.invalid)


def _step(step: Step, plan: Plan, driver: _Driver, gpu: Any, control: str) -> Any:
    def read() -> Value:
        return driver.read(gpu, control)

    if isinstance(step, Look):
        return read_settled(read)
    if not isinstance(step, Put):
        return driver.range(gpu, control)

    def write(value: Value) -> None:
        driver.write(gpu, control, value)

    if not plan.readable:
        write(step.value)
        return step.value
    if plan.merges:
        return write_merged(write, read, step.value, (step.found or (),), time.sleep)
    before = read() if step.found is None else step.found
    return write_verified(write, read, step.value, before, time.sleep, plan.rounding)


def _each_gpu(
    pending: Iterable[_PendingRestore], put_back: Callable[[_PendingRestore], bool]
) -> int:
    """Run `put_back` for all pending restores, GPUs in parallel. Return how many failed."""
    by_gpu: dict[str, list[_PendingRestore]] = {}
    for restore in pending:
        by_gpu.setdefault(str(restore.entry["gpu"]), []).append(restore)
    done: list[str] = []
    total = sum(len(mine) for mine in by_gpu.values())

    def run(mine: list[_PendingRestore]) -> None:
        for restore in mine:
            if put_back(restore):
                done.append(restore.key)  # noqa: PERF401 - each counts as soon as it is done

    threads = [threading.Thread(target=run, args=(mine,), daemon=True) for mine in by_gpu.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GPU_TIMEOUT_S)
    return total - len(done)


def restore(
    state_dirs: Iterable[str],
    *,
    library: str | None = None,
    everything: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Finish the pending restores in journals that no zeusd owns.

    Args:
        state_dirs: Directories of journals.
        library: The libnvidia-ml or libamd_smi to load; None: the one that zeusd loaded.
        everything: Include leases of running processes.
        dry_run: Only say what would be done.
        say: Takes one line for each control.

    Returns:
        How many controls could not be restored.
    """
    boot = boot_id()
    unique_inodes = pidfd_inodes_are_unique()
    failed = 0
    for directory in dict.fromkeys(state_dirs):
        paths = [
            Path(directory, JOURNAL_NAME),
            *sorted(Path(directory).glob(EMBEDDED_PREFIX + "*")),
        ]
        for path in paths:
            try:
                if path.suffix or not path.exists():
                    continue
            except PermissionError:
                say(f"{path}: cannot be read (permission denied); run this as root")
                failed += 1
                continue
            with _lock(path) as free:
                if not free:
                    say(f"{path}: its zeusd is running, and restores by itself")
                    continue
                try:
                    said = _read(path, boot)
                except (OSError, ValueError) as error:
                    say(f"{path}: cannot be used ({error}); left alone")
                    failed += 1
                    continue
                if said.trouble is not None:
                    say(f"{path}: {said.trouble}")
                    failed += not said.entries
                journal = _Journal(path, boot, said.entries, say)
                failed += _settle(journal, library, everything, unique_inodes, dry_run, say)
    return failed


def _settle(
    journal: _Journal,
    library: str | None,
    everything: bool,
    unique_inodes: bool,
    dry_run: bool,
    say: Callable[[str], None],
) -> int:
    pending, strange = journal.pending(everything, unique_inodes)
    driver = journal.driver
    for key in strange:
        say(f"{journal.path}: {key} is not understood; left alone")
    if not pending:
        say(f"{journal.path}: no pending restores")
        return len(strange)
    if driver.get("simulated"):
        say(f"{journal.path}: its GPUs were simulated, and are gone")
        return 0
    module = str(driver.get("module", DRIVER_MODULE))
    if driver and driver.get("id") != driver_id(module):
        say(f"{journal.path}: the driver was reloaded since, so none of it is in force")
        return 0
    if dry_run:
        for restore in pending:
            control, gpu, target = (restore.entry[name] for name in ("control", "gpu", "target"))
            text = SPECS[Control(control)].text(target)
            say(f"{control} of {gpu}: would be restored to {text}")
        return 0
    try:
        opened = _open(driver, library)
    except (OSError, _DriverError) as error:
        left = len(pending)
        say(f"{journal.path}: the driver cannot be reached ({error}); {left} restores pending")
        return left
    failed = _each_gpu(pending, lambda restore: _put_back(opened, journal, restore, say))
    if not failed:
        with contextlib.suppress(_DriverError):
            opened.close()
    return failed + len(strange)


def _comes_back(state_dirs: Iterable[str], within_s: float) -> bool:
    """Whether a zeusd takes its journal within this time.

    `OnFailure=` fires at the end of all attempts to start it again, or, in newer versions of
    systemd, at each: only what happens next tells.
    """
    paths = [Path(directory, JOURNAL_NAME) for directory in state_dirs]
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        for path in paths:
            if path.exists():
                with _lock(path) as free:
                    if not free:
                        return True
        time.sleep(0.2)
    return False


def command_line() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="zeusd restore",
        description="Finish the pending restores of a zeusd that is gone: for dead processes and, "
        "after a stop that did not finish, for everything.",
    )
    parser.add_argument("--state-dir", action="append", help="directory of journals; repeatable")
    parser.add_argument("--library", help="path of libnvidia-ml or libamd_smi")
    parser.add_argument("--all", action="store_true", help="also leases of running processes")
    parser.add_argument(
        "--on-failure",
        action="store_true",
        help="like --all, unless a zeusd comes back within a few seconds",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 0 if no restore is left that should be done."""
    options = command_line().parse_args(arguments)
    state_dirs = options.state_dir or [DEFAULT_STATE_DIR, EMBEDDED_STATE_DIR]
    everything = options.all or (options.on_failure and not _comes_back(state_dirs, GRACE_S))
    failed = restore(
        state_dirs,
        library=options.library,
        everything=everything,
        dry_run=options.dry_run,
        say=lambda line: print(f"zeusd restore: {line}", file=sys.stderr, flush=True),
    )
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a thread may hang in the driver forever
