"""Runs examples as their READMEs say, on a simulated node."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.preloaded import Program, preloaded
from tests.support import IMPORTED, RunningDaemon

EXAMPLES = Path(__file__).parents[2] / "examples"
PRELOADED = (
    "torch.distributed.launcher",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "pydantic",
    "zmq",
)
"""Also what PyTorch imports when it first trains: that takes as long as its own import."""

TORCHRUN = (
    *("torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
)


def environment(socket: str, *modules: Path, **more: str) -> dict[str, str]:
    """For a program that finds its zeusd at `socket`, and modules in these folders first."""
    env = {**os.environ, "ZEUSD_SOCK_PATH": socket}
    for name in ("CUDA_VISIBLE_DEVICES", "ZEUS_MAX_SLOWDOWN"):
        env.pop(name, None)
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of each connection where no DNS answers
    path = [*map(str, modules), os.environ.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def python(*arguments: str | Path) -> list[str]:
    """`python`"""
    return [sys.executable, *map(str, arguments)]


def with_torch(*arguments: str | Path) -> list[str]:
    """`python`, where PyTorch has been imported once for all programs."""
    return [preloaded(*PRELOADED).python, *map(str, arguments)]


def start_with_torch(
    *arguments: str | Path, folder: Path, env: dict[str, str], stderr: IO[bytes]
) -> Program:
    """Starts a program of `with_torch` in a folder; its process ID is the one that it has."""
    given, start = [*map(str, arguments)], preloaded(*PRELOADED).start
    return start(*given, cwd=folder, env=env, stdout=stderr, stderr=stderr)


def without_torch(*arguments: str | Path) -> list[str]:
    """`python`, for programs that report errors before they import PyTorch"""
    return [preloaded(*IMPORTED).python, *map(str, arguments)]


def torchrun(ranks: int, *arguments: str | Path) -> list[str]:
    """`torchrun`, at a port that is free; no name must be known to /etc/hosts"""
    return with_torch("-m", *TORCHRUN, "--nproc_per_node", str(ranks), *arguments)


def run(
    command: Sequence[str], folder: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a program in its folder."""
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def limits_w(daemon: RunningDaemon, gpus: int) -> list[float]:
    """The power limits that the first GPUs have."""
    with daemon.client() as client:
        found = client.node().gpus[:gpus]
        states = client.state([gpu.uuid for gpu in found])
    return [(states[gpu.uuid].power_limit_mw or 0) / 1000 for gpu in found]


def limits_set(daemon: RunningDaemon, gpus: int) -> list[list[str]]:
    """The power limits that each of the first GPUs was given by programs, in order.

    One that was set once more counts once: a program does so where the answer came late.
    """
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus[:gpus]]
    records = [
        one
        for one in daemon.records("set")
        if one["control"] == "power_limit" and one["result"] == "ok"
    ]
    every = [[one["new"] for one in records if one["gpu"] == uuid] for uuid in uuids]
    return [[limit for limit, _ in itertools.groupby(limits)] for limits in every]
