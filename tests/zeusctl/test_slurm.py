"""The GPUs that Slurm gave to a job, from the Prolog's environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from zeus_common.checks import on_the_bus
from zeusctl.commands.allocate import holdings
from zeusctl.exits import CommandError
from zeusctl.parts import Devices, GpuPart
from zeusctl.slurm import SlurmJob, frequencies, job_of, parts_of

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo


class Gpu:
    """A fake GPU with the attributes that are read."""

    def __init__(self, index: int, minor: int) -> None:
        self.index = index
        self.name = "Tesla"
        self.gpu_clock_range_mhz = [135, 1380]
        self.memory_clocks_mhz = [1215, 810, 405]
        self.uuid = f"GPU-{index}"
        self.pci_address = f"00000000:{0x10 + index:02X}:00.0"
        self.device_file = f"/dev/nvidia{minor}"


GPUS = [Gpu(index, index) for index in range(4)]
REVERSED = [Gpu(index, 3 - index) for index in range(4)]
"""A node whose device files are numbered the other way round than NVML counts."""

SPLIT = {"MIG-a": GpuPart("GPU-1", 1, 7, 9), "MIG-b": GpuPart("GPU-1", 3, 7, 10)}
FOUR = "Name=gpu File=/dev/nvidia[0-3]\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a machine whose bus and configuration can be written."""
    (tmp_path / "etc/slurm").mkdir(parents=True)
    return tmp_path


def on_bus(root: Path, *gpus: Gpu, lost: bool = False) -> None:
    """What the kernel shows of these GPUs; of one that a driver never took, only its PCI device."""
    for gpu in gpus:
        address = gpu.pci_address[4:].lower()
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        if not lost:
            folder = root / "proc/driver/nvidia/gpus" / address
            folder.mkdir(parents=True)
            minor = gpu.device_file.removeprefix("/dev/nvidia")
            text = f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
            (folder / "information").write_text(text)


def chosen(
    root: Path, gres: str | bytes | None = None, gpus: list[Gpu] = GPUS, **env: str
) -> list[int]:
    if gres is not None:
        text = gres if isinstance(gres, bytes) else gres.encode()
        (root / "etc/slurm/gres.conf").write_bytes(text)
    devices = Devices(cast("list[GpuInfo]", gpus), SPLIT)
    parts = parts_of(env, devices, "node7.example.org", str(root))
    return [next(gpu.index for gpu in gpus if gpu.uuid == part.gpu) for part in parts]


def refused(root: Path, gres: str | None = None, gpus: list[Gpu] = GPUS, **env: str) -> str:
    with pytest.raises(CommandError) as error:
        chosen(root, gres, gpus, **env)
    return str(error.value)


def test_uuids_count_first(root: Path) -> None:
    both = {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0", "SLURM_JOB_GPUS": "2,0"}
    assert chosen(root, **both) == [2, 0]
    assert chosen(root, FOUR, **both) == [2, 0]
    assert chosen(root, SLURM_JOB_GPUS="GPU-3", CUDA_VISIBLE_DEVICES="0") == [3]
    assert "which are not the devices at positions 2, 0" in refused(
        root, "Name=gpu File=/dev/nvidia[3,2,1,0]\n", **both
    )


def test_a_position_is_neither_an_index_nor_a_device_number(root: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,2", "SLURM_JOB_GPUS": "0,2-3"}
    assert chosen(root, "Name=gpu File=/dev/nvidia[1,0,2-3]\n", REVERSED, **env) == [2, 1, 0]
    assert chosen(root, FOUR, REVERSED, **env) == [3, 1, 0]


def test_without_device_files_a_position_counts_where_all_orders_agree(root: Path) -> None:
    """By versions of Slurm: the order of PCI addresses, or of device numbers."""
    assert chosen(root, SLURM_JOB_GPUS="0,2-3") == [0, 2, 3]
    assert chosen(root, "AutoDetect=nvml\n" + FOUR, SLURM_JOB_GPUS="1") == [1]
    said = refused(root, "AutoDetect=nvml\n" + FOUR, REVERSED, SLURM_JOB_GPUS="1")
    assert "may be GPU 1 or GPU 2: nothing is done" in said
    assert "without AutoDetect" in said
    assert "position 9" in refused(root, "", SLURM_JOB_GPUS="9")


@pytest.mark.parametrize("seen", ["nothing", "driver", "bus"])
def test_a_lost_gpu_is_counted(root: Path, seen: str) -> None:
    """zeusd was restarted since, and knows three of four."""
    left = [GPUS[0], GPUS[1], GPUS[3]]
    if seen != "nothing":
        on_bus(root, *left)
        on_bus(root, GPUS[2], lost=seen == "bus")
    assert chosen(root, gpus=left, SLURM_JOB_GPUS="0,1,3") == [0, 1, 3]
    assert "a lost GPU" in refused(root, gpus=left, SLURM_JOB_GPUS="2")
    assert "/dev/nvidia2, which zeusd does not know" in refused(
        root, FOUR, left, SLURM_JOB_GPUS="1,2"
    )
    assert chosen(root, FOUR, left, SLURM_JOB_GPUS="3") == [3]
    assert chosen(root, FOUR, left, CUDA_VISIBLE_DEVICES="GPU-3") == [3]


def test_behind_a_lost_gpu_nothing_is_guessed(root: Path) -> None:
    """slurmd may have been started before or after GPU 0 was lost."""
    assert "may be GPU 1 or GPU 2" in refused(root, gpus=GPUS[1:], SLURM_JOB_GPUS="1")
    assert chosen(root, gpus=GPUS[1:], SLURM_JOB_GPUS="3") == [3]  # before, as it had four


def test_the_last_gpu_is_lost(root: Path) -> None:
    on_bus(root, *GPUS)
    assert chosen(root, gpus=GPUS[:3], SLURM_JOB_GPUS="0-2") == [0, 1, 2]
    assert "which zeusd does not know" in refused(root, gpus=GPUS[:3], SLURM_JOB_GPUS="3")
    assert on_the_bus(str(root))["0000:13:00.0"] == 3


def test_gres_conf_is_read_for_this_node(root: Path) -> None:
    gres = (
        "# comment Name=gpu File=/dev/nvidia3\n"
        "NodeName=node[1-6] Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
        "NodeName=node[07-09],node7 Name=gpu \\\n  File=/dev/nvidia2,/dev/nvidia3 Cores=0-7\n"
        'nodename = node7 name = GPU file="/dev/nvidia[0-1]"\n'
        "NodeName=node8 AutoDetect=nvml\nAutoDetect=off\nInclude more.conf\n"
    )
    (root / "etc/slurm/more.conf").write_text("Name=gpu File=/dev/nvidia7\nInclude gres.conf\n")
    assert chosen(root, gres, SLURM_JOB_GPUS="0,1,2") == [2, 3, 0]
    assert "/dev/nvidia7" in refused(root, SLURM_JOB_GPUS="4")
    with_mig = FOUR.replace("[0-3]", "0") + "Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-cap3\n"
    assert "has a MIG device at position 1" in refused(root, with_mig, SLURM_JOB_GPUS="1")
    assert chosen(root, SLURM_JOB_GPUS="0") == [0]


def test_gres_conf_is_where_slurm_has_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = b"# M\xfcller's node\nName=gpu File=/dev/nvidia[3,2,1,0]\n"
    cache = root / "run/slurm/conf"
    cache.mkdir(parents=True)
    (cache / "slurm.conf").touch()
    (cache / "gres.conf").write_bytes(swapped)
    assert chosen(root, SLURM_JOB_GPUS="0") == [3]  # configless
    assert chosen(root, FOUR, SLURM_JOB_GPUS="0") == [0]
    (root / "elsewhere").mkdir()
    (root / "elsewhere/gres.conf").write_bytes(swapped)
    conf = str(root / "elsewhere/slurm.conf")
    assert chosen(root, FOUR, SLURM_JOB_GPUS="0", SLURM_CONF=conf) == [3]
    for file in (root / "etc/slurm/gres.conf", *cache.iterdir()):
        file.unlink()
    program = root / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'SLURM_CONF              = {conf}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    assert chosen(root, SLURM_JOB_GPUS="0") == [3]
    (root / "elsewhere/gres.conf").unlink()
    (root / "elsewhere/gres.conf").mkdir()
    assert "cannot be read (Is a directory)" in refused(root, SLURM_JOB_GPUS="0", SLURM_CONF=conf)


def test_a_gpu_that_is_not_there_is_an_error_and_no_gpu_is_none(root: Path) -> None:
    assert "MIG-1" in refused(root, CUDA_VISIBLE_DEVICES="MIG-1")
    assert chosen(root) == []
    assert chosen(root, CUDA_VISIBLE_DEVICES="0,1") == []


@pytest.mark.parametrize("text", ["0-x", "3-1", "0,", "x", "GPU", "0-9999999999", "1" * 5000])
def test_what_cannot_be_read_names_no_gpu(root: Path, text: str) -> None:
    assert "is neither positions (0,2-3) nor UUIDs" in refused(root, FOUR, SLURM_JOB_GPUS=text)


def parts(root: Path, **env: str) -> list[GpuPart]:
    return parts_of(env, Devices(cast("list[GpuInfo]", GPUS), SPLIT), "node7", str(root))


def test_mig_devices_are_parts_of_their_gpu(root: Path) -> None:
    env = {"SLURM_JOB_GPUS": "5,6", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert parts(root, **env) == [GpuPart("GPU-1", 4, 7)]
    assert parts(root, CUDA_VISIBLE_DEVICES="MIG-b,GPU-0") == [SPLIT["MIG-b"], GpuPart("GPU-0")]


def test_shares_of_a_gpu_are_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prolog's variables say nothing of shards; Slurm does."""
    (root / "etc/slurm/gres.conf").write_text(FOUR + "Name=shard Count=16\n")
    program = root / "bin/squeue"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent))
    job = {"SLURM_JOB_GPUS": "1", "SLURM_JOB_ID": "7"}
    assert parts(root, **job) == [GpuPart("GPU-1", 1)]  # Slurm does not answer
    for said, share in (
        ("gres:shard:3     N/A", (3, 0)),  # 22.05
        ("gres/shard:a100:2    N/A", (2, 0)),
        ("N/A     gres/shard=2", (2, 0)),
        ("gres/gpu:a100:1     N/A", (0, 0)),
    ):
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        assert parts(root, **job) == [GpuPart("GPU-1", *share)]
    mps = {**job, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    assert parts(root, **mps) == [GpuPart("GPU-1", 25, 100)]
    assert parts(root, **job, SLURM_SHARDS_ON_NODE="4") == [GpuPart("GPU-1", 4)]


def test_a_folder_of_indices_names_no_gpu_that_is_counted_anew(tmp_path: Path) -> None:
    """GPU 2 is lost, and the driver counts the third one as 2 since."""
    for name in "0123":
        (tmp_path / name).write_text(f"job{name}\n")

    def held(*gpus: Gpu) -> dict[str, str]:
        return {one.name: one.part.gpu for one in holdings(tmp_path, cast("list[GpuInfo]", gpus))}

    assert held(*REVERSED) == {f"job{name}": f"GPU-{name}" for name in "0123"}
    assert held(GPUS[0], GPUS[1], GPUS[3]) == {"job0": "GPU-0", "job1": "GPU-1", "job3": "GPU-3"}
    assert held(GPUS[0], GPUS[1], Gpu(2, 3)) == {"job0": "GPU-0", "job1": "GPU-1"}
    amd = Gpu(0, 0)
    amd.device_file = "/dev/dri/renderD128"
    assert held(amd) == {"job0": "GPU-0"}


def test_a_run_is_identified_by_sluid_or_else_by_restarts() -> None:
    old = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_RESTART_COUNT": "2"}
    assert job_of(old) == SlurmJob("7", "2", 1000, "")
    assert job_of({"SLURM_JOB_ID": "7"}) == SlurmJob("7", "0", None, "")
    new = {**old, "SLURM_JOB_SLUID": "sEKNKTV3WPV500"}
    assert job_of(new) == SlurmJob("7", "sEKNKTV3WPV500", 1000, "sEKNKTV3WPV500")
    with pytest.raises(CommandError, match="Prolog"):
        job_of({})


@pytest.mark.parametrize(
    ("text", "gpu", "memory"),
    [
        ("gpu:900", 900, None),
        ("gpu:medium,memory=high,verbose", 757, 1215),
        ("low", 135, None),
        ("high,memory=low", 1380, 405),
        ("highm1,memory=highm1", 1365, 810),
        ("memory=medium", None, 810),
        ("5,memory=1", 135, 405),
        ("99999,memory=99999", 1380, 1215),
        ("memory=500", None, 810),
    ],
)
def test_gpu_freq_is_a_clock_that_the_gpu_has(
    text: str, gpu: int | None, memory: int | None
) -> None:
    gpus = cast("list[GpuInfo]", GPUS[:2])
    found = {control: (value, some) for control, value, some in frequencies(text, gpus)}
    wanted = {"gpu_clocks": gpu, "memory_clocks": memory}
    assert found == {
        control: ((mhz, mhz), gpus) for control, mhz in wanted.items() if mhz is not None
    }


@pytest.mark.parametrize(
    "text",
    ["", "900,", "fast", "gpu=900", "memory=", "-5", "9e2", "123456", "verbose", "900,low"],
)
def test_a_malformed_gpu_freq_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match=" clock; write MHz, low, medium"):
        [*frequencies(text, cast("list[GpuInfo]", GPUS))]


def test_gpus_of_two_products_get_their_own_clocks_and_one_without_is_named() -> None:
    slow, fast = Gpu(0, 0), Gpu(1, 1)
    fast.gpu_clock_range_mhz, fast.memory_clocks_mhz = [345, 1980], []
    gpus = cast("list[GpuInfo]", [slow, fast])
    assert [*frequencies("high", gpus)] == [
        ("gpu_clocks", (1380, 1380), [slow]),
        ("gpu_clocks", (1980, 1980), [fast]),
    ]
    with pytest.raises(CommandError, match=r"GPU 1 \(Tesla\): the driver lists no memory clocks"):
        [*frequencies("memory=high", gpus)]
