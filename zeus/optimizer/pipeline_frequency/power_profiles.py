"""Workload power profiles as settings of a plan: requests one at a time on one GPU.

The training thread states which profile it wants and continues. Another thread requests the latest
under a lease, so that zeusd clears it when this process ends, for any reason. Failures are not
raised: one warning names the reason, and the GPU runs without a profile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from zeus.device import GPUs, get_gpus
from zeus.exceptions import ZeusBaseError, ZeusGPULeaseExpiredError

log = logging.getLogger(__name__)


class PowerProfiles:
    """Requests profiles."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._pid = os.getpid()
        self._guard = threading.Lock()  # of a request
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted: str | None = None
        self._used = self._ended = self._warned = False

    @property
    def offered(self) -> list[str]:
        """Names of the profiles that the GPU offers; none where it cannot be reached."""
        try:
            return get_gpus()[self._device_id].get_supported_power_profiles()
        except (ZeusBaseError, ValueError, IndexError):
            return []

    def want(self, name: str | None) -> None:
        """Requests a profile in place of the last; None: clears that. Returns at once, and never
        raises.
        """
        if name == self._wanted or self._ended or os.getpid() != self._pid:
            return
        self._wanted = name
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zeus-profiles", daemon=True)
            self._thread.start()

    def hold(self, name: str | None) -> bool:
        """The same, and waits until it is done. Returns whether it is in force. Never raises."""
        self._wanted = name
        return self._request(name)

    def end(self) -> None:
        """Clears the profile, for good. Never raises."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        self._changed.set()
        if not self._used:
            return
        with self._guard, contextlib.suppress(ZeusBaseError):  # zeusd does it, when this one ends
            get_gpus().release_power_profiles([self._device_id])

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._ended:
                return
            self._request(self._wanted)

    def _request(self, name: str | None) -> bool:
        with self._guard:
            if self._ended or (name is None and not self._used):
                return name is None
            self._used = True
            try:
                lost = self._set(get_gpus(), [] if name is None else [name])
            except Exception as error:  # noqa: BLE001 - training must go on
                self._warn(getattr(error, "message", None) or f"{type(error).__name__}: {error}")
                return False
        if lost:
            self._warn(f"{lost[0]} is not in force, as another one that is requested has priority")
        return not lost

    def _set(self, gpus: GPUs, names: list[str]) -> list[str]:
        try:
            return gpus[self._device_id].set_power_profiles(names)
        except ZeusGPULeaseExpiredError:
            gpus.acquire([self._device_id], "power_profile")
            return gpus[self._device_id].set_power_profiles(names)

    def _warn(self, reason: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "the plan's power profiles cannot be set, training continues: %s", reason)
