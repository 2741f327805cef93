"""Finds the GPUs, calmly: what is missing it tells once, and goes on looking for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from zeus_ipc.messages import GpuInfo, GpuSupport
from zeusd.core.model import GpuFacts
from zeusd.devices.port import Handle, Backend, DeviceError

log = logging.getLogger(__name__)

RETRY_S = 5.0
RETRY_MAX_S = 60.0
VOLTA, AMPERE = 5, 7


@dataclass(frozen=True, slots=True)
class Found:
    """What an enumeration found.

    Attributes:
        driver_version: The driver's version, for people.
        driver: Names this very load of the driver.
        gpus: The GPUs, with their handles.
    """

    driver_version: str | None
    driver: str
    gpus: list[tuple[GpuFacts, Handle]]


T = TypeVar("T")


def _try(call: Callable[..., T], *args: Any) -> T | None:
    try:
        return call(*args)
    except DeviceError:
        return None


def inspect_gpu(nvml: Backend, index: int) -> tuple[GpuFacts, Handle]:
    """All that does not change about one GPU, and what it is set to now.

    Raises:
        DeviceError: The GPU cannot even be named.
    """
    gpu = nvml.device_handle(index)
    architecture = _try(nvml.architecture, gpu) or 0
    limits = _try(nvml.power_limits, gpu)
    persistence = _try(nvml.persistence_mode, gpu)
    sensors = _try(nvml.sensors, gpu)
    info = GpuInfo(
        uuid=nvml.uuid(gpu),
        index=index,
        pci_address=nvml.pci_address(gpu),
        name=nvml.name(gpu),
        architecture=architecture,
        memory_mib=_try(nvml.memory_mib, gpu) or 0,
        power_limit_min_mw=None if limits is None else limits.min_mw,
        power_limit_max_mw=None if limits is None else limits.max_mw,
        power_limit_default_mw=None if limits is None else limits.default_mw,
        power_limit_site_mw=None,
        mig_enabled=bool(_try(nvml.mig_enabled, gpu)),
        supports=GpuSupport(
            power_limit=limits is not None,
            gpu_clocks=architecture >= VOLTA,
            memory_clocks=architecture >= AMPERE,
            persistence_mode=persistence is not None,
            energy_counter=sensors is not None and sensors.energy_mj is not None,
            power_instant=sensors is not None and sensors.power_instant_mw is not None,
            power_average=sensors is not None and sensors.power_average_mw is not None,
        ),
    )
    power_limit_mw = None if limits is None else _try(nvml.power_limit_mw, gpu)
    return GpuFacts(info, power_limit_mw, persistence), gpu


class DeviceFinder:
    """Initialises NVML on a thread of its own and reports what it finds.

    Args:
        nvml: The library.
        on_found: Called on that thread with what was found.
        driver_id: Names the present load of the driver.
        retry_s: Pause between attempts while there is no driver.
    """

    def __init__(
        self,
        nvml: Backend,
        on_found: Callable[[Found], None],
        driver_id: Callable[[], str],
        retry_s: float = RETRY_S,
    ) -> None:
        self._nvml = nvml
        self._on_found = on_found
        self._driver_id = driver_id
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._initialised = False
        self.first_attempt_over = threading.Event()
        self.error: DeviceError | None = None
        self._thread = threading.Thread(target=self._run, name="device-finder", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the search and lets go of the library."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if self._initialised:
            self._initialised = False
            _try(self._nvml.shutdown)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                missing = self._find()
                self.first_attempt_over.set()
                self._find_later(missing)
                return
            except DeviceError as error:
                if self.error is None or self.error.code != error.code:
                    log.warning(
                        "no GPUs yet: %s; trying again every %g s",
                        error,
                        self._retry_s,
                        extra={"event": "no_driver", "nvml_code": error.code},
                    )
                self.error = error
            finally:
                self.first_attempt_over.set()
            self._stop.wait(self._retry_s)

    def _find_later(self, missing: list[int]) -> None:
        """GPUs that could not be used when the others could."""
        pause_s = self._retry_s
        while missing and not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, max(RETRY_MAX_S, self._retry_s))
            found = []
            for index in list(missing):
                try:
                    found.append(inspect_gpu(self._nvml, index))
                    missing.remove(index)
                except DeviceError:
                    continue
            if found:
                version = _try(self._nvml.driver_version)
                self._on_found(Found(version, self._driver_id(), found))

    def _find(self) -> list[int]:
        """Reports the GPUs; returns the indices of those that could not be used."""
        self._nvml.init()
        self._initialised = True
        found: list[tuple[GpuFacts, Handle]] = []
        try:
            count = self._nvml.device_count()
            version = _try(self._nvml.driver_version)
        except DeviceError:
            self._initialised = False
            _try(self._nvml.shutdown)
            raise
        missing: list[int] = []
        for index in range(count):
            try:
                found.append(inspect_gpu(self._nvml, index))
            except DeviceError as error:
                missing.append(index)
                log.warning(
                    "GPU %d cannot be used: %s; looking again every now and then",
                    index,
                    error,
                    extra={"event": "gpu_unusable", "index": index, "nvml_code": error.code},
                )
        self.error = None
        self._on_found(Found(version, self._driver_id(), found))
        return missing
