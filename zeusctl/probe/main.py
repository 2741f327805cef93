"""Runs a probe with the given options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeusctl.exits import USAGE, CommandError, check_writable
from zeusctl.probe import sandbox
from zeusctl.probe.backend import AmdDriver, ProbedNode, is_amd
from zeusctl.probe.driver import CallError, NoDriverError
from zeusctl.probe.load import ProbeLoad, TorchLoad, torch_loads
from zeusctl.probe.nvml import NvmlDriver
from zeusctl.probe.page import lines
from zeusctl.probe.run import Loads, ProbeTiming, probe
from zeusd.energy.probed.report import ProbeReport


def run(options: Mapping[str, Any], say: Callable[[str], None]) -> ProbeReport:
    """Probes with the given options.

    Raises:
        CommandError: There is nothing to probe, or an option is wrong.
        OSError: The report cannot be written.
    """
    check_writable(Path(options["output"]))
    only = _indices(options["gpus"])
    if options["seconds"] <= 0 or options["alone"] <= 0 or options["calls"] < 1:
        raise CommandError("--seconds and --alone are above 0, and --calls at least 1", USAGE)
    lengths = (options["seconds"], options["alone"], options["calls"])
    plan = ProbeTiming(*lengths, identify=options["identify"])
    if options["in_unit"] and options["simulate"] is not None:
        raise CommandError("--in-unit is for real GPUs: a simulated node has no sandbox", USAGE)
    driver, load_on = _open(options)
    with closing(driver):
        report = probe(
            driver,
            plan,
            only=only,
            load_on=None if options["no_load"] else load_on,
            stand_in=options["library"] is not None,
            say=say,
        )
    if options["in_unit"]:
        say("all reads again inside zeusd's sandbox")
        library = [] if options["library"] is None else ["--library", options["library"]]
        body = sandbox.inside(sandbox.unit_file(), library)
        report = replace(report, sandbox=sandbox.compare(report, body))
    return report


def finish(
    report: ProbeReport, options: Mapping[str, Any], as_json: bool, show: Callable[[str], None]
) -> None:
    """Writes the report, and shows it.

    Raises:
        OSError: It cannot be written.
    """
    text = report.to_json()
    Path(options["output"]).write_text(text + "\n", encoding="utf-8")
    if as_json:
        show(text)
        return
    for line in lines(report):
        show(line)
    show(f"\nwrote {options['output']}; send it with a description of the machine")


def _indices(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise CommandError(f"--gpus takes indices such as 0,2, not {text!r}", USAGE) from None


def _open(options: Mapping[str, Any]) -> tuple[ProbedNode, Loads]:
    if options["simulate"] is not None:
        try:  # only this needs more than a bare checkout has
            from zeusctl.probe.simulated import ProbedSimulation
        except ImportError as error:
            raise NoDriverError(
                f"simulated GPUs need zeusd's packages ({error}); run `pip install zeusd`"
            ) from None
        try:
            simulated = ProbedSimulation(options["simulate"])
        except ValueError as error:
            raise CommandError(str(error), USAGE) from None
        return simulated, simulated.load_on
    library = options["library"]
    driver = AmdDriver(library) if is_amd(library) else NvmlDriver(library)
    return driver, torch_on(driver)


def torch_on(driver: ProbedNode) -> Loads:
    """Makes bursts with PyTorch, on GPUs where no other process computes. PyTorch is loaded at the
    first one: its context draws power."""

    def load_on(index: int) -> ProbeLoad | None:
        gpu = driver.gpus()[index]
        if isinstance(gpu, CallError):
            return None
        try:
            address = gpu.questions["pci_address"].ask()
            listed = gpu.questions["compute_processes"].ask()
        except CallError:
            return None
        number = torch_loads([address]).get(0)
        if number is None or {pid for pid, _ in listed} - {os.getpid()}:
            return None
        import torch

        return TorchLoad(number, torch)

    return load_on
