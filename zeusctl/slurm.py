"""A job and its GPUs, from the variables of Slurm's Prolog and Epilog.

`SLURM_JOB_GPUS` counts positions in gres.conf, neither NVML's indices nor device numbers.
`CUDA_VISIBLE_DEVICES` there has UUIDs where Slurm knows them (`AutoDetect=nvml`, whole GPUs from
25.11 on). Else a position leads to a device file, the file's number to a PCI address, and that to
the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeusctl.exits import CommandError, Exit
from zeusctl.parts import MIG, Part, together

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

GRES_CONF = "/etc/slurm/gres.conf"
DRIVER = "/proc/driver/nvidia/gpus"


class SlurmJob(NamedTuple):
    """The job that a Prolog or Epilog is about.

    Attributes:
        name: Its id.
        run: Its SLUID (from Slurm 25.11 on), else its restart count.
        uid: Its user; None: unknown.
        control_group: Its SLUID, if control groups are named by it.
    """

    name: str
    run: str
    uid: int | None
    control_group: str


def job_of(environment: Mapping[str, str]) -> SlurmJob:
    """The job.

    Raises:
        CommandError: These are not the variables of a Prolog or Epilog.
    """
    name = environment.get("SLURM_JOB_ID", "")
    if not name:
        raise CommandError(
            "SLURM_JOB_ID is not set; --slurm is for Slurm's Prolog and Epilog", Exit.USAGE, "usage"
        )
    sluid = environment.get("SLURM_JOB_SLUID", "")
    uid = environment.get("SLURM_JOB_UID", "")
    run = sluid or environment.get("SLURM_JOB_RESTART_COUNT") or "0"
    return SlurmJob(name, run, int(uid) if uid.isdecimal() else None, sluid)


def parts_of(
    environment: Mapping[str, str], devices: Mapping[str, Part], gpus: Sequence[GpuInfo]
) -> list[Part]:
    """Returns the MIG devices that Slurm gave to the job, as parts of GPUs; empty if it gave none.

    Args:
        environment: That of the Prolog or Epilog.
        devices: The MIG devices of the node, by UUID.
        gpus: All of the node.

    Raises:
        CommandError: A MIG device of the job is not known here.
    """
    visible = [one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not any(one.startswith(MIG) for one in visible):
        return []
    known = {gpu.uuid: Part(gpu.uuid) for gpu in gpus} | {**devices}
    for one in visible:
        if one not in known:
            raise _unknown(one)
    return together(known[one] for one in visible)


def gpus_of(
    environment: Mapping[str, str],
    gpus: Sequence[GpuInfo],
    hostname: str,
    gres_conf: str = GRES_CONF,
    driver: str = DRIVER,
) -> list[GpuInfo]:
    """Returns the GPUs of the job, which may be none.

    Args:
        environment: That of the Prolog or Epilog.
        gpus: All of the node.
        hostname: The node, as gres.conf may name it.
        gres_conf: Slurm's list of devices; need not exist.
        driver: Where the driver lists its GPUs.

    Raises:
        CommandError: A GPU of the job is not known here.
    """
    visible = [one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if visible and all(one.startswith(("GPU-", "MIG-")) for one in visible):
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        return [_known(by_uuid.get(one), one) for one in visible]
    positions = _numbers(environment.get("SLURM_JOB_GPUS", ""))
    if not positions:
        return []
    by_minor = _by_minor(gpus, driver)
    order = _device_numbers(gres_conf, hostname) or sorted(by_minor)
    return [
        _known(
            by_minor.get(order[position]) if position < len(order) else None,
            f"at position {position} of {gres_conf}",
        )
        for position in positions
    ]


def _known(gpu: GpuInfo | None, name: str) -> GpuInfo:
    if gpu is None:
        raise _unknown(name)
    return gpu


def _unknown(name: str) -> CommandError:
    return CommandError(
        f"Slurm gave the job the GPU {name}, which zeusd does not know; `zeusctl gpus` lists "
        "those it knows",
        Exit.UNKNOWN,
        "unknown_gpu",
    )


def _numbers(text: str) -> list[int]:
    """The numbers of `0,2-3`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


def _by_minor(gpus: Sequence[GpuInfo], driver: str) -> dict[int, GpuInfo]:
    """Returns GPUs by the number of their device file, or by NVML's index if the driver lists
    none.
    """
    found: dict[int, GpuInfo] = {}
    for information in Path(driver).glob("*/information"):
        minor = re.search(r"^Device Minor:\s*([0-9]+)", information.read_text(), re.MULTILINE)
        pci = information.parent.name.lower()
        for gpu in gpus:
            if minor is not None and gpu.pci_address.lower().endswith(pci):
                found[int(minor[1])] = gpu
    return found or {gpu.index: gpu for gpu in gpus}


def _device_numbers(gres_conf: str, hostname: str) -> list[int]:
    """Numbers of the device files of this node's GPUs, in the order of gres.conf."""
    try:
        text = Path(gres_conf).read_text()
    except OSError:
        return []
    found: list[int] = []
    for line in text.replace("\\\n", " ").splitlines():
        fields = {
            key.lower(): value
            for key, _, value in (one.partition("=") for one in line.partition("#")[0].split())
        }
        nodes = fields.get("nodename")
        if fields.get("name") != "gpu" or "file" not in fields:
            continue
        if nodes is None or hostname.partition(".")[0] in _expanded(nodes):
            for file in _expanded(fields["file"]):
                number = re.search(r"nvidia([0-9]+)$", file)
                if number is not None:
                    found.append(int(number[1]))
    return found


def _expanded(text: str) -> Iterator[str]:
    """The names of a list such as `gpu[01-04,7],login`."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        bracket = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if bracket is None:
            yield part
            continue
        for one in bracket[2].split(","):
            first, _, last = one.partition("-")
            for number in range(int(first), int(last or first) + 1):
                for rest in _expanded(bracket[3]) if bracket[3] else ("",):
                    yield f"{bracket[1]}{number:0{len(first)}}{rest}"
