"""A job and its GPUs, from the variables of Slurm's Prolog and Epilog.

`SLURM_JOB_GPUS` counts positions in Slurm's list of devices, which are neither NVML's indices nor
device numbers. In this order, the first that is known decides:

1. UUIDs, where Slurm writes them.
2. The device files of gres.conf, in its order, unless Slurm also detects devices by itself.
3. The orders in which versions of Slurm list what they detect, with and without GPUs that were lost
   since slurmd started: where they name different GPUs, nobody knows which one the job has.

What is not known is an error: nothing may be done to a GPU that is perhaps another job's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeus_common.checks import on_the_bus
from zeus_common.processes import output_of
from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeusctl.exits import USAGE, CommandError
from zeusctl.parts import MIG, UUIDS, Devices, GpuPart, number_of, together
from zeusctl.text import indices

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

FOLDERS = ("/etc/slurm", "/run/slurm/conf", "/var/spool/slurmd/conf-cache")
"""Where the configuration is if $SLURM_CONF does not say; the last two of a configless slurmd."""

TIMEOUT_S = 5.0
_FIELD = re.compile(r'([\w.]+)\s*=\s*(?:"([^"]*)"|(\S+))')
_INCLUDE = re.compile(r"\s*include\s+(\S+)", re.IGNORECASE)
_SHARES = re.compile(r"\b(?:shard|mps)[:=](?:[a-z]\w*:)?([0-9]+)", re.IGNORECASE)

_CLOCK = re.compile(r"[0-9]{1,5}|low|medium|high|highm1")

_REMEDY = "name the devices in gres.conf (Name=gpu File=/dev/nvidia[0-7], without AutoDetect)"


class SlurmJob(NamedTuple):
    """The job that a Prolog or Epilog is about.

    Attributes:
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
            "SLURM_JOB_ID is not set; --slurm is for Slurm's Prolog and Epilog", USAGE
        )
    sluid = environment.get("SLURM_JOB_SLUID", "")
    uid = environment.get("SLURM_JOB_UID", "")
    run = sluid or environment.get("SLURM_JOB_RESTART_COUNT") or "0"
    return SlurmJob(name, run, int(uid) if uid.isdecimal() else None, sluid)


def slurm_names() -> list[str]:
    """The names that control groups may have for the job of this Prolog."""
    names = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_SLUID"))
    return [name for name in names if name]


def parts_of(
    environment: Mapping[str, str],
    devices: Devices,
    hostname: str,
    root: str = "/",
    shares: bool = True,
) -> list[GpuPart]:
    """Returns what the job has of the node's GPUs, which may be nothing.

    Args:
        hostname: The node, as gres.conf may name it.
        root: Where /etc, /proc and /sys are.
        shares: Whether the size of shares matters, for which Slurm's controller may be asked.

    Raises:
        CommandError: A GPU of the job is not known here, or it cannot be known which one it is.
    """
    positions = _numbers(environment.get("SLURM_JOB_GPUS", ""))
    uuids = _uuids(environment)
    if not positions and not uuids:
        return []
    gres = read_gres(environment, hostname, root)
    if not uuids:
        parts = _at(positions, gres, devices, root)
    else:
        parts = [_known(devices.find(uuid), uuid) for uuid in uuids]
        if positions and gres.slots and not gres.detected and not has_mig(environment):
            listed = _at(positions, gres, devices, root)
            if {part.gpu for part in listed} != {part.gpu for part in parts}:
                raise _refusal(
                    f"Slurm gave the job {', '.join(uuids)}, which are not the devices at "
                    f"{_positions(positions)} of {gres.path}; restart slurmd, which has read "
                    "another gres.conf"
                )
    share = _share(environment, gres) if shares else (0, 0)
    return together(part if part.weight else GpuPart(part.gpu, *share) for part in parts)


def _uuids(environment: Mapping[str, str]) -> list[str]:
    for name in ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"):
        listed = [one for one in environment.get(name, "").split(",") if one]
        if listed and all(one.startswith(UUIDS) for one in listed):
            return listed
    return []


def has_mig(environment: Mapping[str, str]) -> bool:
    """Whether the job has MIG devices."""
    return any(uuid.startswith(MIG) for uuid in _uuids(environment))


def _numbers(text: str) -> list[int]:
    """Positions as in `0,2-3`; none of UUIDs."""
    numbers = [] if not text or text.startswith(UUIDS) else indices(text)
    if numbers is None:
        raise _refusal(f"SLURM_JOB_GPUS={text} is neither positions (0,2-3) nor UUIDs")
    return numbers


def _positions(positions: Sequence[int]) -> str:
    return f"position{'s' * (len(positions) > 1)} {', '.join(map(str, positions))}"


def _refusal(message: str) -> CommandError:
    return CommandError(message, ErrorCode.UNKNOWN_GPU)


def _known(part: GpuPart | None, name: str) -> GpuPart:
    if part is None:
        raise _refusal(
            f"Slurm gave the job the GPU {name}, which zeusd does not know; `zeusctl gpus` lists "
            "those it knows, and `zeusctl doctor` those it has lost"
        )
    return part


# ------------------------------------------------------------------------------------- positions


def _at(positions: Sequence[int], gres: Gres, devices: Devices, root: str) -> list[GpuPart]:
    if gres.slots and not gres.detected:
        if max(positions) >= len(gres.slots):
            raise _refusal(
                f"Slurm gave the job {_positions(positions)}, but {gres.path} has "
                f"{len(gres.slots)}; restart slurmd, which has read another gres.conf"
            )
        files = [gres.slots[position] for position in positions]
        if "" in files:
            raise _refusal(
                f"{gres.path} has a MIG device at {_positions(positions)}, and Slurm does not say "
                "which; use AutoDetect=nvml, which gives its UUID"
            )
        return [_known(devices.find(file), file) for file in files]
    parts = []
    orders = [one for one in _orders(devices.gpus, on_the_bus(root)) if len(one) > max(positions)]
    for position in positions:
        meant = {
            None if gpu is None else gpu.uuid: gpu for gpu in (order[position] for order in orders)
        }
        if len(meant) > 1:
            names = ["a lost GPU" if gpu is None else f"GPU {gpu.index}" for gpu in meant.values()]
            raise _refusal(
                f"Slurm gave the job the GPU at position {position}, which may be "
                f"{' or '.join(sorted(names))}: nothing is done; {_REMEDY}"
            )
        uuid = next(iter(meant), None)
        parts.append(
            _known(None if uuid is None else GpuPart(uuid), f"at position {position} of its list")
        )
    return parts


def _orders(gpus: Sequence[GpuInfo], bus: Mapping[str, int | None]) -> list[list[GpuInfo | None]]:
    """The lists of GPUs that Slurm may have: by device number or PCI address, with the lost GPUs
    that it knew when it started, or without."""
    by_address = {gpu.pci_address.lower()[4:]: gpu for gpu in gpus}
    orders: list[list[GpuInfo | None]] = [[by_address[one] for one in sorted(by_address)]]
    if bus:
        orders.append([by_address.get(one) for one in sorted({*bus, *by_address})])
    by_number = {number: gpu for gpu in gpus if (number := number_of(gpu.device_file)) is not None}
    if len(by_number) == len(gpus):
        orders.append([by_number[one] for one in sorted(by_number)])
        numbers = {*by_number, *(number for number in bus.values() if number is not None)}
        if any(gpu.device_file.startswith("/dev/nvidia") for gpu in gpus):
            numbers |= {*range(max(numbers))}  # the driver counts from 0: a gap is a lost GPU
        orders.append([by_number.get(one) for one in sorted(numbers)])
    return orders


# ------------------------------------------------------------------------------------- gres.conf


@dataclass
class Gres:
    """What gres.conf says about this node.

    Attributes:
        slots: The device file at each position; empty for a MIG device.
        detected: Whether Slurm also detects devices, and sorts them.
        shared: Whether jobs may share a GPU (shards, MPS).
    """

    path: Path
    slots: list[str] = field(default_factory=list)
    detected: bool = False
    shared: bool = False


def read_gres(environment: Mapping[str, str], hostname: str, root: str = "/") -> Gres:
    """Reads gres.conf where Slurm does.

    Raises:
        CommandError: It exists, and cannot be read.
    """
    gres = Gres(_file("gres.conf", environment, root))
    node = environment.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    own = everywhere = None
    for fields in _lines(gres.path):
        nodes = fields.get("nodename")
        if nodes is not None and node not in _expanded(nodes):
            continue
        if "autodetect" in fields:
            detects = fields["autodetect"].lower() != "off"
            own, everywhere = (detects, everywhere) if nodes else (own, detects)
        kind = fields.get("name", "").lower()
        gres.shared |= kind in ("shard", "mps")
        if kind == "gpu" and "multiplefiles" in fields:
            gres.slots.append("")
        elif kind == "gpu":
            gres.slots += _expanded(fields.get("file", ""))
    gres.detected = bool(everywhere if own is None else own)
    return gres


def read_settings(environment: Mapping[str, str], root: str = "/") -> tuple[Path, dict[str, str]]:
    """Returns the path of slurm.conf, and its settings by their names in lower case.

    Raises:
        CommandError: It exists, and cannot be read.
    """
    path = _file("slurm.conf", environment, root)
    return path, {name: value for line in _lines(path) for name, value in line.items()}


def _file(name: str, environment: Mapping[str, str], root: str) -> Path:
    """The path of a configuration file of Slurm."""
    path = environment.get("SLURM_CONF")
    if path:
        return Path(path).with_name(name)
    folders = [Path(root, folder.lstrip("/")) for folder in FOLDERS]
    for folder in folders:
        if (folder / "slurm.conf").exists() or (folder / "gres.conf").exists():
            return folder / name
    shown = output_of("scontrol", "show", "config", timeout_s=TIMEOUT_S) or ""
    said = re.search(r"^SLURM_CONF\s*=\s*(\S+)", shown, re.MULTILINE)
    return folders[0] / name if said is None else Path(said[1]).with_name(name)


def _lines(path: Path, depth: int = 0) -> Iterator[dict[str, str]]:
    if depth > 8:
        return
    try:
        text = path.read_bytes().decode("latin-1")  # comments may be of any encoding
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(f"{path} cannot be read ({error.strerror})") from None
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition("#")[0]
        included = _INCLUDE.match(line)
        if included is not None:
            yield from _lines(path.parent / included[1], depth + 1)
        else:
            yield {key.lower(): quoted or value for key, quoted, value in _FIELD.findall(line)}


def _expanded(text: str) -> list[str]:
    """The names of a list such as `gpu[01-04,7],login`."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        bracket = re.fullmatch(r"([^\[]*)\[([0-9]+[0-9,-]*)\](.*)", part)
        if bracket is None:
            hosts.append(part)
            continue
        for one in bracket[2].split(","):
            first, _, last = one.partition("-")
            numbers = range(int(first or 0), int(last or first or 0) + 1)
            names = [f"{bracket[1]}{number:0{len(first)}}" for number in numbers]
            hosts += [name + rest for name in names for rest in _expanded(bracket[3]) or [""]]
    return hosts


# -------------------------------------------------------------------------------------- gpu-freq


def frequencies(
    text: str, gpus: Sequence[GpuInfo]
) -> Iterator[tuple[str, ControlValue, list[GpuInfo]]]:
    """The clocks that Slurm's --gpu-freq asks for, such as `medium,memory=high`: control and value,
    and the GPUs for which it is this value.

    Like Slurm, takes the nearest clock that a GPU has: no number is refused.

    Raises:
        CommandError: It is malformed, or a GPU's driver lists no clocks.
    """
    parts, kinds = text.removeprefix("gpu:").split(","), set[str]()
    for part in [part for part in parts if part != "verbose"] or parts:
        kind, _, word = part.rpartition("=")
        if kind in kinds or kind not in ("", "memory") or not _CLOCK.fullmatch(word):
            raise CommandError(
                f'"{part}" is not {"one more" if kind in kinds else "a"} clock; write MHz, low, '
                "medium, high or highm1, such as 900,memory=high",
                USAGE,
            )
        kinds.add(kind)
        alike: dict[int, list[GpuInfo]] = {}
        for gpu in gpus:
            alike.setdefault(_nearest(word, gpu, bool(kind)), []).append(gpu)
        for mhz, some in alike.items():
            control = Control.MEMORY_CLOCKS if kind else Control.GPU_CLOCKS
            yield control.value, (mhz, mhz), some


def _nearest(word: str, gpu: GpuInfo, memory: bool) -> int:
    clocks = sorted(gpu.memory_clocks_mhz) if memory else gpu.gpu_clock_range_mhz
    if not clocks:
        raise CommandError(
            f"GPU {gpu.index} ({gpu.name}): the driver lists no {'memory ' * memory}clocks",
            ErrorCode.NOT_SUPPORTED,
        )
    low, high = clocks[0], clocks[-1]
    if word.isdecimal():
        mhz = min(max(int(word), low), high)
        return next(clock for clock in clocks if clock >= mhz) if memory else mhz
    if memory:
        middle, last = clocks[(len(clocks) - 1) // 2], clocks[max(len(clocks) - 2, 0)]
    else:  # only the ends are known, and the driver takes its nearest one
        # Between two graphics clocks.
        middle, last = (low + high) // 2, max(high - 15, low)
    return {"low": low, "medium": middle, "highm1": last, "high": high}[word]


# ---------------------------------------------------------------------------------------- shares


def _share(environment: Mapping[str, str], gres: Gres) -> tuple[int, int]:
    """Size of the job's share of each GPU, and of all shares: (0, 0) if it has whole GPUs.

    A Prolog's variables name no shards, so the job is looked up where gres.conf has some.
    """
    percent = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    if percent.isdecimal() and int(percent):
        return int(percent), 100
    shards = environment.get("SLURM_SHARDS_ON_NODE", "")
    if shards.isdecimal() and int(shards):
        return int(shards), 0
    job = environment.get("SLURM_JOB_ID")
    if not gres.shared or not job:
        return 0, 0
    # Nothing else of the job: its name and comment are its user's own words.
    asked = ("-h", "-j", job, "-O", "tres-per-node:256,tres-per-task:256")
    said = output_of("squeue", *asked, timeout_s=TIMEOUT_S)
    if not said:
        return 1, 0  # not known: a share takes nothing from anybody
    sizes = [int(one) for one in _SHARES.findall(said)]
    return (max(1, *sizes), 0) if sizes else (0, 0)
