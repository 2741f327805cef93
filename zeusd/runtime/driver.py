"""Opens and closes the driver; finds its GPUs and gives each a worker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from zeus_ipc.errors import ErrorCode
from zeusd.core.effects import Read, Write
from zeusd.core.model import Failure
from zeusd.devices.metered import MeteredBackend
from zeusd.runtime.devices import RETRY_S, DeviceFinder, Found
from zeusd.runtime.sampling import Sampling
from zeusd.runtime.trouble import KERNEL_LOG, OpenFailure
from zeusd.runtime.workers import GpuWorker

log = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""How long calls that are under way have to return before the driver is closed anyway."""

DEAD_S = 5.0
"""All calls have failed for so long: the library's session has died. Doubled with each attempt to
open another one, up to `MAX_DEAD_S`, until a call succeeds."""

MAX_DEAD_S = 80.0

REOPENING = "zeusd reopens the driver, whose session has died; try again in a few seconds"

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


class DriverThreads:
    """All threads that call NVML.

    Methods belong to the reactor's thread.
    """

    def __init__(
        self,
        nvml: MeteredBackend,
        sampling: Sampling,
        done: Callable[[int, object], None],
        on_found: Callable[[Found], None],
        driver_id: Callable[[], str],
        retry_s: float = RETRY_S,
    ) -> None:
        self._nvml = nvml
        self._sampling = sampling
        self._done = done
        self._found = on_found
        self._driver_id = driver_id
        self._retry_s = retry_s
        self._workers: dict[str, GpuWorker] = {}
        self._missing: dict[str, OpenFailure] = {}
        self._session = OpenFailure("driver")
        self._reopening = False
        self._dead_s = DEAD_S
        self.finder = self._new_finder()

    @property
    def troubles(self) -> list[OpenFailure]:
        """Those of the driver, its session, and each GPU."""
        opening, *gpus = self.finder.troubles
        missing = () if self._reopening else self._missing.values()
        return [opening if opening.problem else self._session, *gpus, *missing]

    def start(self) -> None:
        """Begins to look for GPUs."""
        self.finder.start()

    def attach(self, inventory: Found) -> None:
        """GPUs were found: each gets a worker, and is sampled."""
        self._reopening = False
        for facts, handle in inventory.gpus:
            uuid = facts.info.uuid
            if uuid not in self._workers:
                self._workers[uuid] = GpuWorker(self._nvml, uuid, handle, self._done)
                self._missing.setdefault(uuid, OpenFailure("gpu", uuid)).works()
        for uuid in self._missing.keys() - self._workers:
            self._missing[uuid].failed(f"{uuid} was not found again")
        self._sampling.gpus_found(
            inventory.driver, [(facts.info, gpu) for facts, gpu in inventory.gpus]
        )

    def submit(self, call: Read | Write) -> None:
        """A call about one GPU; `done` follows in any case."""
        worker = self._workers.get(call.gpu)
        if worker is None:
            failure = Failure(
                ErrorCode.GPU_LOST, f"{call.gpu} was not found again; see `{KERNEL_LOG}`"
            )
            if self._reopening:
                failure = Failure(ErrorCode.DEVICE_BUSY, REOPENING)
            self._done(call.ticket, failure)
        else:
            worker.submit(call)

    def check(self) -> None:
        """Reopens the library if its session has died; call it periodically."""
        failing = self._nvml.failing
        if failing is None or self._reopening or not self._workers:
            if failing is None and self._workers and self._session.works():
                self._dead_s = DEAD_S
                log.warning("the driver answers again", extra={"event": "driver_session_opened"})
            return
        since_ns, error = failing
        if time.monotonic_ns() - since_ns < self._dead_s * 1e9:
            return
        cause = f"all calls fail ({error.call}: {error.text}), so zeusd reopens the driver"
        if self._session.device_failed(error, cause):
            log.error(cause, extra={"event": "driver_session_died", "device_code": error.code})
        self._dead_s = min(2 * self._dead_s, MAX_DEAD_S)
        self._reopening = True
        self._close(lambda _: None, then=self._reopen)

    def _reopen(self, finder: DeviceFinder) -> None:
        self._nvml.failing = None
        if self.finder is finder:  # nobody has quiesced zeusd meanwhile
            finder.start()

    def close_driver(self, ticket: int) -> None:
        """Ends every call and closes the library; `done` gets what device files stay open."""
        self._reopening = False
        self._close(partial(self._done, ticket), then=lambda finder: None)

    def _close(
        self, done: Callable[[tuple[str, ...]], None], then: Callable[[DeviceFinder], None]
    ) -> None:
        """Closes the library: calls `done` with what stays open after some seconds, and `then`,
        with the finder that may open it again, when nothing does."""
        workers, self._workers = self._workers, {}
        finder, self.finder = self.finder, self._new_finder()
        fresh = self.finder
        for worker in workers.values():
            worker.stop()

        def run() -> None:
            end_s = time.monotonic() + PATIENCE_S
            quiet = self._sampling.pause(workers, PATIENCE_S)
            for worker in workers.values():
                quiet &= worker.join(max(0.0, end_s - time.monotonic()))
            if quiet:
                finder.stop()
            else:
                log.error(
                    "a call to the driver does not return; its device files cannot be closed",
                    extra={"event": "driver_stuck"},
                )
            done(open_device_files())
            if not quiet:
                for worker in workers.values():
                    worker.join(None)
                while self._sampling.sampler.reads(workers.keys()):
                    # How often to look whether a call that did not return in time has.
                    time.sleep(0.2)
                finder.stop()
            then(fresh)

        threading.Thread(target=run, name="close-driver", daemon=True).start()

    def open_driver(self, ticket: int) -> None:
        """Opens the library again; `done` follows when the GPUs have been looked for."""
        finder = self.finder
        finder.start()

        def run() -> None:
            finder.first_attempt_over.wait()
            self._done(ticket, None)

        threading.Thread(target=run, name="open-driver", daemon=True).start()

    def stop(self) -> None:
        """Ends all threads. Does not wait for the driver."""
        self.finder.stop()
        for worker in self._workers.values():
            worker.stop()

    def _new_finder(self) -> DeviceFinder:
        return DeviceFinder(self._nvml, self._found, self._driver_id, self._retry_s)


def open_device_files() -> tuple[str, ...]:
    """The driver's device files that this process has open."""
    paths = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(DEVICE_FILES):
            paths.add(target)
    return tuple(sorted(paths))
