"""Measures the power that a GPU draws while it waits for another one, which a plan needs.

In a pipeline, a GPU that has nothing to compute is blocked in a receive. Two processes reproduce
this: the first waits for a tensor, which the second sends late while its GPU computes.

    python profile_p2p.py --gpus 0 1 --duration 30 --output p2p.json

prints time, energy and power, and writes them for `run_optimization.py --p2p-power p2p.json`.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from simulated import Instructions, node_is_simulated, replayed_on

from zeus.device import get_gpus
from zeus.exceptions import ZeusBaseError
from zeus_ipc.errors import ZeusIpcError

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
"""The processes have found each other, warmed up and sent something by then."""
SETTLE_S = 1.0
"""What a GPU draws falls off slowly after work; the wait that is measured begins this much later.
"""
RECEIVES = 5
SIZE = 4096


class Failed(Exception):
    """Raised if nothing could be measured; the message says why."""


@dataclass(frozen=True)
class Result:
    """The file that `run_optimization.py --p2p-power` reads."""

    power_w: float
    time_s: float
    energy_j: float
    gpu: str
    gpus: list[int]
    backend: str


def main() -> None:
    options = parse()
    try:
        result = measure(options)
    except (Failed, ZeusBaseError, ZeusIpcError, ValueError) as error:
        fail(str(error))
    print(f"Time (s): {result.time_s}")
    print(f"Energy (J): {result.energy_j}")
    print(f"Power (W): {result.power_w}")
    if options.output is not None:
        try:
            options.output.write_text(json.dumps(asdict(result), indent=1) + "\n")
        except OSError as error:
            fail(f"--output {options.output} cannot be written ({error.strerror})")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    gpus_help = "GPU that waits, and its peer (0 1)"
    add("--gpus", type=int, nargs=2, default=[0, 1], metavar=("GPU", "PEER"), help=gpus_help)
    add("--backend", choices=["nccl", "gloo"], default="nccl", help="gloo: simulated GPUs (nccl)")
    add("--port", type=int, default=0, help="port for the two processes (0: a free one)")
    add("--duration", type=float, default=60.0, help="seconds to measure the wait (60)")
    peer_help = "work of the peer meanwhile (compute)"
    add("--peer", choices=["compute", "sleep"], default="compute", help=peer_help)
    add("--output", type=Path, help="JSON file for run_optimization.py --p2p-power")
    options = parser.parse_args()
    if not 0.2 <= options.duration <= 3600:
        fail(f"--duration must be from 0.2 to 3600 seconds, not {options.duration:g}")
    if not 0 <= options.port < 1 << 16:
        fail(f"--port must be below {1 << 16}, not {options.port}")
    if min(options.gpus) < 0 or options.gpus[0] == options.gpus[1]:
        fail("--gpus needs two different GPUs, such as 0 1")
    output = options.output
    if output and (output.is_dir() or not os.access(output.resolve().parent, os.W_OK)):
        fail(f"--output {output} cannot be written; name a file in a folder that you may write")
    return options


def measure(options: argparse.Namespace) -> Result:
    """Runs the two processes, and returns the measurement of the first."""
    name = check(options)
    store = rendezvous(options.port)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, store.port, options, theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        time_s, energy_j = result_of(processes, pipes, options)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Result(energy_j / time_s, time_s, energy_j, name, options.gpus, options.backend)


def check(options: argparse.Namespace) -> str:
    """Checks the arguments before anything is started. Returns the first GPU's name."""
    gpus = get_gpus()
    for index in options.gpus:
        if index >= len(gpus):
            raise Failed(
                f"there is no GPU {index}: this process sees {len(gpus)}, and two are needed; see "
                "--gpus and CUDA_VISIBLE_DEVICES"
            )
    name = str(gpus[options.gpus[0]].get_name())
    if node_is_simulated():
        if options.backend == "nccl":
            raise Failed("this node is simulated, and NCCL needs real GPUs; use --backend gloo")
        _, note = replayed_on(name)
        if note is not None:
            print(f"note: {note}", file=sys.stderr)
    elif options.backend == "gloo":
        raise Failed(
            "with gloo a real GPU does not wait but idles, which draws less; use --backend nccl"
        )
    try:
        import torch
    except ModuleNotFoundError:
        raise Failed('PyTorch is not installed; pip install "zeusd[torch]"') from None
    if options.backend == "nccl":
        if not torch.cuda.is_available():
            raise Failed(
                "this PyTorch sees no CUDA GPU, and NCCL needs two; install one that is built for "
                "CUDA"
            )
        if torch.cuda.device_count() <= max(options.gpus):
            raise Failed(
                f"there is no GPU {max(options.gpus)}: PyTorch sees {torch.cuda.device_count()}; "
                "see --gpus and CUDA_VISIBLE_DEVICES"
            )
    return name


def rendezvous(port: int) -> Any:
    """Opens the port on which the two processes meet, so that no other program can take it."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        taken = errno.errorcode[errno.EADDRINUSE] in str(error)
        why = "is taken by another program" if taken else f"cannot be used ({first_line(error)})"
        raise Failed(f"port {port} {why}; omit --port to use a free one") from None


def result_of(
    processes: list[BaseProcess], pipes: list[Connection], options: argparse.Namespace
) -> tuple[float, float]:
    """Waits for the first process's measurement while both processes run."""
    most_s = START_TIMEOUT_S + SETTLE_S + options.duration
    ready = wait(pipes, most_s)
    if not ready:
        raise Failed(
            f"GPUs {options.gpus[0]} and {options.gpus[1]} did not get through within {most_s:g} "
            "s; check that they can send to each other"
        )
    for pipe in ready:
        rank = pipes.index(pipe)
        try:
            said = pipes[rank].recv()
        except EOFError:
            raise Failed(ended(processes[rank], options.gpus[rank])) from None
        if isinstance(said, Broken):
            # The process that lost its peer reports at once; the peer's end shows a moment later.
            peer = processes[1 - rank]
            peer.join(2)
            if peer.exitcode:
                raise Failed(ended(peer, options.gpus[1 - rank]))
            raise Failed(said.why)
        if isinstance(said, str):
            raise Failed(said)
    return said


@dataclass(frozen=True)
class Broken:
    """Raised if a process could not continue, for example because its peer ended."""

    why: str


def ended(process: BaseProcess, gpu: int) -> str:
    """Describes how a process ended."""
    process.join(5)
    code = process.exitcode or 0
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process of GPU {gpu} has ended ({how}) before anything was measured; start again"


def run_rank(rank: int, port: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Runs one of the two processes, which reports its measurement, an error, or a lost peer."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    gpu = options.gpus[rank]
    try:
        pipe.send(exchange(rank, port, gpu, options))
    except (ZeusBaseError, ZeusIpcError) as error:
        pipe.send(str(error))
    except Exception as error:  # noqa: BLE001 - of torch and its libraries, which have many
        pipe.send(Broken(f"GPU {gpu} could not take part: {first_line(error)}"))


def end_with_parent() -> None:
    """Ends this process if its parent is killed: a wait for the peer would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def exchange(rank: int, port: int, gpu: int, options: argparse.Namespace) -> tuple[float, float]:
    """Warms up; then rank 0 measures its wait for the message that rank 1 sends at the end."""
    import torch
    import torch.distributed as dist

    from zeus.monitor import ZeusMonitor

    torch.set_num_threads(1)
    on_gpu = options.backend == "nccl"
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, port, is_master=False)
    timeout = timedelta(seconds=START_TIMEOUT_S + options.duration)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=2, timeout=timeout)
    monitor = ZeusMonitor(gpu_indices=[gpu], cpu_indices=[])
    tensor = torch.ones(SIZE if on_gpu else 8, 8, device=device)
    workload = "" if on_gpu else replayed_on(monitor.gpus[gpu].get_name())[0]
    with Instructions(monitor.gpus[gpu], workload) as work:
        compute(0.5, device, work)
        for _ in range(RECEIVES):
            transfer(rank, tensor)
        if rank == 1:
            for seconds in (SETTLE_S, options.duration):
                if options.peer == "compute":
                    compute(seconds, device, work)
                else:
                    time.sleep(seconds)
                transfer(rank, tensor)
            threading.Event().wait()  # until it is ended: leaving would break the peer's receive
        transfer(rank, tensor)
        # A window waits for the GPU at both ends, so this one ends with the receive.
        with monitor.window("blocked") as window:
            transfer(rank, tensor)
        return window.time, window.total_energy


def transfer(rank: int, tensor: Any) -> None:
    """Sends from rank 1 to rank 0."""
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.recv(tensor, src=1)
    else:
        dist.send(tensor, dst=0)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def compute(seconds: float, device: Any, work: Instructions) -> None:
    """Keeps the GPU busy."""
    import torch

    ends = time.monotonic() + seconds
    if device.type == "cpu":
        while time.monotonic() < ends:
            work.run("forward")
        return
    matrix = torch.rand(SIZE, SIZE, device=device)
    while time.monotonic() < ends:
        for _ in range(10):
            matrix = matrix @ matrix / SIZE
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    """Returns the line of torch's error that says what failed."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def fail(message: str) -> NoReturn:
    """Exits as argparse does for invalid options."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
