"""A read-only probe of a node's GPUs: how their sensors and driver calls really behave. It needs
only the vendor's binding, and never sets anything. What its readings say is found by
`zeusd.energy.probed`.
"""

from __future__ import annotations

from typing import NamedTuple


class ProbeOption(NamedTuple):
    """One option: a switch where `kind` is None."""

    name: str
    kind: type | None
    metavar: str | None
    default: str | float | None
    help: str


OPTIONS = (
    ProbeOption(
        "--output", str, "FILE", "zeus-probe.json", "Write the report (JSON) to this file."
    ),
    ProbeOption("--gpus", str, "INDICES", None, "Probe only these GPUs: 0,2."),
    ProbeOption("--seconds", float, "S", 30.0, "Sample all GPUs at once for this time."),
    ProbeOption(
        "--alone", float, "S", 8.0, "Sample each GPU alone for this time, if there are several."
    ),
    ProbeOption("--calls", int, "N", 200, "Time each call this often."),
    ProbeOption(
        "--no-load", None, None, None, "Run no bursts of load, even if PyTorch sees the GPU."
    ),
    ProbeOption("--identify", None, None, None, "Include UUID, serial number and PCI address."),
    ProbeOption("--library", str, "PATH", None, "Load this libnvidia-ml or libamd_smi."),
    ProbeOption(
        "--in-unit", None, None, None, "Read all again inside zeusd's sandbox (systemd, root)."
    ),
    ProbeOption("--simulate", str, "SPEC", None, "Probe simulated GPUs instead, such as 2xh100."),
)
"""All options, in the order of the help."""

ABOUT = """Measure what GPUs and driver really do; set nothing.

Read every getter, time it, find update period, phase and jitter of each sensor, compare the energy
counter with integrated power, and compare the GPU with the simulator's table. With PyTorch (CUDA or
HIP) on a GPU that nobody uses, bursts of load show how much of each update the sensor sees. This
takes half a minute, and a little over half a minute more for each GPU under load. It needs no
daemon, no network and no root. The report has no host name, serial number or UUID.
"""
