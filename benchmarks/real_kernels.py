"""Measures real kernels with zeusd on this machine's first NVIDIA GPU. Sets nothing.

    python benchmarks/real_kernels.py [--seconds S]

Starts a zeusd whose driver calls that change something are blocked, runs matrix products in PyTorch
in bursts of 10 ms to 1.5 s, and prints the energy of a product by length of burst, with the spread
between bursts and the stated uncertainty: a product takes the same energy in each, apart from what
temperature and clock change. Then the CPU that zeusd took, and how much of a training step's time
windows add. Needs PyTorch with CUDA, and a GPU that nobody else uses.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BURSTS = ((0.01, 20), (0.02, 20), (0.05, 20), (0.1, 15), (0.2, 10), (0.5, 5), (1.5, 2))
"""Length (s) and number of bursts."""

CHANGES = ("Set", "Reset", "Clear", "Modify", "Freeze", "Create", "Destroy")
"""Parts of the names of NVML's functions that change something."""


def serve(arguments: list[str]) -> None:
    """Runs zeusd in this process with such functions blocked."""
    import pynvml

    found = pynvml._nvmlGetFunctionPointer

    def guarded(name: str) -> Any:
        if "Get" not in name and any(part in name for part in CHANGES):
            return lambda *_: pynvml.NVML_ERROR_NO_PERMISSION
        return found(name)

    pynvml._nvmlGetFunctionPointer = guarded
    sys.argv = ["zeusd", "serve", *arguments]
    runpy.run_module("zeusd", run_name="__main__", alter_sys=True)


@contextmanager
def daemon(folder: Path) -> Iterator[int]:
    """A guarded zeusd; its process id."""
    socket = folder / "zeusd.sock"
    command = [sys.executable, __file__, "--serve", "--socket", str(socket)]
    command += ["--state-dir", str(folder / "state")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            while not socket.exists() and process.poll() is None:
                time.sleep(0.05)
            if process.poll() is not None:
                sys.exit(f"zeusd did not start:\n{(folder / 'log').read_text()}")
            os.environ["ZEUSD_SOCK_PATH"] = str(socket)
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pid: int, work: Callable[[], object]) -> float:
    """zeusd's CPU while something runs, percent of a core."""
    before_s, begin_s = cpu_s(pid), time.monotonic()
    work()
    return 100 * (cpu_s(pid) - before_s) / (time.monotonic() - begin_s)


def measure(torch: Any, pid: int, seconds: float, chance: random.Random) -> None:
    """Runs everything and prints it."""
    from zeus.monitor import ZeusMonitor

    quiet = share(pid, lambda: time.sleep(20))
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)

    def work(for_s: float) -> int:
        end_s, count = time.monotonic() + for_s, 0
        while time.monotonic() < end_s:
            for _ in range(10):
                product()
            torch.cuda.synchronize()
            count += 10
        return count

    monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
    work(1.0)
    each_s = seconds / work(seconds)
    print(
        f"{torch.cuda.get_device_name(0)}: one product of 8192 x 8192 takes {each_s * 1e3:.2f} ms"
    )
    print(f"\n| burst ms | windows | J per product | spread | stated ± |\n|{'--:|' * 5}")
    for length_s, bursts in BURSTS:
        count = max(1, round(length_s / each_s))
        found = []
        for _ in range(bursts):
            time.sleep(chance.uniform(0.12, 0.33))
            monitor.begin_window("burst")
            for _ in range(count):
                product()
            found.append(monitor.end_window("burst"))
        joules = [one.total_energy / count for one in found]
        stated = statistics.median(one.uncertainty / count for one in found)
        length_ms = 1e3 * statistics.median(one.time for one in found)
        mean, spread = statistics.fmean(joules), statistics.pstdev(joules)
        print(f"| {length_ms:.1f} | {bursts} | {mean:.3f} | {spread:.3f} | {stated:.3f} |")
    attended = share(pid, lambda: time.sleep(5))
    busy = share(pid, lambda: work(5.0))
    print(
        f"\nzeusd's CPU: {quiet:.1f} % before anybody asked, {attended:.1f} % after, {busy:.1f} %"
    )
    print("while the GPU works, of a core")
    plain, measured = [], []
    for _ in range(8):
        begin_s = time.perf_counter()
        for _ in range(40):
            product()
            torch.cuda.synchronize()
        plain.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        for _ in range(40):
            monitor.begin_window("step")
            product()
            monitor.end_window("step")
        measured.append(time.perf_counter() - begin_s)
    ratios = [one / other for one, other in zip(measured, plain, strict=True)]
    print(
        f"a synchronized product with a window takes {statistics.median(ratios):.3f} times as long"
    )


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="to find a product's time")
    parser.add_argument("--seed", type=int, default=1, help="of the pauses between bursts")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("real_kernels: needs PyTorch with CUDA; pip install torch")
    if not torch.cuda.is_available():
        sys.exit("real_kernels: PyTorch sees no NVIDIA GPU here; run it on a machine that has one")
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder)) as pid:
        measure(torch, pid, options.seconds, random.Random(options.seed))


if __name__ == "__main__":
    main()
