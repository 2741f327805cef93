"""Repeats the reads inside the sandbox of zeusd's unit, to find those that it denies.

A transient unit with the sandbox of zeusd.service runs a short probe. Its answers are compared with
those outside. This needs systemd and root, and has never run on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeus_common.processes import output_of
from zeusctl.probe.driver import NoDriverError
from zeusd.energy.probed.report import ProbeReport, from_json

SHORT = ("--seconds", "1", "--alone", "0.2", "--calls", "3", "--no-load", "--json")

_SANDBOX = (
    *("CapabilityBoundingSet", "AmbientCapabilities", "NoNewPrivileges", "Device", "Protect"),
    *("Private", "IPAddress", "Restrict", "LockPersonality", "MemoryDenyWriteExecute"),
    *("KeyringMode", "RemoveIPC", "SystemCall", "UMask", "ProcSubset", "TemporaryFileSystem"),
    *("InaccessiblePaths", "ReadOnlyPaths", "ReadWritePaths", "ExecPaths", "NoExecPaths"),
    *("BindPaths", "BindReadOnlyPaths", "Environment"),
)
"""Directives of a sandbox begin with one of these; `RestartSec` and the like do not."""


def properties(unit: str) -> list[str]:
    """The sandbox of a unit, as `systemd-run -p` takes it."""
    section, settings = "", []
    for line in map(str.strip, unit.splitlines()):
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line.startswith(_SANDBOX) and "=" in line:
            settings.append(line)
    return settings


def inside(unit: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The report of a short probe inside a unit's sandbox.

    Raises:
        NoDriverError: It did not run; the message says why.
    """
    command = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect"]
    for one in properties(unit):
        command += ["-p", one]
    command += ["-E", f"PYTHONPATH={Path(__file__).resolve().parents[2]}"]
    for name in sorted(set(os.environ) & {"LD_LIBRARY_PATH"}):
        command += ["-E", f"{name}={os.environ[name]}"]
    command += [sys.executable, "-m", "zeusctl.probe", *SHORT, "--output", "/dev/null", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoDriverError(
            f"--in-unit needs systemd: {error.filename}: {error.strerror}"
        ) from None
    try:
        return from_json(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NoDriverError(
            f"the probe failed inside the sandbox (exit code {done.returncode}): {said}; run as "
            "root, with Python and the checkout outside /home and /tmp"
        ) from None


def unit_file() -> str:
    """Text of zeusd.service: the installed one, else the checkout's.

    Raises:
        NoDriverError: There is neither.
    """
    installed = output_of("systemctl", "cat", "zeusd.service")
    if installed is not None:
        return installed
    shipped = Path(__file__).resolve().parents[2] / "systemd" / "zeusd.service"
    if not shipped.exists():
        raise NoDriverError("there is no zeusd.service; install zeusd's units, or use a checkout")
    return shipped.read_text(encoding="utf-8")


def compare(outside: ProbeReport, body: Mapping[str, Any]) -> dict[str, list[str]]:
    """Sorts reads by whether the sandbox changes their answers.

    Returns:
        `same`: names of reads; `differs`: sentences.
    """
    same: list[str] = []
    differs: list[str] = []
    gpus = {one["index"]: one for one in body["gpus"]}
    unopened = {one["index"]: one["text"] for one in body["unopened"]}
    for gpu in outside.gpus:
        if gpu.index not in gpus:
            why = unopened.get(gpu.index, "gone")
            differs.append(f"GPU {gpu.index} cannot be opened inside: {why}")
            continue
        within = gpus[gpu.index]["answers"]
        for name, one in gpu.answers.items():
            other = within.get(name)
            if other is None or other["code"] == one.code:
                same.append(f"GPU {gpu.index} {name}")
            else:
                inside = f"{other['text']} ({other['code']}) inside"
                differs.append(f"GPU {gpu.index} {one.call}: {one.text} outside, {inside}")
    return {"same": same, "differs": differs}
