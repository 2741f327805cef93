"""Measures the time and the energy of parts of a program.

python measure_block.py --gpu 0
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from work import step_on

from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures parts of a program.")
    parser.add_argument("--gpu", type=int, default=0, help="index in CUDA_VISIBLE_DEVICES (0)")
    parser.add_argument("--epochs", type=int, default=2, help="2")
    parser.add_argument("--steps", type=int, default=10, help="in an epoch (10)")
    parser.add_argument("--log-file", type=Path, help="CSV file that gets a line for each window")
    options = parser.parse_args()

    monitor = ZeusMonitor(gpu_indices=[options.gpu], log_file=options.log_file)
    step = step_on(monitor.gpus[options.gpu], options.gpu)

    # Any block of code.
    with monitor.window("loading") as loading:
        time.sleep(0.5)
    show("loading", loading.measurement)

    # Windows nest. Opening and closing one only reads the clock. Energies are computed when they
    # are read, here after the epoch, so measuring each step delays none.
    for epoch in range(options.epochs):
        steps = []
        with monitor.window("epoch") as whole:
            for _ in range(options.steps):
                with monitor.window("step") as one:
                    step()
                steps.append(one.measurement)
        show(f"epoch {epoch + 1}", whole.measurement)
        for number, measurement in enumerate(steps):
            show(f"  step {number + 1}", measurement)

    # A window may also begin in one function and end in another.
    monitor.begin_window("validation")
    step()
    so_far = monitor.estimate("validation")
    step()
    validation = monitor.end_window("validation")
    show("validation so far", so_far)
    show("validation", validation)


def show(what: str, taken: Measurement) -> None:
    """Formats a window as one line."""
    line = f"{what}: {taken.time:.3f} s, GPU {taken.total_energy:.1f} ± {taken.uncertainty:.1f} J"
    if taken.cpu_energy:  # None if no CPU can be measured
        line += f", CPU {sum(taken.cpu_energy.values()):.1f} J"
    if taken.dram_energy:
        line += f", memory {sum(taken.dram_energy.values()):.1f} J"
    print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ZeusBaseError, ValueError) as error:
        sys.exit(f"measure_block.py: {error}")
