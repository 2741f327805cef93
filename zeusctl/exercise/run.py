"""Runs an exercise: preconditions, each GPU, kills, and the check that all is as it was found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zeus_common.text import count, value_text
from zeus_ipc import __version__
from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeusctl.exercise import outside
from zeusctl.exercise.gpu import eventually, exercise, held
from zeusctl.exercise.report import Condition, ControlValues, ExercisedGpu, ExerciseReport
from zeusctl.exits import CommandError
from zeusctl.probe.driver import NoDriverError
from zeusctl.session import now

if TYPE_CHECKING:
    from zeus_ipc import Client
    from zeus_ipc.replies import GpuInfo

WITHIN_S = 30.0
"""How long a restore, or zeusd's return, may take."""


def kill_holder(client: Client, socket: str, gpu: GpuInfo, before: ControlValues) -> Condition:
    """SIGKILL to a process that holds a power limit: zeusd restores it."""
    assert gpu.power_limit_min_mw is not None
    what = f"the power limit of GPU {gpu.index} is restored when its holder is killed"
    watts = gpu.power_limit_min_mw / 1000
    command = [sys.executable, "-m", "zeusctl", "--socket", socket]
    command += ["set", str(gpu.index), "-p", f"{watts:g}"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as holder:
        try:
            if not _wait(lambda: _value(client, gpu, holder.pid) is not None):
                return Condition(what, False, f"the holder set nothing within {WITHIN_S:g} s")
        finally:
            holder.kill()
            begin_s = time.monotonic()

    def restored() -> bool:
        gone = not any(lease.gpu == gpu.uuid for lease in client.leases())
        return gone and client.state(gpu.uuid)[gpu.uuid].power_limit_mw == before.power_limit_mw

    done = _wait(restored)
    took_ms = (time.monotonic() - begin_s) * 1000
    text = f"restored after {took_ms:.0f} ms" if done else f"not restored within {WITHIN_S:g} s"
    return Condition(what, done, text)


def kill_daemon(client: Client, gpu: GpuInfo, pid: int) -> Condition:
    """SIGKILL to zeusd while this process holds a limit: it returns, and the lease with it."""
    assert gpu.power_limit_min_mw is not None
    what = "a killed zeusd returns, and live holders keep their leases"
    wanted = client.set(gpu.uuid, Control.POWER_LIMIT, [gpu.power_limit_min_mw])[gpu.uuid]
    os.kill(pid, signal.SIGKILL)
    begin_s = time.monotonic()
    done = _wait(lambda: _value(client, gpu, os.getpid()) == wanted)
    took_ms = (time.monotonic() - begin_s) * 1000
    limit = client.state(gpu.uuid)[gpu.uuid].power_limit_mw if done else None
    client.release(gpu.uuid)
    if not done:
        return Condition(what, False, f"the lease was not back within {WITHIN_S:g} s")
    return Condition(what, [limit] == wanted, f"the lease was back after {took_ms:.0f} ms")


def _value(client: Client, gpu: GpuInfo, pid: int) -> list[int] | None:
    """Returns the value under a process's lease on the power limit."""
    for lease in client.leases():
        if lease.gpu == gpu.uuid and lease.pid == pid and lease.control is Control.POWER_LIMIT:
            return lease.value
    return None


def _wait(condition: Callable[[], bool]) -> bool:
    """Whether a condition became true in time; zeusd may be down meanwhile."""

    def met() -> bool:
        try:
            return condition()
        except ZeusIpcError:
            return False

    return eventually(met, bool, WITHIN_S)


def refuse_unless_free(client: Client, gpus: Sequence[GpuInfo]) -> None:
    """Checks that the user is an administrator and nobody uses the GPUs.

    Raises:
        CommandError: One of them is not so.
    """
    if not client.policy().admin:
        raise CommandError(
            "only an administrator may exercise GPUs; run it with sudo, or ask for "
            "[access] admin_users in zeusd.toml",
            ErrorCode.PERMISSION_DENIED,
        )
    index = {gpu.uuid: gpu.index for gpu in gpus}
    for uuid, listed in client.processes(list(index)).items():
        computing = [process for process in listed.processes if process.compute]
        if computing:
            who = f"process {computing[0].pid} ({computing[0].command or 'unknown'})"
            raise CommandError(
                f"{who} computes on GPU {index[uuid]}; exercise GPUs that nobody uses",
                ErrorCode.LEASE_HELD,
            )
    for lease in client.leases():
        if lease.gpu in index:
            raise CommandError(
                f"{lease.control.value} of GPU {index[lease.gpu]} is held by process {lease.pid}; "
                "wait for its end, or see `zeusctl leases`",
                ErrorCode.LEASE_HELD,
            )


def run(
    client: Client,
    socket: str,
    gpus: Sequence[GpuInfo],
    *,
    daemon_pid: int | None = None,
    library: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ExerciseReport:
    """Exercises GPUs, one after another.

    Args:
        daemon_pid: Zeusd's process, to be killed once; None: it is left alone.
        library: The driver's library, for values that zeusd refuses; None: as the system finds it.
        say: Called with a line about each next step.

    Raises:
        CommandError: A GPU would not be left as it is.
    """
    begin_s = time.monotonic()
    node = client.node()
    before = {gpu.uuid: held(client, gpu) for gpu in gpus}
    for gpu in gpus:
        _acquire(client, gpu, before[gpu.uuid])
    exercised: list[ExercisedGpu] = []
    checks: list[Condition] = []
    not_asked = setters = None
    try:
        setters = outside.setters(node.simulated is not None, library)
    except NoDriverError as error:
        not_asked = str(error)
    try:
        for gpu in gpus:
            say(f"GPU {gpu.index}: {count(len(gpu.controls), 'control')} through the range")
            exercised.append(exercise(client, gpu, before[gpu.uuid], node.simulated, setters))
        limited = [gpu for gpu in gpus if Control.POWER_LIMIT.value in gpu.controls]
        for gpu in limited:
            say(f"GPU {gpu.index}: SIGKILL to a process that holds the power limit")
            checks.append(kill_holder(client, socket, gpu, before[gpu.uuid]))
        if daemon_pid is not None and limited:
            say(f"SIGKILL to zeusd (process {daemon_pid})")
            checks.append(kill_daemon(client, limited[0], daemon_pid))
    finally:
        client.release([gpu.uuid for gpu in gpus])
        if setters is not None:
            setters.close()
    left = {gpu.uuid: held(client, gpu) for gpu in gpus}
    checks += [_as_found(gpu, before[gpu.uuid], left[gpu.uuid]) for gpu in gpus]
    return ExerciseReport(
        at=now().isoformat(),
        zeusd=__version__,
        driver=node.driver_version,
        simulated=node.simulated is not None,
        seconds=round(time.monotonic() - begin_s, 3),
        gpus=exercised,
        checks=checks,
        driver_not_asked=not_asked,
    )


def _acquire(client: Client, gpu: GpuInfo, before: ControlValues) -> None:
    """Acquires all leases of a GPU, if their restore targets are the values found.

    Raises:
        CommandError: It is not.
    """
    back = client.acquire(gpu.uuid, gpu.controls, together=True)[gpu.uuid]
    for name, target in back.items():
        holds = before.of(name)
        if holds is not None and holds != list(target.value):
            client.release(gpu.uuid)
            raise CommandError(
                f"GPU {gpu.index} holds {name} {value_text(name, holds)}, and zeusd would "
                f"restore {value_text(name, target.value)}; run `zeusctl reset {gpu.index}` first"
            )


def _as_found(gpu: GpuInfo, values: ControlValues, left: ControlValues) -> Condition:
    differing = [
        f"{name} was {before}, and is {getattr(left, name)}"
        for name, before in vars(values).items()
        if getattr(left, name) != before
    ]
    text = "; ".join(differing) or "everything that can be read is as it was"
    return Condition(f"GPU {gpu.index} is left as it was found", not differing, text)
