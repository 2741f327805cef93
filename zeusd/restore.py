"""Finishes the pending restores of a zeusd that no longer runs, with the standard library only.

Also lowers ceilings whose deadline no zeusd will enforce.

`zeusd restore` runs it. The systemd units run this file directly with the system's Python, so that
it works when the installation is broken. It may run repeatedly and at any time: while zeusd is
running, it does nothing.

It shares modules with the daemon: `zeusd.restore_rule` for the rule, `zeusd.records` for the format
of the journal, and `zeusd.identity` to recognise processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file: the modules shared with zeusd are beside it, installed or in a checkout. Last
    # on the path, so that none of them replaces a module of the standard library.
    _here = Path(__file__).resolve().parent
    sys.path.append(str(_here.parent if _here.name == "zeusd" else _here))

from zeus_ipc.controls import SPECS, Control
from zeusd.devices.port import DeviceError
from zeusd.identity import (
    DEFAULT_STATE_DIR,
    DRIVER_MODULE,
    EMBEDDED_PREFIX,
    EMBEDDED_STATE_DIR,
    JOURNAL_NAME,
    boot_id,
    driver_id,
    pidfd_inodes_are_unique,
)
from zeusd.restore_drivers import RestoreDriver, open_driver
from zeusd.restore_journal import OwnerlessJournal, PendingEntry, lock, read
from zeusd.restore_rule import (
    OURS,
    Device,
    Holds,
    ReadControl,
    RestorePlan,
    Result,
    Step,
    Unknown,
    WriteControl,
    WriteResult,
    read_settled,
    restore_steps,
)

GPU_TIMEOUT_S = 20.0
"""If a GPU's driver does not answer for this long beyond its bound, the helper goes on to the other
GPUs."""


def _restore_one(
    driver: RestoreDriver,
    journal: OwnerlessJournal,
    restore: PendingEntry,
    say: Callable[[str], None],
) -> bool:
    uuid, control = str(restore.entry["gpu"]), Control(restore.entry["control"])
    what, text = f"{control.value} of {uuid}", SPECS[control].text
    plan = plan_of(restore.entry)
    try:
        result = carry_out(
            plan, RestoredControl(driver, driver.handle(uuid), control), journal.settle_s
        )
    except DeviceError as error:
        result = Result("failed", plan.target, trouble=error)
    if result.pending:
        why = result.trouble
        if why is None and result.holds is not None:
            why = f"the driver accepted the write, but the GPU still has {text(result.holds)}"
        say(f"{what}: could not be restored ({why}); run this again when the GPU responds")
        return False
    if result.kind == "untouched":
        say(f"{what}: was never changed")
    elif result.kind == "already_back":
        say(f"{what}: already restored")
    elif result.kind == "changed_outside" and result.found is not None:
        say(f"{what}: someone else set {text(result.found)} meanwhile; left unchanged")
    else:
        say(f"{what}: restored to {text(result.in_force)}")
    ours = result.kind in ("already_back", "restored")
    journal.settle(restore, result.in_force if ours else None)
    return True


def plan_of(entry: dict[str, Any]) -> RestorePlan:
    """How to restore what an entry of the journal is about."""
    doubts = tuple(tuple(value) for value in entry["doubts"])
    return RestorePlan(
        SPECS[Control(entry["control"])],
        tuple(entry["target"]),
        tuple(tuple(value) for value in entry["values"]),
        doubts,
        bool(doubts),
        not doubts,
        str(entry.get("overwrite", OURS)),
    )


class RestoredControl:
    """One control of one GPU, called step by step."""

    def __init__(
        self,
        driver: RestoreDriver,
        handle: Any,
        control: Control,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._driver, self._handle, self._control = driver, handle, control
        self.sleep = sleep
        self._device = Device(
            lambda: driver.read_control(handle, control),
            lambda value: driver.write_control(handle, control, value),
            sleep,
            SPECS[control].rounding,
        )

    def step(self, step: Step) -> object:
        """Carries out a step of a restore."""
        try:
            if isinstance(step, ReadControl):
                return read_settled(self._device.read)
            if not isinstance(step, WriteControl):
                return self._driver.control_range(self._handle, self._control)
        except DeviceError as error:
            return Unknown(error)
        return self._write(step)

    def _write(self, step: WriteControl) -> WriteResult:
        spec, device = SPECS[self._control], self._device
        if not spec.readable:
            return device.attempt(step.value) or Holds(step.value)
        assert step.found is not None
        if spec.merges:
            return device.write_merged(step.value, (step.found,), step.sure)
        return device.write_verified(step.value, step.found, step.sure)


def carry_out(plan: RestorePlan, gpu: RestoredControl, settle_s: float) -> Result:
    """Restores a control. If an earlier write may still take effect, waits until it cannot."""
    result = _attempt(plan, gpu)
    if result.kind == "settling":
        gpu.sleep(settle_s)
        wrote = result.wrote
        if wrote and not plan.spec.merges:  # others' choices are not zeusd's values
            plan = replace(plan, values=(*plan.values, result.in_force))
        result = _attempt(replace(plan, unsettled=False), gpu)
        if wrote and result.kind == "already_back":
            result = replace(result, kind="restored")
    return result


def _attempt(plan: RestorePlan, gpu: RestoredControl) -> Result:
    """Runs the steps of the restore rule one after another."""
    steps, answer = restore_steps(plan), None
    while True:
        try:
            answer = gpu.step(steps.send(answer))
        except StopIteration as stop:
            result: Result = stop.value
            return result


def _each_gpu(
    pending: Iterable[PendingEntry],
    restore_one: Callable[[PendingEntry], bool],
    timeout_s: float = GPU_TIMEOUT_S,
) -> int:
    """Run `restore_one` for all pending restores, GPUs in parallel. Return how many failed."""
    by_gpu: dict[str, list[PendingEntry]] = {}
    for restore in pending:
        by_gpu.setdefault(str(restore.entry["gpu"]), []).append(restore)
    done: list[str] = []
    total = sum(len(mine) for mine in by_gpu.values())

    def run(mine: list[PendingEntry]) -> None:
        for restore in mine:
            if restore_one(restore):
                done.append(restore.key)  # noqa: PERF401 - each counts as soon as it is done

    threads = [threading.Thread(target=run, args=(mine,), daemon=True) for mine in by_gpu.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
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
            with lock(path) as free:
                if not free:
                    say(f"{path}: its zeusd is running and restores by itself")
                    continue
                try:
                    said = read(path, boot)
                except (OSError, ValueError) as error:
                    say(f"{path}: cannot be used ({error}); left unchanged")
                    failed += 1
                    continue
                if said.trouble is not None:
                    say(f"{path}: {said.trouble}")
                    failed += not said.entries
                journal = OwnerlessJournal(path, boot, said.entries, say)
                failed += _settle(journal, library, everything, unique_inodes, dry_run, say)
    return failed


def _settle(
    journal: OwnerlessJournal,
    library: str | None,
    everything: bool,
    unique_inodes: bool,
    dry_run: bool,
    say: Callable[[str], None],
) -> int:
    pending, strange = journal.pending(everything, unique_inodes)
    driver = journal.driver
    for key in strange:
        say(f"{journal.path}: {key} is not understood; left unchanged")
    if not pending:
        say(f"{journal.path}: no pending restores")
        return len(strange)
    if driver.get("simulated"):
        say(f"{journal.path}: its GPUs were simulated and no longer exist")
        return 0
    module = str(driver.get("module", DRIVER_MODULE))
    if driver and driver.get("id") != driver_id(module):
        say(f"{journal.path}: the driver was reloaded since, which reset everything")
        return 0
    if dry_run:
        for restore in pending:
            control, gpu, target = (restore.entry[name] for name in ("control", "gpu", "target"))
            text = SPECS[Control(control)].text(target)
            say(f"{control} of {gpu}: would be restored to {text}")
        return 0
    try:
        opened = open_driver(driver, library)
    except (OSError, DeviceError) as error:
        left = len(pending)
        say(f"{journal.path}: the driver cannot be reached ({error}); {left} restores pending")
        return left
    journal.announce(pending)
    failed = _each_gpu(
        pending,
        lambda restore: _restore_one(opened, journal, restore, say),
        GPU_TIMEOUT_S + len(SPECS) * journal.settle_s,
    )
    if not failed:
        with contextlib.suppress(DeviceError):
            opened.shutdown()
    return failed + len(strange)


def _starts_again(state_dirs: Iterable[str], within_s: float) -> bool:
    """Whether a zeusd takes over the journal within this time.

    `OnFailure=` fires after the last attempt to restart zeusd or, in newer versions of systemd,
    after each one. So the only way to know is to wait.
    """
    paths = [Path(directory, JOURNAL_NAME) for directory in state_dirs]
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        for path in paths:
            if path.exists():
                with lock(path) as free:
                    if not free:
                        return True
        time.sleep(0.2)
    return False


def command_line() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="zeusd restore",
        description="Finish the pending restores of a zeusd that no longer runs: for dead "
        "processes and, after a stop that did not finish, for everything.",
    )
    parser.add_argument("--state-dir", action="append", help="directory of journals; repeatable")
    parser.add_argument("--library", help="path of libnvidia-ml or libamd_smi")
    parser.add_argument("--all", action="store_true", help="include leases of running processes")
    parser.add_argument(
        "--on-failure",
        action="store_true",
        help="like --all, unless zeusd starts again within a few seconds",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 0 if no restore that should be done is left."""
    options = command_line().parse_args(arguments)
    state_dirs = options.state_dir or [DEFAULT_STATE_DIR, EMBEDDED_STATE_DIR]
    # How long to wait for a failed zeusd to start again before restoring everything without it.
    everything = options.all or (options.on_failure and not _starts_again(state_dirs, 5.0))
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
    os._exit(status)  # a thread may hang in the driver
