"""MIG devices of a GPU, their sizes, and how busy each instance was (GPM, Hopper and later)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container
from typing import Any

from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import DeviceError, Handle, MigInstance, driver_text

_SM_UTIL = 2
"""NVML_GPM_METRIC_SM_UTIL: percent of an instance's SMs that were busy."""

_PROFILES = (4, 5, 3, 2, 1, 0)
"""NVML_GPU_INSTANCE_PROFILE_n_SLICE for n of 7, 8, 4, 3, 2 and 1. The first one that a GPU has is
the whole GPU."""

_ABSENT = (Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.INVALID_ARGUMENT)


class Instances:
    """Reads the MIG devices of GPUs.

    Args:
        call: Calls a function of nvidia-ml-py.
        pynvml: nvidia-ml-py, once it is loaded.
    """

    def __init__(self, call: Callable[..., Any], pynvml: Callable[[], Any]) -> None:
        self._call = call
        self._pynvml = pynvml
        self._sizes: dict[int | None, int] = {}
        self._samples: dict[tuple[int | None, int], Any] = {}
        self._measures: dict[int | None, bool] = {}

    def of(self, gpu: Handle, measure: bool) -> list[MigInstance]:
        """The MIG instances of a GPU; with `measure`, also how busy each one was."""
        instances: list[tuple[str, int, int, int]] = []
        for place in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount", gpu))):
            try:
                mig = self._call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place)
                uuid = self._call("nvmlDeviceGetUUID", mig)
                instance = int(self._call("nvmlDeviceGetGpuInstanceId", mig))
                part = int(self._call("nvmlDeviceGetComputeInstanceId", mig))
                attributes = self._call("nvmlDeviceGetAttributes_v2", mig)
            except DeviceError as error:
                if error.code in (Return.NOT_FOUND, Return.INVALID_ARGUMENT):
                    continue  # no instance has this number, or it was just destroyed
                raise
            instances.append(
                (driver_text(uuid), instance, part, int(attributes.computeInstanceSliceCount))
            )
        used: dict[int, float | None] = dict.fromkeys(instance for _, instance, _, _ in instances)
        if measure:
            used = {instance: self._sm_percent(gpu, instance) for instance in used}
            self._forget_others(gpu, used)
        size = self._size(gpu) if instances else 0
        return [
            MigInstance(uuid, instance, part, slices, size, used[instance])
            for uuid, instance, part, slices in instances
        ]

    def _size(self, gpu: Handle) -> int:
        """Slices of the whole GPU; 0: not known."""
        key = _key(gpu)
        if key not in self._sizes:
            self._sizes[key] = 0
            for profile in _PROFILES:
                try:
                    info = self._call("nvmlDeviceGetGpuInstanceProfileInfo", gpu, profile, 1)
                except DeviceError as error:
                    if error.code in _ABSENT:
                        continue
                    del self._sizes[key]
                    raise
                self._sizes[key] = int(info.sliceCount)
                break
        return self._sizes[key]

    def _sm_percent(self, gpu: Handle, instance: int) -> float | None:
        """Percent of SMs that were busy between the last sample and one taken now."""
        key = _key(gpu)
        try:
            if key not in self._measures:
                support = self._call("nvmlGpmQueryDeviceSupport", gpu)
                self._measures[key] = bool(support.isSupportedDevice)
            if not self._measures[key]:
                return None
            sample = self._call("nvmlGpmSampleAlloc")
        except DeviceError as error:
            if error.code in _ABSENT:
                self._measures[key] = False
                return None
            raise
        try:
            self._call("nvmlGpmMigSampleGet", gpu, instance, sample)
        except DeviceError:
            self._free(sample)
            self._drop((key, instance))
            return None
        before = self._samples.get((key, instance))
        self._samples[key, instance] = sample
        if before is None:
            return None
        try:
            return self._between(before, sample)
        except DeviceError:
            return None
        finally:
            self._free(before)

    def _between(self, before: Any, after: Any) -> float | None:
        pynvml = self._pynvml()
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = 1
        asked.sample1, asked.sample2 = before, after
        asked.metrics[0].metricId = _SM_UTIL
        self._call("nvmlGpmMetricsGet", asked)
        metric = asked.metrics[0]
        if metric.nvmlReturn != Return.SUCCESS or not 0 <= metric.value <= 100:
            return None
        return float(metric.value)

    def _forget_others(self, gpu: Handle, instances: Container[int]) -> None:
        key = _key(gpu)
        for known in [*self._samples]:
            if known[0] == key and known[1] not in instances:
                self._drop(known)

    def _drop(self, key: tuple[int | None, int]) -> None:
        sample = self._samples.pop(key, None)
        if sample is not None:
            self._free(sample)

    def _free(self, sample: Any) -> None:
        self._call("nvmlGpmSampleFree", sample)


def _key(gpu: Handle) -> int | None:
    return ctypes.cast(gpu, ctypes.c_void_p).value
