"""The GPUs that Slurm gave to a job, from the Prolog's environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from zeusctl.exits import CommandError
from zeusctl.slurm import SlurmJob, gpus_of, job_of

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo


class Gpu:
    """A fake GPU with the attributes that are read."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = f"GPU-{index}"
        self.pci_address = f"00000000:{0x10 + index:02X}:00.0"


GPUS = cast("list[GpuInfo]", [Gpu(index) for index in range(4)])


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A node whose device files are numbered the other way round than NVML counts."""
    for gpu in GPUS:
        folder = tmp_path / "gpus" / gpu.pci_address[4:].lower()
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nDevice Minor: \t {3 - gpu.index}\nGPU Excluded:\t No\n"
        )
    return tmp_path / "gpus"


def chosen(driver: Path, gres: str | None = None, host: str = "node7", **env: str) -> list[int]:
    conf = driver.parent / "gres.conf"
    if gres is not None:
        conf.write_text(gres)
    return [gpu.index for gpu in gpus_of(env, GPUS, host, str(conf), str(driver))]


def test_uuids_count_first(driver: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0", "SLURM_JOB_GPUS": "1,3"}
    assert chosen(driver, **env) == [2, 0]


def test_a_position_is_neither_an_index_nor_a_device_number(driver: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,2", "SLURM_JOB_GPUS": "0,2-3"}
    assert chosen(driver, **env) == [3, 1, 0]  # without gres.conf: by device number
    assert chosen(driver, "Name=gpu File=/dev/nvidia[1,0,2-3]\n", **env) == [2, 1, 0]


def test_gres_conf_is_read_for_this_node(driver: Path) -> None:
    gres = (
        "# comment Name=gpu File=/dev/nvidia3\n"
        "NodeName=node[1-6] Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
        "NodeName=node[07-09],node7 Name=gpu \\\n  File=/dev/nvidia2,/dev/nvidia3 Cores=0-7\n"
        "NodeName=node7 Name=gpu File=/dev/nvidia[0-1]\n"
        "Name=mps Count=100\nAutoDetect=off\n"
    )
    assert chosen(driver, gres, host="node7.example.org", SLURM_JOB_GPUS="0,1,2") == [1, 0, 3]


def test_a_node_whose_driver_lists_nothing_counts_as_nvml_does(tmp_path: Path) -> None:
    assert chosen(tmp_path / "none", SLURM_JOB_GPUS="1") == [1]


def test_a_gpu_that_is_not_there_is_an_error_and_no_gpu_is_none(driver: Path) -> None:
    with pytest.raises(CommandError, match="position 9"):
        chosen(driver, SLURM_JOB_GPUS="9")
    with pytest.raises(CommandError, match="MIG-1"):
        chosen(driver, CUDA_VISIBLE_DEVICES="MIG-1")
    assert chosen(driver) == []


def test_a_run_is_identified_by_sluid_or_else_by_restarts() -> None:
    old = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_RESTART_COUNT": "2"}
    assert job_of(old) == SlurmJob("7", "2", 1000, "")
    assert job_of({"SLURM_JOB_ID": "7"}) == SlurmJob("7", "0", None, "")
    new = {**old, "SLURM_JOB_SLUID": "sEKNKTV3WPV500"}
    assert job_of(new) == SlurmJob("7", "sEKNKTV3WPV500", 1000, "sEKNKTV3WPV500")
    with pytest.raises(CommandError, match="Prolog"):
        job_of({})
