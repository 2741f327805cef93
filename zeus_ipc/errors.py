"""Every error that crosses the wire or the client raises, in one small tree.

An error has a stable `code` (the strings of `ErrorCode`), a message of one sentence that says what
to do, and, where NVML refused, NVML's own return code. `from_wire` turns what a reply
carries (`replies.ErrorBody`) into its exception.
"""

from __future__ import annotations

from typing import Any


class ErrorCode:
    """The stable codes. They are part of the protocol: never renamed, only added.

    Each text says what to do. The meaning is in the docstring of its class below or, without a
    class, comes first.
    """

    BAD_REQUEST = "bad_request"
    """Correct the request; the message says which field or value is wrong, and why."""
    UNSUPPORTED_VERSION = "unsupported_version"
    """Use client and daemon of matching releases; `details.protocols` has what this one speaks."""
    UNKNOWN_OPERATION = "unknown_operation"
    """The daemon does not know this operation. Update zeusd, or do without it; `details.operations`
    lists those it knows.
    """
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """Retry with more time; if it happens again for one GPU, check whether its driver hangs
    (`nvidia-smi`, kernel log)."""
    PERMISSION_DENIED = "permission_denied"
    """`zeusctl show` says what you may do, and why not more; the administrator adds you to group
    zeus, or an `[[allow]]` rule to zeusd.toml."""
    LEASE_HELD = "lease_held"
    """Wait until the holder ends or releases; `zeusctl leases` names it."""
    LEASE_EXPIRED = "lease_expired"
    """Acquire or release the control; if the heartbeat stopped, find out why the program hung."""
    RESTORE_PENDING = "restore_pending"
    """Wait: zeusd retries. `zeusctl leases` says why the last attempt failed."""
    UNKNOWN_GPU = "unknown_gpu"
    """`zeusctl gpus` lists the GPUs; after a reset or in a container, look UUIDs up again."""
    OUT_OF_RANGE = "out_of_range"
    """Choose a value within the range that the message names."""
    NOT_SUPPORTED = "not_supported"
    """Do without it: `supports` in the reply to `hello` lists what a GPU offers."""
    DEVICE_ERROR = "device_error"
    """Look `device_code` up in the vendor's documentation (for NVIDIA, nvmlReturn_t), and see the
    kernel log."""
    DEVICE_BUSY = "device_busy"
    """Retry; if it happens again, check what else uses the driver."""
    UNCHANGED = "unchanged"
    """See the driver's log: it accepted the value, but the GPU did not change."""
    GPU_LOST = "gpu_lost"
    """Drain the node and reset the GPU or reboot; its settings are gone with it."""
    QUIESCED = "quiesced"
    """Wait, or have an administrator run `zeusctl resume`."""
    OVERLOADED = "overloaded"
    """Send more slowly, or retry later."""
    SHUTTING_DOWN = "shutting_down"
    """Retry when zeusd has restarted."""
    JOURNAL_FAILED = "journal_failed"
    """Make space in zeusd's state directory."""
    LEDGER_FAILED = "ledger_failed"
    """Make space in the energy ledger's directory, or see zeusd's log."""
    INTERNAL = "internal"
    """A bug in zeusd. Report it, with zeusd's log.
    """
    UNAVAILABLE = "unavailable"
    """Start zeusd (`systemctl start zeusd`), or name its socket in ZEUSD_SOCK_PATH."""
    # Raised by the client itself, never sent.
    ACCESS_REFUSED = "access_refused"
    """Ask the administrator to add you to the group that owns the socket, and log in again."""
    TIMEOUT = "timeout"
    """Retry with a longer `timeout_s`; if it happens again, see zeusd's log."""
    SEVERAL_GPUS = "several_gpus"
    """See `errors` for each GPU that failed; the request succeeded on the others."""
    DEFERRED = "deferred"
    """See `last` for the newest error, and handle it by its own code."""


class ZeusIpcError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: Stable code, one of `ErrorCode`.
        message: One sentence: what failed, on which GPU, why, and what to do.
        gpu: UUID of the GPU concerned, if any.
        details: Further facts by name: who holds a lease; if a device refused, `outcome` (see
            `zeusd.devices.port.CallOutcome`), `device_code` and `device_call`.
    """

    code: str = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        gpu: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.gpu = gpu
        self.details: dict[str, Any] = details or {}

    @property
    def device_code(self) -> int | None:
        """The vendor's code if a device refused; None: no device did."""
        code = self.details.get("device_code")
        return None if code is None else int(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(cls: type[ZeusIpcError], message: str, state: dict[str, Any]) -> ZeusIpcError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class RequestRejected(ZeusIpcError):
    """The daemon could not read the request, or does not support it."""

    code = ErrorCode.BAD_REQUEST


class VersionMismatch(RequestRejected):
    """Client and daemon share no protocol version."""

    code = ErrorCode.UNSUPPORTED_VERSION


class DeadlineExceeded(ZeusIpcError):
    """The daemon dropped the request because its deadline passed before it could be applied."""

    code = ErrorCode.DEADLINE_EXCEEDED


class PermissionRefused(ZeusIpcError):
    """The site's policy, or the driver, does not let this user make the change."""

    code = ErrorCode.PERMISSION_DENIED


class LeaseHeld(ZeusIpcError):
    """Another process holds the lease on this control. `details` says which, and since when."""

    code = ErrorCode.LEASE_HELD


class LeaseExpired(ZeusIpcError):
    """This process held the lease and lost it; nothing is applied again until it acquires the
    lease.
    """

    code = ErrorCode.LEASE_EXPIRED


class RestorePending(ZeusIpcError):
    """An earlier holder's change could not be restored yet; zeusd keeps retrying."""

    code = ErrorCode.RESTORE_PENDING


class UnknownGpu(ZeusIpcError):
    """The node has no GPU with this UUID."""

    code = ErrorCode.UNKNOWN_GPU


class OutOfRange(ZeusIpcError):
    """The value lies outside what the GPU, or the site, allows."""

    code = ErrorCode.OUT_OF_RANGE


class NotSupported(ZeusIpcError):
    """The GPU or its driver does not offer this control or reading."""

    code = ErrorCode.NOT_SUPPORTED


class DeviceFailure(ZeusIpcError):
    """A device or its driver failed in a way that no other class describes; see `device_code`."""

    code = ErrorCode.DEVICE_ERROR


class DeviceBusy(DeviceFailure):
    """The device or its driver was busy."""

    code = ErrorCode.DEVICE_BUSY


class ValueUnchanged(DeviceFailure):
    """The driver accepted a value, and the GPU still holds the old one."""

    code = ErrorCode.UNCHANGED


class GpuLost(DeviceFailure):
    """The GPU fell off the bus or needs a reset."""

    code = ErrorCode.GPU_LOST


class NodeQuiesced(ZeusIpcError):
    """An administrator made zeusd close the driver, for a reset; it lasts until `resume`."""

    code = ErrorCode.QUIESCED


class DaemonOverloaded(ZeusIpcError):
    """A queue in the daemon is full, and the request was not applied."""

    code = ErrorCode.OVERLOADED


class DaemonShuttingDown(ZeusIpcError):
    """The daemon is stopping and accepts no more changes."""

    code = ErrorCode.SHUTTING_DOWN


class JournalFailed(ZeusIpcError):
    """The intent could not be written to disk, so the change was not made."""

    code = ErrorCode.JOURNAL_FAILED


class LedgerFailed(ZeusIpcError):
    """The energy ledger could not be read or written; limits and leases work without it."""

    code = ErrorCode.LEDGER_FAILED


class DaemonUnavailable(ZeusIpcError):
    """No daemon answers at the socket."""

    code = ErrorCode.UNAVAILABLE


class AccessRefused(DaemonUnavailable):
    """The socket exists, but this user may not connect to it."""

    code = ErrorCode.ACCESS_REFUSED


class RequestTimeout(DaemonUnavailable):
    """The daemon accepted the connection but did not answer in time."""

    code = ErrorCode.TIMEOUT


class SeveralGpusFailed(ZeusIpcError):
    """A request for several GPUs failed on some.

    Attributes:
        errors: The error of each GPU that failed, by UUID. The request succeeded on all other GPUs.
    """

    code = ErrorCode.SEVERAL_GPUS

    def __init__(self, errors: dict[str, ZeusIpcError]) -> None:
        first = next(iter(errors.values()))
        several = f"{len(errors)} GPUs failed; the first: " if len(errors) > 1 else ""
        super().__init__(f"{several}{first.message}")
        self.errors = errors


class DeferredSetFailed(ZeusIpcError):
    """Sets sent with `block=False` failed earlier.

    Attributes:
        count: Number of failures since the last report.
        last: The error of the newest one.
    """

    code = ErrorCode.DEFERRED

    def __init__(self, count: int, last: ZeusIpcError) -> None:
        super().__init__(
            f"{count} set{'s' * (count > 1)} sent without waiting failed; the latest: "
            f"{last.message}"
        )
        self.count = count
        self.last = last


_BY_CODE: dict[str, type[ZeusIpcError]] = {
    one.code: one
    for one in [*globals().values()]
    if isinstance(one, type)
    and issubclass(one, ZeusIpcError)
    and one.__init__ is ZeusIpcError.__init__  # the others hold errors of their own
}


def from_wire(body: dict[str, Any]) -> ZeusIpcError:
    """The exception for a reply's `error` map. An unknown code keeps its name in `code`."""
    code = str(body.get("code", ErrorCode.INTERNAL))
    cls = _BY_CODE.get(code, ZeusIpcError)
    return cls(
        str(body.get("message", code)),
        code=code,
        gpu=body.get("gpu"),
        details=body.get("details"),
    )
