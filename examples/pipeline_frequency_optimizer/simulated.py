"""Instructions for a simulated GPU: without, it would stay idle, whatever this process computes.

A real node needs nothing of this.
"""

from __future__ import annotations

from importlib.resources import files

from zeus.callback import Callback
from zeus.device import GPU
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.simulation import SimulatedWork

MEASURED = {"A100": "perseus/a100/gpt3-175b/stage0", "A40": "perseus/a40/gpt3-175b/stage0"}


def node_is_simulated() -> bool:
    """Whether the GPUs here are simulated."""
    return _devices() is not None


def replayed_on(gpu_name: str) -> tuple[str, str | None]:
    """Instructions that a simulated GPU of this name replays, and a note if another's are taken."""
    for model, workload in MEASURED.items():
        if model in gpu_name:
            return workload, None
    path = files("zeusd.devices.simulated") / "data" / "perseus" / "gpt3-175b+a100.columns.csv.xz"
    return f"profile:{path}#stage=0", (
        f"no pipeline was measured on a {gpu_name}; it replays an A100's instructions, and its "
        "power while blocked is the simulation's guess"
    )


class Instructions(Callback):
    """What this process computes, replayed on its GPU if that is simulated.

    As a callback it stands for the kernels of each instruction: they are launched when it begins,
    and it lasts until they are done. Otherwise the GPU is blocked on communication, and draws what
    a GPU draws then. Of several callbacks it comes first, so that the others hear of an
    instruction's end when its kernels are done.

    Args:
        gpu: The GPU of this process.
        workload: Such as `profile:profile.csv#stage=3`.
    """

    def __init__(self, gpu: GPU, workload: str) -> None:
        path = _devices()
        self._work = None if path is None else SimulatedWork(path, [gpu.uuid], workload)

    def on_instruction_begin(self, name: str) -> None:
        """Its kernels are launched."""
        if self._work is not None:
            self._work.launch(1, name)

    def on_instruction_end(self, name: str) -> None:
        """Its kernels are done."""
        if self._work is not None:
            self._work.synchronize()

    def run(self, name: str) -> None:
        """An instruction from its beginning to its end."""
        self.on_instruction_begin(name)
        self.on_instruction_end(name)

    def on_train_end(self) -> None:
        """The GPU falls idle."""
        if self._work is not None:
            self._work.close()


def _devices() -> str | None:
    try:
        with Client() as client:
            return client.node().simulated
    except ZeusIpcError:
        return None  # no zeusd: the library measures in this process, and only real GPUs
