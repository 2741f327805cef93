"""Runs work on the GPUs of a simulated node, as a training process does on real ones. For examples
and tests: `NodeInfo.simulated` names the socket. Work is asynchronous, as on a CUDA stream; its
speed depends on the present power limit and clocks.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple

from pydantic import Field, StringConstraints

from zeus_common.tables import read
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.errors import DaemonUnavailable, RequestRejected

PROFILE_PREFIX = "profile:"

_LONGEST_SLEEP_S = 0.05
"""Limits may change while the work runs, so its end is queried this often."""


def split_profile(name: str) -> tuple[str, int, float | None]:
    """Path, stage and blocking power (W) of a workload `profile:FILE.csv#stage=3&blocking_w=80`.

    Raises:
        ValueError: It is not such a name.
    """
    path, _, options = name[len(PROFILE_PREFIX) :].rpartition("#")
    stage, blocking_w = -1, None
    try:
        for option in options.split("&"):
            key, _, value = option.partition("=")
            if key == "stage":
                stage = int(value)
            elif key == "blocking_w":
                blocking_w = float(value)
            else:
                raise ValueError
        if not path or stage < 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{name!r} names no stage of a profile; write profile:FILE.csv#stage=3, with "
            "&blocking_w=80 for the power while nothing runs"
        ) from None
    return path, stage, blocking_w


class ProfileRow(NamedTuple):
    """An instruction of a stage at a clock, MHz; s and J."""

    stage: int
    instruction: Annotated[str, StringConstraints(to_lower=True)]
    frequency: Annotated[int, Field(ge=0)]
    time: Annotated[float, Field(gt=0)]
    energy: Annotated[float, Field(gt=0)]


def read_profile(path: str) -> list[ProfileRow]:
    """The rows of a profile; see `zeus_common.tables.read`."""
    return [row for _, row in read(path, ProfileRow)]


def of_stage(
    profile: Iterable[ProfileRow], stage: int
) -> dict[str, list[tuple[int, float, float]]]:
    """One stage of a profile: MHz, seconds and joules by instruction.

    Of several rows for one clock (of several ranks) the longest time counts, and the mean energy.

    Raises:
        ValueError: It has no such stage.
    """
    by_clock: dict[str, dict[int, list[ProfileRow]]] = {}
    for row in profile:
        if row.stage == stage:
            by_clock.setdefault(row.instruction, {}).setdefault(row.frequency, []).append(row)
    if not by_clock:
        raise ValueError(f"the profile has no stage {stage}")
    return {
        name: [
            (mhz, max(row.time for row in rows), sum(row.energy for row in rows) / len(rows))
            for mhz, rows in clocks.items()
        ]
        for name, clocks in by_clock.items()
    }


class _DeviceSocket:
    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # With a timeout set in Python, connect would not wait for room in a busy server's queue.
        timeout = struct.pack("ll", *divmod(round(timeout_s * 1e6), 10**6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            self._socket.connect(path)
            self._socket.settimeout(timeout_s)
        except OSError as error:
            self._socket.close()
            raise DaemonUnavailable(
                f"cannot reach the simulated devices at {path} ({error.strerror}); is zeusd still "
                "running?"
            ) from None

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            self._socket.send(encode({"op": op, **arguments}))
            data = self._socket.recv(4096)
        except OSError as error:
            raise DaemonUnavailable(f"the simulated devices are gone ({error})") from None
        if not data:
            raise DaemonUnavailable("the simulated devices are gone; zeusd was stopped")
        answer = decode_reply(data)
        if "error" in answer:
            raise RequestRejected(f"the simulated devices refused {op}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._socket.close()

    __del__ = close


class SimulatedWork(AbstractContextManager["SimulatedWork"]):
    """A stream of work on simulated GPUs.

    Args:
        path: The devices' socket, `NodeInfo.simulated`.
        gpus: UUIDs; several advance in lock step.
        workload: A name in the catalog, such as `nsdi23/v100/imagenet/resnet50/adadelta/32`. One
            stage's instructions: `perseus/a100/gpt3-175b/stage3`, or from your own profile:
            `profile:FILE.csv#stage=3`.

    Raises:
        DaemonUnavailable: The node is gone.
        RequestRejected: No such workload, or the GPU runs other work.
        ValueError: The profile cannot be used.
        OSError: It cannot be read.
    """

    def __init__(self, path: str, gpus: Sequence[str], workload: str) -> None:
        profile: dict[str, Any] = {}
        if workload.startswith(PROFILE_PREFIX):
            # Read here, as the simulator may not have access to this process's files.
            file_path, stage, blocking_w = split_profile(workload)
            stages = of_stage(read_profile(file_path), stage)
            profile["blocking_w"] = blocking_w
            profile["instructions"] = {
                name: [number for row in rows for number in row] for name, rows in stages.items()
            }
        self._launched = 0.0
        self._devices = _DeviceSocket(path)
        self._devices.ask("open", gpus=list(gpus), workload=workload, **profile)

    def launch(self, units: float = 1.0, instruction: str | None = None) -> None:
        """Queues units of work and returns at once.

        Args:
            units: Training steps, or runs of the instruction.
            instruction: Such as `forward`, if the workload is made of instructions.
        """
        named = {} if instruction is None else {"instruction": instruction}
        self._devices.ask("launch", units=units, **named)
        self._launched += units

    def synchronize(self, queued: float = 0.0) -> None:
        """Waits until launched work is done.

        Args:
            queued: Units that may still be queued. A job that keeps some queued runs at the GPU's
                speed, even if this process gets no CPU for a moment.
        """
        while True:
            status = self._devices.ask("status")
            left, ends_ns = self._launched - status["done"], status["ends_ns"]
            if left <= queued:
                return
            left_s = _LONGEST_SLEEP_S
            if ends_ns is not None:
                left_s = (int(ends_ns) - time.monotonic_ns()) / 1e9 * (1 - queued / left)
                if left_s <= 0:
                    return
            time.sleep(min(left_s, _LONGEST_SLEEP_S))

    def run(self, units: float = 1.0, instruction: str | None = None) -> None:
        """Launches and waits."""
        self.launch(units, instruction)
        self.synchronize()

    def close(self) -> None:
        """Ends the work; the GPUs become idle."""
        self._devices.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class SimulatedNode:
    """An experimenter's control of a simulated node: inject faults, and read the true energy.

    Args:
        path: The devices' socket, `NodeInfo.simulated`.
    """

    def __init__(self, path: str) -> None:
        self._devices = _DeviceSocket(path)

    def inject(
        self,
        gpu: int | None,
        call: str,
        code: int | None = None,
        *,
        count: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """Makes a call of `zeusd.devices.port.Backend` fail with an NVML code, or take longer.

        `gpu` is None for calls about the node, such as init and device_count.
        """
        self._devices.ask("fault", gpu=gpu, call=call, code=code, count=count, latency_s=latency_s)

    def misbehave(self, gpu: int, **quirks: Any) -> None:
        """Makes the driver deviate from requests on one GPU, until `clear_faults`.

        Args:
            gpu: NVML index.
            quirks: `round_to_mw`, `round_up`, `clamp_mw` (smallest, largest), `ignored_sets`
                (-1: all), `delay_s` and `stale_reads`, as
                `zeusd.devices.simulated.gpu.Quirks` has them.
        """
        self._devices.ask("misbehave", gpu=gpu, quirks=quirks)

    def clear_faults(self) -> None:
        """Removes all faults."""
        self._devices.ask("clear_faults")

    def set_outside(self, gpu: int, power_limit_mw: int) -> None:
        """Sets a power limit outside zeusd, as `nvidia-smi -pl` would."""
        self._devices.ask("outside", gpu=gpu, power_limit_mw=power_limit_mw)

    def set_board_limit(self, gpu: int, power_limit_mw: int | None) -> None:
        """Limits a GPU out of band, as a BMC or a module's adaptive power would; None: no more."""
        self._devices.ask("board", gpu=gpu, power_limit_mw=power_limit_mw)

    def limit_clocks(self, gpu: int, reasons: Sequence[str]) -> None:
        """Limits the clocks of a GPU that works for these reasons too, of `limited.REASONS`."""
        self._devices.ask("limited", gpu=gpu, reasons=list(reasons))

    def reset_clocks_outside(self, gpu: int) -> None:
        """Unlocks the clocks outside zeusd, as Slurm does on all GPUs when a job ends."""
        self._devices.ask("outside", gpu=gpu, clocks=None)

    def true_energy_j(self, gpu: int) -> float:
        """Returns the true energy drawn until now, J."""
        return float(self._devices.ask("truth", gpu=gpu)["energy_j"])

    def close(self) -> None:
        """Ends the connection."""
        self._devices.close()
