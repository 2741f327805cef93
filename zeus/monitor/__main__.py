"""`python -m zeus.monitor energy` and `python -m zeus.monitor power`: until Ctrl-C."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from datetime import datetime
from threading import Event

from zeus.exceptions import ZeusBaseError
from zeus.monitor import PowerDomain, PowerMonitor, ZeusMonitor
from zeus_common.processes import discard_output
from zeus_ipc import __version__


def command_line() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m zeus.monitor", description="Measure GPUs until Ctrl-C."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    energy = commands.add_parser("energy", help="time and energy, printed at the end")
    power = commands.add_parser("power", help="power every now and then, energy at the end")
    for command in (energy, power):
        command.add_argument(
            "--gpu-indices", nargs="+", type=int, metavar="N", help="which GPUs; all if not given"
        )
    power.add_argument(
        "--update-period", type=float, default=1.0, metavar="S", help="seconds between lines"
    )
    power.add_argument(
        "--power-domain",
        choices=[domain.value for domain in PowerDomain],
        default=PowerDomain.DEVICE_INSTANT.value,
        help="which of the GPU's readings",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    options = command_line().parse_args(arguments)
    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        if options.command == "energy":
            _energy(options.gpu_indices, ended)
        else:
            _power(options.gpu_indices, options.update_period, options.power_domain, ended)
    except (ZeusBaseError, ValueError) as error:
        print(f"zeus.monitor: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        discard_output()
    return 0


def _energy(gpu_indices: list[int] | None, ended: Event) -> None:
    monitor = ZeusMonitor(gpu_indices)
    monitor.begin_window("zeus.monitor", sync_execution=False)
    print(f"measuring GPUs {monitor.gpu_indices}; Ctrl-C ends it", file=sys.stderr, flush=True)
    ended.wait()
    measurement = monitor.end_window("zeus.monitor", sync_execution=False)
    _ = measurement.total_energy  # look the energy up before printing
    print(measurement)


def _power(gpu_indices: list[int] | None, period_s: float, domain: str, ended: Event) -> None:
    if not 0 < period_s < math.inf:
        raise ValueError(f"--update-period must be a positive number of s, not {period_s:g}")
    monitor = PowerMonitor(gpu_indices, cpu_indices=[], power_domains=[PowerDomain(domain)])
    begin_s = time.time()
    while not ended.wait(period_s):
        watts = monitor.get_power(power_domain=PowerDomain(domain))
        if watts is not None:
            line = {f"GPU{index}": one for index, one in watts.items()}
            print(datetime.now(), line, flush=True)
    end_s = time.time()
    energy = monitor.get_energy(begin_s, end_s, PowerDomain(domain))
    print(f"\nTotal time (s): {end_s - begin_s:.3f}")
    print("Total energy (J):")
    for index, joules in (energy or {}).items():
        print(f"GPU{index}: {joules:.3f}")


if __name__ == "__main__":
    sys.exit(main())
