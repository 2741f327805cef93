"""Finds the GPUs. Reports a missing one once, and keeps looking for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from zeus_ipc.controls import SPECS, Control, ControlValue, profile_name
from zeus_ipc.replies import GpuInfo, GpuSupport, ProfileInfo
from zeusd.core.model import GpuFacts
from zeusd.devices.port import Backend, CallOutcome, DeviceError, Handle, PowerLimitRange
from zeusd.runtime.trouble import OpenFailure

log = logging.getLogger(__name__)

RETRY_S = 5.0

UNSUPPORTED_AFTER = 3
""""Not supported" replies that make a control unsupported: a driver also gives them during a
reset."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of an enumeration.

    Attributes:
        driver_version: The driver's version, for display.
    """

    driver_version: str | None
    driver: str
    gpus: list[tuple[GpuFacts, Handle]]


T = TypeVar("T")


def attempt(
    call: Callable[..., T], *args: Any, failed: list[DeviceError] | None = None
) -> T | None:
    """A call's result; None: it failed, and the error is in `failed`."""
    try:
        return call(*args)
    except DeviceError as error:
        if failed is not None:
            failed.append(error)
        return None


class Inspector:
    """Reads one GPU repeatedly until each control is known to be supported or unsupported.

    Attributes:
        trouble: Why the GPU cannot even be named.
    """

    def __init__(self, nvml: Backend, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._named = False
        self.trouble = OpenFailure("gpu")
        self._offered: dict[Control, bool] = {}
        self._refusals: Counter[Control] = Counter()
        self._reported: frozenset[Control] = frozenset()

    @property
    def settled(self) -> bool:
        """Whether another attempt cannot find anything new."""
        return self._named and len(self._offered) == len(SPECS)

    def look(self) -> tuple[GpuFacts, Handle] | None:
        """The GPU, if something new is known about it.

        Raises:
            DeviceError: It cannot even be named.
        """
        try:
            return self._look()
        except DeviceError as error:
            cause = f"GPU {self._index} cannot be used: {error}"
            if not self._named and self.trouble.device_failed(error, cause):
                log.warning(
                    "%s; retrying every second",
                    cause,
                    extra={
                        "event": "gpu_unusable",
                        "index": self._index,
                        "device_code": error.code,
                    },
                )
            raise

    def _look(self) -> tuple[GpuFacts, Handle] | None:
        gpu = self._nvml.device_handle(self._index)
        values: dict[Control, ControlValue] = {}
        limits = None
        for control, spec in SPECS.items():
            try:
                if control not in self._offered:
                    self._offered[control] = self._nvml.offers(gpu, control)
                if not self._offered[control]:
                    continue
                if spec.readable:
                    values[control] = self._nvml.read_control(gpu, control)
                if control is Control.POWER_LIMIT:
                    limits = self._nvml.power_limits(gpu)
            except DeviceError as error:
                self._failed(control, error)
        offered = frozenset(one for one, there in self._offered.items() if there)
        look = GpuFacts(_describe(self._nvml, self._index, gpu, offered, limits), values), gpu
        news = not self._named or offered != self._reported
        self._named, self._reported = True, offered
        self.trouble.works()
        return look if news else None

    def _failed(self, control: Control, error: DeviceError) -> None:
        self._offered.pop(control, None)
        if error.outcome is CallOutcome.UNSUPPORTED:
            self._refusals[control] += 1
            if self._refusals[control] >= UNSUPPORTED_AFTER:
                self._offered[control] = False


def inspect_gpu(nvml: Backend, index: int) -> tuple[GpuFacts, Handle]:
    """Reads one GPU once.

    Raises:
        DeviceError: The GPU cannot even be named.
    """
    gpu = Inspector(nvml, index).look()
    assert gpu is not None
    return gpu


def _describe(
    nvml: Backend,
    index: int,
    gpu: Handle,
    offered: frozenset[Control],
    limits: PowerLimitRange | None,
) -> GpuInfo:
    """The constant properties of one GPU."""
    sensors = attempt(nvml.sensors, gpu)
    profiles = attempt(nvml.power_profiles, gpu) if Control.POWER_PROFILE in offered else None
    memory_mhz = attempt(nvml.supported_memory_clocks, gpu) or []
    gpu_mhz = attempt(nvml.supported_gpu_clocks, gpu, memory_mhz[0]) if memory_mhz else None
    if len(gpu_mhz or ()) < 2:  # some drivers (570) list a single clock, and accept others
        gpu_mhz = None
    return GpuInfo(
        uuid=nvml.uuid(gpu),
        index=index,
        pci_address=nvml.pci_address(gpu),
        device_file=attempt(nvml.device_file, gpu) or "",
        name=nvml.name(gpu),
        vbios=attempt(nvml.vbios, gpu) or "",
        architecture=attempt(nvml.architecture, gpu) or 0,
        memory_mib=attempt(nvml.memory_mib, gpu) or 0,
        power_limit_min_mw=None if limits is None else limits.min_mw,
        power_limit_max_mw=None if limits is None else limits.max_mw,
        power_limit_default_mw=None if limits is None else limits.default_mw,
        power_limit_site_mw=None,
        gpu_clock_range_mhz=[min(gpu_mhz), max(gpu_mhz)] if gpu_mhz else [],
        memory_clocks_mhz=memory_mhz,
        mig_enabled=bool(attempt(nvml.mig_enabled, gpu)),
        runtime_indices=attempt(nvml.runtime_indices, gpu) or [],
        supports=GpuSupport(
            **{control.value: control in offered for control in _NAMED},
            energy_counter=sensors is not None and sensors.energy_mj is not None,
            power_instant=sensors is not None and sensors.power_instant_mw is not None,
            power_average=sensors is not None and sensors.power_average_mw is not None,
        ),
        controls=[control.value for control in SPECS if control in offered],
        module=attempt(nvml.module, gpu),
        power_domain=[
            nvml.uuid(nvml.device_handle(one)) for one in attempt(nvml.power_domain, gpu) or ()
        ],
        power_profiles=[
            ProfileInfo(
                profile=profile.profile,
                name=profile_name(profile.profile),
                priority=profile.priority,
                conflicts=list(profile.conflicts),
            )
            for profile in profiles or ()
        ],
    )


_NAMED = (
    *(Control.POWER_LIMIT, Control.GPU_CLOCKS),
    *(Control.MEMORY_CLOCKS, Control.PERSISTENCE_MODE),
)
"""Controls with a field in `GpuSupport`."""


class DeviceFinder:
    """Initialises NVML on its own thread, and reports the GPUs that it finds."""

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
        self._inspectors: list[Inspector] = []
        self.first_attempt_over = threading.Event()
        self.error: DeviceError | None = None
        self.trouble = OpenFailure("driver")
        self._thread = threading.Thread(target=self._run, name="device-finder", daemon=True)

    @property
    def troubles(self) -> list[OpenFailure]:
        """Those of the driver, and of each GPU."""
        return [self.trouble, *(inspector.trouble for inspector in self._inspectors)]

    def start(self) -> None:
        """Starts the search."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the search and closes the library."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if self._initialised:
            self._initialised = False
            attempt(self._nvml.shutdown)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._find()
                self.first_attempt_over.set()
                self._find_later()
                return
            except DeviceError as error:
                self.error = error
                if self.trouble.device_failed(error):
                    log.warning(
                        "no GPUs yet: %s; retrying every %g s",
                        error,
                        self._retry_s,
                        extra={"event": "no_driver", "device_code": error.code},
                    )
            finally:
                self.first_attempt_over.set()
            self._stop.wait(self._retry_s)

    def _find_later(self) -> None:
        """Retries GPUs that could not be used, or whose properties are not all known yet."""
        while unsettled := [inspector for inspector in self._inspectors if not inspector.settled]:
            # Pause between attempts on a GPU whose properties are not all known yet.
            if self._stop.wait(min(1.0, self._retry_s)):
                return
            gpus = []
            for inspector in unsettled:
                with contextlib.suppress(DeviceError):
                    news = inspector.look()
                    if news is not None:
                        gpus.append(news)
            if gpus:
                self._report(gpus)

    def _find(self) -> None:
        """Reports the GPUs."""
        self._nvml.init()
        self._initialised = True
        gpus: list[tuple[GpuFacts, Handle]] = []
        try:
            count = self._nvml.device_count()
            if not count:
                raise DeviceError(CallOutcome.TRANSIENT, "device_count", "the driver has no GPU")
        except DeviceError:
            self._initialised = False
            attempt(self._nvml.shutdown)
            raise
        inspectors = [Inspector(self._nvml, index) for index in range(count)]
        failed: list[DeviceError] = []
        for inspector in inspectors:
            try:
                news = inspector.look()
            except DeviceError as error:
                failed.append(error)
            else:
                assert news is not None
                gpus.append(news)
        if len(failed) == count and failed[0].outcome is CallOutcome.TRANSIENT:
            self._initialised = False
            attempt(self._nvml.shutdown)
            raise failed[0]
        self.error = None
        self.trouble.works()
        self._inspectors = inspectors
        self._report(gpus)

    def _report(self, gpus: list[tuple[GpuFacts, Handle]]) -> None:
        version = attempt(self._nvml.driver_version)
        self._on_found(Found(version, self._driver_id(), gpus))
