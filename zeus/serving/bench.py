"""Adds energy to the result of a serving benchmark: joules, joules per token, watts."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeus_common.atomic import write_text
from zeus_common.processes import is_missing
from zeus_ipc.parsing import any_number, parse, read_file

if TYPE_CHECKING:
    from zeus_ipc.client import Client

_MOST_BYTES = 1 << 28  # it may have an entry for each request
TOKENS = ("total_output_tokens", "total_input_tokens")
"""Fields of `vllm bench serve` to divide the energy by."""


def result_path(command: Sequence[str]) -> Path | None:
    """The JSON file that `vllm bench serve --save-result` writes; None: not known.

    It is only known if the command has `--result-filename`.
    """
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--result-filename", nargs="?")
    options.add_argument("--result-dir", nargs="?", default=".")
    arguments, _ = options.parse_known_args(command)
    return (
        Path(arguments.result_dir, arguments.result_filename) if arguments.result_filename else None
    )


def run(command: Sequence[str], client: Client, gpus: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Runs a command, and measures GPUs while it runs.

    Returns:
        The command's exit status, as a shell has it, and energy fields.

    Raises:
        ZeusIpcError: The GPUs cannot be measured.
        OSError: The command cannot be run.
        ValueError: The command does not exist.
    """
    client.windows(list(gpus))  # fails early if the GPUs cannot be measured
    begin_ns = time.monotonic_ns()
    try:
        code = subprocess.run(list(command), check=False).returncode
    except OSError as error:
        if not is_missing(command[0], error):
            raise
        raise ValueError(f"{command[0]}: command not found; check the name and the PATH") from None
    end_ns = time.monotonic_ns()
    by_gpu = client.windows(list(gpus), [(begin_ns, end_ns, False)])
    energies = [by_gpu[gpu].energy_uj[0] for gpu in gpus]
    sigma_uj = sum((by_gpu[gpu].uncertainty_uj[0] / 2) ** 2 for gpu in gpus) ** 0.5
    seconds = (end_ns - begin_ns) / 1e9
    joules = None if None in energies else sum(one for one in energies if one is not None) / 1e6
    return code if code >= 0 else 128 - code, {
        "energy_joules": joules,
        "energy_uncertainty_joules": sigma_uj / 1e6,
        "mean_power_watts": None if joules is None else joules / seconds,
        "energy_window_seconds": seconds,
        "energy_gpus": list(gpus),
    }


def add(path: Path, energy: dict[str, Any]) -> dict[str, Any]:
    """Adds energy fields to a benchmark's JSON file; returns its new content.

    Raises:
        ValueError: It is not a JSON object.
        OSError: It cannot be read or written.
    """
    try:
        result = parse(read_file(path, _MOST_BYTES), _MOST_BYTES, any_number)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise ValueError(f"{path} is not a JSON object; no energy was added")
    joules = energy["energy_joules"]
    result.update(energy)
    for name in TOKENS:
        count = result.get(name)
        if joules is not None and isinstance(count, int | float) and count > 0:
            result[f"joules_per_{name.removeprefix('total_').removesuffix('s')}"] = joules / count
    write_text(path, json.dumps(result) + "\n")
    return result
