"""Processes and MIG devices as NVML lists them."""

from __future__ import annotations

import time

import pytest

from tests.zeusd.devices.opening import Opener, code_of
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import GpuProcess

MIB = 1024 * 1024


def test_processes_are_listed_once_with_any_activity(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    assert nvml.processes(gpu) == []
    double.computes(0, 4242)
    assert nvml.processes(gpu) == [GpuProcess(4242, MIB, compute=True)]
    double.draws(0, 17)
    assert nvml.processes(gpu) == [
        GpuProcess(17, 3 * MIB, compute=False),
        GpuProcess(4242, MIB, compute=True),
    ]
    double.draws(0, 4242)
    assert nvml.processes(gpu) == [GpuProcess(4242, 3 * MIB, compute=True)]


def test_a_driver_that_cannot_list_what_draws_names_what_computes(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.computes(0, 4242)
    double.inject(0, "nvmlDeviceGetGraphicsRunningProcesses_v3", Return.NOT_SUPPORTED)
    assert [process.pid for process in nvml.processes(gpu)] == [4242]
    double.inject(0, "nvmlDeviceGetComputeRunningProcesses_v3", Return.GPU_IS_LOST)
    assert code_of(nvml.processes, gpu) == Return.GPU_IS_LOST


def test_processes_of_a_split_gpu_name_their_instance(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 9, "mig": 1, "instance": 7, "compute_pid": 4242})
    gpu = nvml.device_handle(0)
    assert nvml.mig_enabled(gpu)
    assert nvml.processes(gpu) == [GpuProcess(4242, MIB, True, 7, 0)]
    assert code_of(nvml.utilization_percent, gpu) == Return.NOT_SUPPORTED


def test_each_process_has_a_sample_of_its_use(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"compute_pid": 4242, "second_pid": 4343})
    gpu = nvml.device_handle(0)
    assert nvml.process_utilization(gpu, 0) == []  # NOT_FOUND is an answer
    double.uses(0, compute_percent=70, second_percent=20, use_age_us=400_000)
    before_us = time.time_ns() // 1000
    first, second = nvml.process_utilization(gpu, 0)
    assert (first.pid, first.sm_percent, second.pid, second.sm_percent) == (4242, 70, 4343, 20)
    assert first.t_us - second.t_us == 400_000
    assert first.t_us >= before_us - 400_000
    assert [one.pid for one in nvml.process_utilization(gpu, second.t_us + 200_000)] == [4242]
    double.uses(0, compute_percent=2**32 - 1, second_percent=20)
    assert [one.pid for one in nvml.process_utilization(gpu, 0)] == [4343]
    double.inject(0, "nvmlDeviceGetProcessUtilization", Return.GPU_IS_LOST)
    assert code_of(nvml.process_utilization, gpu, 0) == Return.GPU_IS_LOST


@pytest.mark.parametrize("architecture", [7, 9], ids=["Ampere", "Hopper"])
def test_mig_devices_have_sizes_and_from_hopper_on_a_use(
    open_nvml: Opener, architecture: int
) -> None:
    nvml, double = open_nvml({"architecture": architecture, "mig": 1, "mig_slices_1": 3})
    gpu = nvml.device_handle(0)
    double.uses(0, mig_percent_1=40)
    (first,) = nvml.mig_instances(gpu, measure=True)
    assert (first.gpu_instance, first.compute_instance) == (7, 0)
    assert (first.slices, first.of, first.sm_percent) == (3, 7, None)
    assert first.uuid.startswith("MIG-")
    double.uses(0, mig_slices_2=4, mig_percent_2=90)
    both = nvml.mig_instances(gpu, measure=True)
    measured = architecture == 9
    assert [one.sm_percent for one in both] == [40.0 if measured else None, None]
    assert [one.sm_percent for one in nvml.mig_instances(gpu, measure=True)] == (
        [40.0, 90.0] if measured else [None, None]
    )
    double.uses(0, mig_slices_1=0)  # reconfigured, while the other continues
    assert {one.sm_percent for one in nvml.mig_instances(gpu)} == {None}
    (left,) = nvml.mig_instances(gpu, measure=True)
    assert (left.uuid, left.sm_percent) == (both[1].uuid, 90.0 if measured else None)
    assert code_of(nvml.process_utilization, gpu, 0) == Return.NOT_SUPPORTED
    assert double.node.samples == measured
    double.inject(0, "nvmlGpmMigSampleGet", Return.UNKNOWN)
    assert [one.sm_percent for one in nvml.mig_instances(gpu, measure=True)] == [None]
    assert double.node.samples == 0, "all are freed"


def test_a_gpu_that_is_not_split_has_no_mig_devices(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"architecture": 9})
    assert nvml.mig_instances(nvml.device_handle(0)) == []
