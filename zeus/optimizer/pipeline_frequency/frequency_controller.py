"""Sets one GPU's clock many times a second, without waiting and without another process.

Clocks are set through zeusd, or by this process if there is none and it is allowed to, under a
lease: they are restored however this process ends. Failures are not raised: the GPU runs at its
default clocks, one warning gives the reason, and a thread keeps retrying.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import logging
import os
import threading
from collections.abc import Iterable

from zeus import _node
from zeus.device import get_gpus
from zeus.exceptions import ZeusBaseError, from_ipc
from zeus_ipc.circuit import bounded
from zeus_ipc.client import Client
from zeus_ipc.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    DeferredSetFailed,
    LeaseExpired,
    ZeusIpcError,
)
from zeus_ipc.prepared import PreparedClocks, close_sibling, holds, sibling
from zeus_ipc.requests import Domain

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Period at which zeusd is asked for the results of sets."""

RETRY_S = (2.0, 60.0)
"""First and longest pause after a failure."""

CONTROL = "gpu_clocks"

MOST_WARNINGS = 5
"""Period of log records about a recurring failure."""


class PowerSensor:
    """One GPU's power readings, tick by tick."""

    def __init__(self, client: Client, uuid: str, architecture: int, name: str) -> None:
        from zeusd.energy.meter import sensor_timing

        self._client = client
        self._uuid = uuid
        self._timing = sensor_timing(architecture, name)

    @property
    def window_ns(self) -> int | None:
        """Time before each tick that a reading covers now; None: the whole tick."""
        try:
            counted = self._client.energy(self._uuid)[self._uuid].scope == "gpu"
        except ZeusIpcError:
            counted = False  # no counter
        return self._timing.window_ns if counted else self._timing.power_window_ns

    def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Ticks, ns of CLOCK_MONOTONIC, and their power, mW.

        Raises:
            ZeusBaseGPUError: They cannot be read now.
        """
        try:
            return self._client.timeline(self._uuid, Domain.POWER, max(0, start_ns), end_ns)
        except ZeusIpcError as error:
            raise from_ipc(error) from error


class FrequencyController:
    """Sets the clock of one GPU.

    Args:
        device_id: The GPU, as the framework numbers it.

    Raises:
        ValueError: There is no such GPU.
    """

    def __init__(self, device_id: int = 0) -> None:
        if isinstance(device_id, bool) or not isinstance(device_id, int) or device_id < 0:
            raise ValueError(f"device_id must be the number of a GPU, not {device_id!r}")
        self._device_id = device_id
        self._pid = os.getpid()
        self._client: Client | None = None
        self._sender: PreparedClocks | None = None  # None: nothing is set at the moment
        self._uuid = ""
        self._name = ""
        self._architecture = 0
        self._supported: list[int] = []  # ascending
        self._last = 0  # the clock that was sent last; 0: none, or not known
        self._wanted: set[int] = set()
        self._warnings = 0
        self._failing = False
        self._missing_reported = False
        self._guard = threading.RLock()
        self._ended = threading.Event()
        self._begin()
        atexit.register(self.end)
        self._thread = threading.Thread(target=self._look_after, name="zeus-clocks", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------- properties

    @property
    def supported(self) -> list[int]:
        """Clocks that the GPU supports at its highest memory clock, MHz, descending; empty while it
        cannot be reached.
        """
        return self._supported[::-1]

    @property
    def model(self) -> str:
        """Product name of the GPU; empty while it cannot be reached."""
        return self._name

    @property
    def working(self) -> bool:
        """Whether clocks are being set."""
        return self._sender is not None

    def sensor(self) -> PowerSensor:
        """The GPU's power readings.

        Raises:
            ZeusBaseError: It cannot be reached, or has none.
        """
        client = self._client
        if client is None:
            raise ZeusBaseError(f"GPU {self._device_id} cannot be reached")
        try:
            client.windows(self._uuid)  # starts sampling it, and raises if it has no sensor
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        return PowerSensor(client, self._uuid, self._architecture, self._name)

    # ---------------------------------------------------------------- called by the training loop

    def prepare(self, frequencies: Iterable[int]) -> None:
        """Encodes the messages that set these clocks, so that the first of each costs no more.
        Never raises.
        """
        with self._guard:
            wanted = {mhz for mhz in frequencies if mhz > 0}
            try:
                if self._sender is not None:
                    self._sender.prepare(self._clocks(wanted))
                self._wanted |= wanted
            except Exception as error:  # noqa: BLE001 - training must go on
                self._fail(error)

    def set_frequency(self, frequency: int) -> None:
        """Locks the clock. Returns at once and never raises.

        Args:
            frequency: MHz; 0: do not change the clock.
        """
        sender = self._sender
        if frequency == self._last or not frequency or sender is None:
            return
        try:
            if frequency not in self._wanted:
                self.prepare([frequency])
            # A set that cannot be sent now is sent with the next instruction that has another
            # clock.
            self._last = frequency if sender.lock(frequency) else 0
        except Exception as error:  # noqa: BLE001 - training must go on
            self._fail(error)

    def hold(self, frequency: int) -> bool:
        """Locks the clock and waits until it is in force, some 10 to 20 ms. Never raises.

        Args:
            frequency: MHz.

        Returns:
            Whether it is.
        """
        client = self._client
        if self._sender is None or client is None or os.getpid() != self._pid:
            return False
        mhz = self._nearest(frequency)
        try:
            client.set_gpu_clocks(self._uuid, mhz, mhz)
        except Exception as error:  # noqa: BLE001 - training must go on
            self._fail(error)
            return False
        self._last = frequency
        return True

    def progress(self) -> None:
        """Reports progress of training; see `ZEUS_STALL_TIMEOUT_S`."""
        client = self._client
        if client is not None:
            client.progress()

    def reset(self) -> None:
        """Restores the clock for now: it is the GPU's default until the next `set_frequency`.
        Returns at once, or within 0.3 s if zeusd does not answer, and never raises.
        """
        if not self._last or os.getpid() != self._pid:
            return
        self._last = 0
        client = self._client
        if self._sender is None or client is None:
            return
        try:
            with bounded():
                client.reset(self._uuid, CONTROL, block=False)
        except Exception as error:  # noqa: BLE001 - training must go on
            self._fail(error)

    def end(self) -> None:
        """Restores the clock and releases the lease. Never raises."""
        if os.getpid() != self._pid or self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.end)
        with self._guard:
            client, self._client, self._sender = self._client, None, None
            if client is not None:
                self._release(client)

    # ---------------------------------------------------------------------------------- internals

    def _clocks(self, wanted: Iterable[int]) -> dict[int, int]:
        return {mhz: self._nearest(mhz) for mhz in wanted}

    def _nearest(self, mhz: int) -> int:
        """The nearest supported clock: the plan may have been made on another GPU of the kind."""
        clocks = self._supported
        if not clocks:
            return mhz
        place = bisect.bisect_left(clocks, mhz)
        if place < len(clocks) and clocks[place] == mhz:
            return mhz
        near = min(clocks[max(0, place - 1) : place + 1], key=lambda clock: abs(clock - mhz))
        if not self._missing_reported:
            self._missing_reported = True
            log.warning(
                "the plan asks for %d MHz, which %s does not offer; the nearest clock is set "
                "instead. Make the plan from a profile of this kind of GPU",
                mhz,
                self._name,
            )
        return near

    def _begin(self) -> None:
        """Connects to the GPU and acquires the lease on its clocks."""
        with self._guard:
            if self._ended.is_set():
                return
            try:
                if self._client is None:
                    self._reach()
                assert self._client is not None
                self._client.acquire(self._uuid, [CONTROL])
                sender = PreparedClocks(self._client, self._uuid)
                sender.renew()
                sender.prepare(self._clocks(self._wanted))
            except (ZeusBaseError, ZeusIpcError) as error:
                self._fail(error)
                return
            self._last = 0
            self._sender = sender
        if self._failing:
            self._failing = False
            level = logging.WARNING if self._warnings <= MOST_WARNINGS else logging.DEBUG
            log.log(level, "clocks of %s are set again", self._name)

    def _reach(self) -> None:
        gpus = get_gpus()
        if len(gpus) and self._device_id >= len(gpus):
            raise ValueError(
                f"there is no GPU {self._device_id}: this process sees {len(gpus)}, counted from 0 "
                "after CUDA_VISIBLE_DEVICES; pass the device_id that torch uses"
            )
        try:
            gpu = gpus[self._device_id]
        except ValueError as error:
            raise ZeusBaseError(str(error)) from None
        gpu.check_whole()
        self._supported = sorted(gpu.get_supported_graphics_clocks())
        self._uuid, self._name = gpu.uuid, gpu.get_name()
        self._architecture = gpu.info.architecture
        self._client = sibling(_node.get_client(), _node.stall_timeout_s())

    def _fail(self, error: Exception) -> None:
        """Handles a failure: sets no clock until the thread has recovered."""
        self._sender, self._last = None, 0
        if os.getpid() != self._pid:
            return  # a child of fork does not train: the clocks are its parent's
        message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        level = logging.DEBUG
        if not self._failing:
            self._failing = True
            self._warnings += 1
            if self._warnings <= MOST_WARNINGS:
                level = logging.WARNING
        log.log(
            level,
            "the pipeline's clocks cannot be set; training continues at default clocks, "
            "and zeus retries: %s",
            message,
        )

    def _look_after(self) -> None:
        """The thread: reports failures, and recovers from them."""
        pause_s = RETRY_S[0]
        while not self._ended.wait(LOOK_S if self._sender is not None else pause_s):
            client, sender = self._client, self._sender
            try:
                if sender is None:
                    pause_s = min(RETRY_S[1], 2 * pause_s)
                    self._begin()
                elif client is not None:
                    if not self._failing:
                        pause_s = RETRY_S[0]
                    sender.renew()
                    self._check(client)
            except Exception as error:  # a thread that nobody watches must not end in silence
                log.debug("the thread that sets clocks failed", exc_info=True)
                if not self._ended.is_set():
                    self._fail(error)

    def _check(self, client: Client) -> None:
        """Handles the results of sets that nobody waited for."""
        error: ZeusIpcError
        try:
            if holds(client, self._uuid, CONTROL):
                return
            error = LeaseExpired(
                f"this process lost its lease on the clocks of {self._name}; see zeusd's log"
            )
        except DeferredSetFailed as failed:
            if isinstance(failed.last, DeadlineExceeded):
                self._last = 0  # this process or zeusd was stopped: the next instruction sets it
                return
            error = failed.last
        except ZeusIpcError as failed:
            error = failed
        if self._ended.is_set():
            return
        self._fail(error)
        if isinstance(error, DaemonUnavailable):
            return
        with contextlib.suppress(ZeusIpcError):
            # The clock must not stay set, because the plan is no longer followed.
            client.reset(self._uuid, CONTROL)
        self._begin()

    def _release(self, client: Client) -> None:
        try:
            client.release(self._uuid, [CONTROL])
        except ZeusIpcError as error:
            log.info("clocks are restored by zeusd when this process ends: %s", error.message)
        close_sibling(client)
