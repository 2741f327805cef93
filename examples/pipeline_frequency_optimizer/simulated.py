"""Instructions for a simulated GPU, which otherwise stays idle while this process computes.

A real GPU does not need this module.
"""

from __future__ import annotations

from importlib.resources import files

from zeus.callback import Callback
from zeus.device import GPU
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

MEASURED = {"A100": "perseus/a100/gpt3-175b/stage0", "A40": "perseus/a40/gpt3-175b/stage0"}


def node_is_simulated() -> bool:
    """Whether this node's GPUs are simulated."""
    return _devices() is not None


def replayed_on(gpu_name: str) -> tuple[str, str | None]:
    """Returns a workload for a simulated GPU of this name, and a note if it is of another GPU."""
    for model, workload in MEASURED.items():
        if model in gpu_name:
            return workload, None
    path = files("zeusd.devices.simulated") / "data" / "perseus" / "gpt3-175b+a100.columns.csv.xz"
    return f"profile:{path}#stage=0", (
        f"no pipeline was measured on a {gpu_name}; it replays an A100's instructions, and its "
        "power while blocked is the simulation's guess"
    )


class Instructions(Callback):
    """Replays this process's computation on its GPU, if that is simulated.

    As a callback, it simulates the kernels of each instruction: they are launched when the
    instruction begins, and it lasts until they are done. Between instructions, the GPU draws the
    power of one that is blocked on communication. Put it before other callbacks, so that they are
    called when an instruction's kernels are done.

    Args:
        gpu: The GPU of this process.
        workload: Such as `profile:profile.csv#stage=3`.
    """

    def __init__(self, gpu: GPU, workload: str) -> None:
        path = _devices()
        self._work = None if path is None else SimulatedWork(path, [gpu.uuid], workload)

    def on_instruction_begin(self, name: str) -> None:
        """Launches the instruction's kernels."""
        if self._work is not None:
            self._work.launch(1, name)

    def on_instruction_end(self, name: str) -> None:
        """Waits for the instruction's kernels."""
        if self._work is not None:
            self._work.synchronize()

    def run(self, name: str) -> None:
        """Runs an instruction from its beginning to its end."""
        self.on_instruction_begin(name)
        self.on_instruction_end(name)

    def on_train_end(self) -> None:
        """Leaves the GPU idle."""
        if self._work is not None:
            self._work.close()


def _devices() -> str | None:
    try:
        with Client() as client:
            return client.node().simulated
    except ZeusIpcError:
        return None  # no zeusd: the library measures in this process, so the GPUs are real
