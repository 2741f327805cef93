"""`zeusctl set`: set limits and clocks for the duration of a command."""

from __future__ import annotations

import contextlib
import os
import select as waiting
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeus_common.options import ParamType, option
from zeus_common.processes import sd_notify
from zeus_common.text import count, gpus_text, quantity_text
from zeus_ipc.circuit import bounded
from zeus_ipc.controls import SPECS, Control, ControlSpec, ControlValue
from zeus_ipc.errors import ErrorCode, RequestTimeout, ZeusIpcError
from zeusctl.arguments import (
    CommandVerb,
    Duration,
    command_argument,
    gpus_argument,
    without_effect,
)
from zeusctl.exits import CommandError
from zeusctl.running import asked_to_end, run, without
from zeusctl.session import Session, ceiling_option, now, verb
from zeusctl.slurm import frequencies, has_mig, slurm_names

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo
    from zeusctl.entities import SetValue


class _Value(ParamType):
    """A control's value as `ControlSpec.parse` reads it."""

    def __init__(self, spec: ControlSpec) -> None:
        self._spec = spec
        self.name = spec.metavar

    def convert(self, value: Any, param: Any, ctx: Any) -> ControlValue:
        """Returns the value in the protocol's form."""
        try:
            return self._spec.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _control_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option for each control."""
    for spec in reversed(SPECS.values()):
        letter = f"-{spec.letter} " if spec.letter else ""
        names = f"--{spec.option} {letter}{spec.name}"
        command = option(names, spec.help, _Value(spec), metavar=spec.metavar)(command)
    return command


@verb("set", cls=CommandVerb)
@gpus_argument(required=True)
@command_argument(required=False)
@_control_options
@option(
    "--gpu-freq",
    "Clocks as Slurm's --gpu-freq names them: 900, medium,memory=high.",
    metavar="CLOCKS",
)
@option("--confirm-within", "Restore unless you confirm within TIME (30s).", Duration())
@option("--best-effort", "Run COMMAND even if the set fails, with a warning.", bool)
@option(
    "--together",
    "Set a power profile even beside a leased power limit or clock, and vice versa.",
    bool,
)
@option("--persist", "Keep it until `zeusctl reset`, and exit (administrators).", bool)
@ceiling_option("Bound what anyone may set (administrators): fleet, persisted or job:ID.")
@option("--for ttl", "With --ceiling: its duration.", Duration())
@option(
    "--then fallback",
    "With --for: the lower bound after that time.",
    _Value(SPECS[Control.POWER_LIMIT]),
    metavar="WATTS",
)
def set_(
    session: Session,
    /,
    gpus: str,
    command: tuple[str, ...],
    gpu_freq: str | None,
    confirm_within: float | None,
    best_effort: bool,
    together: bool,
    persist: bool,
    ceiling: str | None,
    ttl: float | None,
    fallback: ControlValue | None,
    **wanted: ControlValue | None,
) -> None:
    """Set limits or clocks, and restore them on exit.

    zeusctl holds a lease: while COMMAND runs, if you give one after --, or else until Ctrl-C. If
    zeusctl dies, zeusd restores them.

    \b
    zeusctl set 0-3 --power-limit 200 -- python train.py
    zeusctl set all --gpu-clocks 900,1200
    zeusctl set 0 -p 150 --confirm-within 30s
    zeusctl set 0 -p 200 --best-effort -- python train.py
    zeusctl set all --power-profile max-q,llm-training -- python train.py
    sudo zeusctl set all -p 250 --persist
    sudo zeusctl set 0 -p 200 --ceiling job:1234
    sudo zeusctl set all -p 300 --ceiling fleet --for 30s --then 200
    """
    controls = {name: value for name, value in wanted.items() if value is not None}
    if gpus == "slurm":
        _refuse_mig_devices()
    if gpu_freq is not None:
        clocks = ("--gpu-clocks", "--memory-clocks", "--ceiling")
        without_effect("with --gpu-freq, which names clocks", *clocks)
    elif not controls:
        options = [f"--{spec.option}" for spec in SPECS.values()]
        raise click.UsageError(f"nothing to set; name {', '.join(options[:-1])} or {options[-1]}")
    if ceiling is not None:
        others = ("--persist", "--confirm-within", "--best-effort", "--together", "COMMAND")
        without_effect("with --ceiling, which stays in force after zeusctl exits", *others)
        _set_ceiling(session, gpus, ceiling, controls, ttl, fallback)
        return
    without_effect("without --ceiling", "--for", "--then")
    if persist:
        without_effect("with --persist, which stays in force after it", "COMMAND")
    if not command:
        without_effect("without a command after --", "--best-effort")
    try:
        chosen = session.gpus(gpus)
        _check_memory_clocks(chosen, controls.get(Control.MEMORY_CLOCKS.value))
        targets = [(control, value, chosen) for control, value in controls.items()]
        if gpu_freq is not None:
            targets += frequencies(gpu_freq, chosen)
        settings = _apply(session, targets, together)
        if confirm_within is not None:
            _confirm(session, settings, confirm_within)
        if persist:
            names = dict.fromkeys(control for control, *_ in targets)
            session.client.persist([gpu.uuid for gpu in chosen], list(names))
    except Exception as error:
        if not command:
            raise
        without(session, command, "no limit set", error, best_effort)
    if persist:
        _answer(session, settings, "persisted")
        return
    watch = _LossWatch(session, settings)
    if command:
        _answer(session, settings, "command")
        with watch:
            code = run(command)
        click.get_current_context().exit(code)
    with asked_to_end() as ended, watch:
        _answer(session, settings, "process")
        if not session.json:
            click.echo("held until Ctrl-C", err=True)
        sd_notify("READY=1")
        ended.wait()
    click.get_current_context().exit(ended.code)


def _refuse_mig_devices() -> None:
    if has_mig(os.environ):
        raise CommandError(
            "a MIG device has no power limit or clocks of its own; request whole GPUs",
            ErrorCode.NOT_SUPPORTED,
        )


def _check_memory_clocks(gpus: Sequence[GpuInfo], value: ControlValue | None) -> None:
    """Refuses a clock between those of a GPU: drivers silently use the nearest one.

    Raises:
        CommandError: A GPU has no memory clock in this range.
    """
    spec = SPECS[Control.MEMORY_CLOCKS]
    for gpu in gpus if value else ():
        clocks = sorted(gpu.memory_clocks_mhz)
        if clocks and value and not any(value[0] <= mhz <= value[1] for mhz in clocks):
            there = f"{', '.join(map(str, clocks))} {spec.unit}"
            raise CommandError(
                f"GPU {gpu.index} ({gpu.name}) has no {spec.title} of {spec.text(value)}; choose "
                f"from {there}",
                ErrorCode.OUT_OF_RANGE,
            )


def _set_ceiling(
    session: Session,
    gpus: str,
    name: str,
    controls: dict[str, ControlValue],
    ttl_s: float | None,
    fallback: ControlValue | None,
) -> None:
    limit = controls.get(Control.POWER_LIMIT.value)
    if limit is None or len(controls) > 1:
        raise click.UsageError(
            "a ceiling bounds the power limit; name --power-limit and nothing else"
        )
    if fallback is not None and ttl_s is None:
        raise click.UsageError("--then needs --for TIME, after which it applies")
    if ttl_s is not None and ttl_s > 30 * 86_400:
        raise click.UsageError("--for is at most 30d")
    chosen = session.gpus(gpus)
    group = (slurm_names() or [""])[-1] if gpus == "slurm" else ""
    highest = session.client.set_ceiling(
        [gpu.uuid for gpu in chosen],
        name,
        limit[0],
        ttl_s=ttl_s,
        fallback_mw=None if fallback is None else fallback[0],
        control_group=group,
    )
    power_limit = Control.POWER_LIMIT.value
    applied = {uuid: [mw] for uuid, mw in highest.items()}
    _answer(session, _settings(chosen, power_limit, applied, limit, {}), "ceiling")


def _apply(
    session: Session,
    targets: Sequence[tuple[str, ControlValue, Sequence[GpuInfo]]],
    together: bool,
) -> list[SetValue]:
    """Acquires all leases or none: releases the first ones if a later one fails."""
    every = dict.fromkeys(gpu.uuid for _, _, gpus in targets for gpu in gpus)
    states = session.client.state([*every]).items()
    before = {uuid: [one.power_limit_mw] for uuid, one in states if one.power_limit_mw is not None}
    settings = []
    for control, value, gpus in targets:
        uuids = [gpu.uuid for gpu in gpus]
        applied = session.client.set(uuids, control, value, together=together)
        was = before if control == Control.POWER_LIMIT.value else {}
        settings += _settings(gpus, control, applied, value, was)
    return settings


def _settings(
    gpus: Sequence[GpuInfo],
    control: str,
    applied: Mapping[str, Sequence[int]],
    asked: Sequence[int],
    was: Mapping[str, Sequence[int]],
) -> list[SetValue]:
    """What was set; what was in force before, where that is known."""
    from zeusctl.entities import SetValue, quantity

    return [
        SetValue(
            gpu=gpu.index,
            uuid=gpu.uuid,
            control=control,
            value=quantity(control, applied[gpu.uuid]),
            unit=SPECS[Control(control)].unit,
            asked=quantity(control, asked),
            was=quantity(control, was.get(gpu.uuid)),
        )
        for gpu in gpus
    ]


def _confirm(session: Session, settings: Sequence[SetValue], within_s: float) -> None:
    """Wait for a yes on standard input.

    Raises:
        CommandError: The answer was not yes; the settings are restored.
    """
    applied = (
        f"{count(len(settings), 'setting')} applied. Keep {'it' if len(settings) == 1 else 'them'}?"
    )
    click.echo(f"{applied} [y/N, within {within_s:g} s] ", err=True, nl=False)
    ready, _, _ = waiting.select([sys.stdin], [], [], within_s)
    answer = sys.stdin.readline().strip().lower() if ready else ""
    if answer in ("y", "yes"):
        return
    click.echo("", err=True)
    why = f"the answer was {answer!r}" if ready else "not confirmed in time"
    controls = dict.fromkeys(setting.control for setting in settings)
    session.client.release(list({setting.uuid for setting in settings}), list(controls))
    pending = [one for one in session.client.leases() if one.restoring and one.pid == os.getpid()]
    done = "the restore is pending, see `zeusctl leases`" if pending else "restored"
    raise CommandError(f"{why}; {done} (answer y to keep)")


def _answer(session: Session, settings: list[SetValue], kept: str) -> None:
    from zeusctl.reports import SetReport

    bound = "at most " if kept == "ceiling" else ""

    def line(setting: SetValue) -> str:
        held, asked, was = (
            quantity_text(setting.control, value)
            for value in (setting.value, setting.asked, setting.was)
        )
        differs = setting.asked is not None and setting.asked != setting.value
        return (
            f"GPU {setting.gpu}: {setting.control} {bound}{held}"
            + (f" (asked for {asked})" if differs else "")
            + (f" (was {was})" if setting.was else "")
        )

    def lines() -> list[str]:
        return [line(setting) for setting in settings]

    # Standard output belongs to the command.
    session.answer(SetReport(at=now(), settings=settings, kept=kept), lines, err=kept == "command")
    sys.stdout.flush()


class _LossWatch:
    """A thread that reports lost leases at once, until the end of the block."""

    def __init__(self, session: Session, settings: Sequence[SetValue]) -> None:
        from zeus_ipc.client import Client

        # Its own connection, as it waits for long: where a user may have no more, heartbeats go on.
        self._client = Client(session.socket, heartbeat=False)
        self._index = {setting.uuid: setting.gpu for setting in settings}
        self._held = {(setting.uuid, setting.control) for setting in settings}
        self._ended = threading.Event()

    def __enter__(self) -> None:
        # The command waits for this: it is connected before it runs, as zeusd may stop at once.
        with contextlib.suppress(ZeusIpcError), bounded(1.0):
            self._client.heartbeat()
        threading.Thread(target=self._run, name="zeusctl-watch", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        with bounded(0.0):
            self._client.close(patient=False)

    def _run(self) -> None:
        known = 0
        while self._held and not self._ended.is_set():
            try:
                # Time limit of one request that waits for the loss of a lease.
                lost = self._client.lost_leases(known, 60.0)
            except RequestTimeout:
                continue
            except ZeusIpcError:
                self._ended.wait(0.5)
                continue
            known = len(lost)
            self._report(self._held.intersection(lost))
            self._held.difference_update(lost)

    def _report(self, lost: set[tuple[str, str]]) -> None:
        gpus: dict[str, list[int]] = {}
        for uuid, control in lost:
            gpus.setdefault(control, []).append(self._index[uuid])
        what = [
            f"{control} of {gpus_text(sorted(indices))}"
            for control, indices in sorted(gpus.items())
        ]
        if what and not self._ended.is_set():
            click.echo(
                f"zeusctl: the lease on {' and '.join(what)} is lost, and zeusd restores the old "
                "value; `zeusctl audit` says why",
                err=True,
            )
