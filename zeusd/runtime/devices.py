"""Finds the GPUs, calmly: what is missing it tells once, and goes on looking for it."""

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
from zeusd.devices.port import Backend, DeviceError, Handle, Outcome, PowerLimits

log = logging.getLogger(__name__)

RETRY_S = 5.0
LOOK_AGAIN_S = 1.0
"""Pause between looks at a GPU of which something is not known yet."""

UNSUPPORTED_AFTER = 3
"""So many answers make a control unsupported: a driver gives the same one while a GPU is reset."""


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


class Inspector:
    """Looks at one GPU, again and again, until each control is known or known to be missing.

    Args:
        nvml: The backend.
        index: The GPU's index.

    Attributes:
        missing: The GPU cannot even be named.
    """

    def __init__(self, nvml: Backend, index: int) -> None:
        self._nvml = nvml
        self.index = index
        self.missing = True
        self._offered: dict[Control, bool] = {}
        self._refusals: Counter[Control] = Counter()
        self._told: frozenset[Control] = frozenset()

    @property
    def settled(self) -> bool:
        """Whether looking again can bring nothing new."""
        return not self.missing and len(self._offered) == len(SPECS)

    def look(self) -> tuple[GpuFacts, Handle] | None:
        """The GPU, if there is something to report that was not known before.

        Raises:
            DeviceError: It cannot even be named.
        """
        gpu = self._nvml.device_handle(self.index)
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
        found = GpuFacts(_describe(self._nvml, self.index, gpu, offered, limits), values), gpu
        news = self.missing or offered != self._told
        self.missing, self._told = False, offered
        return found if news else None

    def _failed(self, control: Control, error: DeviceError) -> None:
        self._offered.pop(control, None)
        if error.outcome is Outcome.UNSUPPORTED:
            self._refusals[control] += 1
            if self._refusals[control] >= UNSUPPORTED_AFTER:
                self._offered[control] = False


def inspect_gpu(nvml: Backend, index: int) -> tuple[GpuFacts, Handle]:
    """What can be known of one GPU at one look.

    Raises:
        DeviceError: The GPU cannot even be named.
    """
    found = Inspector(nvml, index).look()
    assert found is not None
    return found


def _describe(
    nvml: Backend,
    index: int,
    gpu: Handle,
    offered: frozenset[Control],
    limits: PowerLimits | None,
) -> GpuInfo:
    """All that does not change about one GPU."""
    sensors = _try(nvml.sensors, gpu)
    profiles = _try(nvml.power_profiles, gpu) if Control.POWER_PROFILE in offered else None
    return GpuInfo(
        uuid=nvml.uuid(gpu),
        index=index,
        pci_address=nvml.pci_address(gpu),
        name=nvml.name(gpu),
        architecture=_try(nvml.architecture, gpu) or 0,
        memory_mib=_try(nvml.memory_mib, gpu) or 0,
        power_limit_min_mw=None if limits is None else limits.min_mw,
        power_limit_max_mw=None if limits is None else limits.max_mw,
        power_limit_default_mw=None if limits is None else limits.default_mw,
        power_limit_site_mw=None,
        mig_enabled=bool(_try(nvml.mig_enabled, gpu)),
        runtime_indices=_try(nvml.runtime_indices, gpu) or [],
        supports=GpuSupport(
            **{control.value: control in offered for control in _NAMED},
            energy_counter=sensors is not None and sensors.energy_mj is not None,
            power_instant=sensors is not None and sensors.power_instant_mw is not None,
            power_average=sensors is not None and sensors.power_average_mw is not None,
        ),
        controls=[control.value for control in SPECS if control in offered],
        module=_try(nvml.module, gpu),
        power_domain=[
            nvml.uuid(nvml.device_handle(one)) for one in _try(nvml.power_domain, gpu) or ()
        ],
        power_profiles=[
            ProfileInfo(
                profile=one.profile,
                name=profile_name(one.profile),
                priority=one.priority,
                conflicts=list(one.conflicts),
            )
            for one in profiles or ()
        ],
    )


_NAMED = (
    *(Control.POWER_LIMIT, Control.GPU_CLOCKS),
    *(Control.MEMORY_CLOCKS, Control.PERSISTENCE_MODE),
)
"""Controls that `GpuSupport` has a field for, from before `GpuInfo.controls`."""


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
        """Ends the search and closes the library."""
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
                        extra={"event": "no_driver", "device_code": error.code},
                    )
                self.error = error
            finally:
                self.first_attempt_over.set()
            self._stop.wait(self._retry_s)

    def _find_later(self, unsettled: list[Inspector]) -> None:
        """Looks again at GPUs that could not be used, or of which something is not known yet."""
        while unsettled and not self._stop.wait(min(LOOK_AGAIN_S, self._retry_s)):
            found = []
            for inspector in unsettled:
                with contextlib.suppress(DeviceError):
                    news = inspector.look()
                    if news is not None:
                        found.append(news)
            unsettled = [inspector for inspector in unsettled if not inspector.settled]
            if found:
                version = _try(self._nvml.driver_version)
                self._on_found(Found(version, self._driver_id(), found))

    def _find(self) -> list[Inspector]:
        """Reports the GPUs; returns those to look at again."""
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
        inspectors = [Inspector(self._nvml, index) for index in range(count)]
        for inspector in inspectors:
            try:
                news = inspector.look()
            except DeviceError as error:
                log.warning(
                    "GPU %d cannot be used: %s; zeusd looks again every second",
                    inspector.index,
                    error,
                    extra={
                        "event": "gpu_unusable",
                        "index": inspector.index,
                        "device_code": error.code,
                    },
                )
            else:
                assert news is not None
                found.append(news)
        self.error = None
        self._on_found(Found(version, self._driver_id(), found))
        return [inspector for inspector in inspectors if not inspector.settled]
