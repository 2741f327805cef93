"""`zeusctl set`: limits and clocks, for as long as something needs them."""

from __future__ import annotations

import select as waiting
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeusctl.exits import CommandError, Exit
from zeusctl.running import LOOK_S, asked_to_end, run
from zeusctl.session import Session, gpus_argument, json_option, now, pass_session
from zeusctl.text import parse_duration, value_text

if TYPE_CHECKING:
    from zeus_ipc.messages import GpuInfo
    from zeusctl.reports import Setting

    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic for type checkers only, in older releases

Apply = Callable[[list[str]], None]


class _Watts(_Type):
    name = "WATTS"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Milliwatts."""
        text = str(value).strip().removesuffix("W").removesuffix("w").strip()
        try:
            watts = float(text)
        except ValueError:
            self.fail(f"{value!r} is no power; write watts, such as 250", param, ctx)
        if not 0 < watts < 100_000:
            self.fail(f"{value!r} is no power limit; write watts, such as 250", param, ctx)
        return round(watts * 1000)


class _Range(_Type):
    name = "MHZ[,MHZ]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        """Smallest and largest clock."""
        parts = str(value).removesuffix("MHz").strip().replace("-", ",").split(",")
        if not 1 <= len(parts) <= 2 or not all(part.strip().isdigit() for part in parts):
            message = f"{value!r} is no clock; write MHz: 1200, or a range such as 900,1200"
            self.fail(message, param, ctx)
        low, high = int(parts[0]), int(parts[-1])
        if max(low, high) > 100_000:
            self.fail(f"{value!r} is no clock of a GPU; write MHz, such as 1200", param, ctx)
        return low, high


class _Duration(_Type):
    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Seconds."""
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    "set", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": True}
)
@gpus_argument()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("-p", "--power-limit", type=_Watts(), help="Power limit, in watts.")
@click.option("-g", "--gpu-clocks", type=_Range(), help="Lock the graphics clock, in MHz.")
@click.option("-m", "--memory-clocks", type=_Range(), help="Lock the memory clock, in MHz.")
@click.option("--persistence", type=click.Choice(["on", "off"]), help="Persistence mode.")
@click.option(
    "--confirm-within",
    type=_Duration(),
    help="Put it back unless you say within TIME (30s) that all is well.",
)
@click.option(
    "--persist", is_flag=True, help="Administrators: keep it until `zeusctl reset`, and exit."
)
@json_option
@pass_session
def set_(
    session: Session,
    gpus: str,
    command: tuple[str, ...],
    power_limit: int | None,
    gpu_clocks: tuple[int, int] | None,
    memory_clocks: tuple[int, int] | None,
    persistence: str | None,
    confirm_within: float | None,
    persist: bool,
) -> None:
    """Set limits or clocks, and put them back in the end.

    They are held under a lease: while COMMAND runs, if one is given after --, else until Ctrl-C.
    If zeusctl dies, they go back all the same.

    \b
    zeusctl set 0-3 --power-limit 200 -- python train.py
    zeusctl set all --gpu-clocks 900,1200
    zeusctl set 0 -p 150 --confirm-within 30s
    sudo zeusctl set all -p 250 --persist
    """
    controls = _wishes(session, power_limit, gpu_clocks, memory_clocks, persistence)
    if not controls:
        raise click.UsageError(
            "nothing to set; name --power-limit, --gpu-clocks, --memory-clocks or --persistence",
            click.get_current_context(),
        )
    if persist and command:
        raise click.UsageError(
            "--persist lasts beyond any command; leave one of them away",
            click.get_current_context(),
        )
    try:
        chosen = session.gpus(gpus)
        settings = _apply(session, chosen, controls)
        if confirm_within is not None:
            _confirm(settings, confirm_within)
        if persist:
            session.client.persist([gpu.uuid for gpu in chosen], list(controls))
    except Exception as error:
        if command:
            raise _not_run(error) from None
        raise
    if persist:
        _answer(session, settings, "persisted")
        return
    watch = _LossWatch(session, settings)
    if command:
        _answer(session, settings, "command")
        click.get_current_context().exit(run(command, watch))
    with asked_to_end() as ended:
        _answer(session, settings, "process")
        if not session.json:
            click.echo("held until Ctrl-C", err=True)
        while not ended.wait(LOOK_S):
            watch()


def _wishes(
    session: Session,
    power_limit: int | None,
    gpu_clocks: tuple[int, int] | None,
    memory_clocks: tuple[int, int] | None,
    persistence: str | None,
) -> dict[str, tuple[Sequence[int], Apply]]:
    """By control: the value, and what sets it on GPUs."""
    wishes: dict[str, tuple[Sequence[int], Apply]] = {}
    if power_limit is not None:
        limit_mw = power_limit
        wishes["power_limit"] = (
            [limit_mw],
            lambda uuids: session.client.set_power_limit(uuids, limit_mw),
        )
    if gpu_clocks is not None:
        graphics = gpu_clocks
        wishes["gpu_clocks"] = (
            graphics,
            lambda uuids: session.client.set_gpu_clocks(uuids, *graphics),
        )
    if memory_clocks is not None:
        memory = memory_clocks
        wishes["memory_clocks"] = (
            memory,
            lambda uuids: session.client.set_memory_clocks(uuids, *memory),
        )
    if persistence is not None:
        on = persistence == "on"
        wishes["persistence_mode"] = (
            [int(on)],
            lambda uuids: session.client.set_persistence_mode(uuids, on),
        )
    return wishes


def _apply(
    session: Session,
    gpus: Sequence[GpuInfo],
    controls: dict[str, tuple[Sequence[int], Apply]],
) -> list[Setting]:
    """All of it, or none: who has got a part only lets go of it again."""
    from zeusctl.reports import Setting

    uuids = [gpu.uuid for gpu in gpus]
    before = _limits(session, uuids)
    settings = []
    for control, (value, apply) in controls.items():
        apply(uuids)
        settings += [
            Setting(
                gpu=gpu.index,
                uuid=gpu.uuid,
                control=control,
                value=value_text(control, value),
                was=before.get(gpu.uuid) if control == "power_limit" else None,
            )
            for gpu in gpus
        ]
    return settings


def _limits(session: Session, uuids: list[str]) -> dict[str, str]:
    """The limits before, as far as they can be read."""
    from zeus_ipc.errors import ZeusIpcError

    try:
        states = session.client.state(uuids)
    except ZeusIpcError:
        return {}
    return {
        uuid: value_text("power_limit", [state.power_limit_mw])
        for uuid, state in states.items()
        if state.power_limit_mw is not None
    }


def _confirm(settings: Sequence[Setting], within_s: float) -> None:
    """Waits for a yes on standard input.

    Raises:
        CommandError: It did not come; what was set goes back as zeusctl ends.
    """
    what = f"{len(settings)} settings are in force"
    click.echo(f"{what}; keep them? [y/N, within {within_s:g} s] ", err=True, nl=False)
    ready, _, _ = waiting.select([sys.stdin], [], [], within_s)
    answer = sys.stdin.readline().strip().lower() if ready else ""
    if answer not in ("y", "yes"):
        click.echo("", err=True)
        why = "nobody confirmed" if not answer else f"the answer was {answer!r}"
        raise CommandError(f"{why}, so everything goes back; confirm with y", Exit.FAILED)


def _answer(session: Session, settings: list[Setting], kept: str) -> None:
    from zeusctl.reports import SetReport

    def lines() -> list[str]:
        return [
            f"GPU {one.gpu}: {one.control} {one.value}" + (f" (was {one.was})" if one.was else "")
            for one in settings
        ]

    # Standard output is the command's.
    session.answer(SetReport(at=now(), settings=settings, kept=kept), lines, err=kept == "command")
    sys.stdout.flush()


class _LossWatch:
    """Tells once when a lease was lost."""

    def __init__(self, session: Session, settings: Sequence[Setting]) -> None:
        self._session = session
        self._index = {one.uuid: one.gpu for one in settings}
        self._held = {(one.uuid, one.control) for one in settings}

    def __call__(self) -> None:
        held = self._read()
        for uuid, control in sorted(self._held - held):
            click.echo(
                f"zeusctl: the lease on {control} of GPU {self._index[uuid]} is lost, and the old "
                "value is back; `zeusctl audit` says why",
                err=True,
            )
        self._held &= held

    def _read(self) -> set[tuple[str, str]]:
        import os

        from zeus_ipc.errors import ZeusIpcError

        try:
            leases = self._session.client.leases()
        except ZeusIpcError:  # zeusd is being restarted; leases outlive that
            return self._held
        return {
            (lease.gpu, lease.control.value)
            for lease in leases
            if lease.pid == os.getpid() and not lease.restoring and lease.gpu in self._index
        }


def _not_run(error: Exception) -> CommandError:
    """The command was not run: its own exit codes must not be mistaken for zeusctl's."""
    message = getattr(error, "message", None) or str(error)
    code = getattr(error, "code", "failed")
    return CommandError(str(message), Exit.NOT_RUN, str(code))
