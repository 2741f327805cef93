"""The client: what a program says to a node, as Python calls.

Methods take one GPU's UUID or several, and return results by UUID. Where one GPU was asked for, its
error is raised as it is; where several were, `SeveralGpusFailed` holds the error of each.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from zeus_ipc import errors
from zeus_ipc._version import __version__
from zeus_ipc.messages import (
    PROTOCOL_VERSION,
    Control,
    EnergyReading,
    GpuState,
    LeaseInfo,
    LeaseList,
    NodeInfo,
    PowerReading,
    SupportedClocks,
    _Message,
)
from zeus_ipc.paths import socket_path
from zeus_ipc.transport import Transport, ZmqTransport

DEFAULT_TIMEOUT_S = 5.0

M = TypeVar("M", bound=_Message)


class Client:
    """A connection to a node's zeusd.

    Safe to share between threads, and safe to use after `fork` (the child gets a connection, and
    leases, of its own). Leases taken through it end with `close`, with the `with` block, and
    with the process, however that ends.

    Args:
        path: The daemon's socket; None: `$ZEUSD_SOCK_PATH`, else `/run/zeusd/zeusd.sock`.
        timeout_s: Seconds after which any call gives up.
        transport: Another way to a node than a socket, such as an engine in this process.

    Every method raises a `ZeusIpcError`: `DaemonUnavailable` (nobody listens), `AccessRefused`
    (the socket may not be used), `RequestTimeout`, `VersionMismatch`, and what the daemon answers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        self._timeout_s = timeout_s
        self._transport = ZmqTransport(socket_path(path)) if transport is None else transport
        self._name = secrets.token_hex(6)
        self._pid = os.getpid()
        self._closed = False

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- the node

    def node(self) -> NodeInfo:
        """What the daemon is, and which GPUs the node has at this moment."""
        result = self._ask("hello", client_version=__version__)
        return NodeInfo.model_validate(result, strict=False)

    def state(self, gpus: str | Sequence[str]) -> dict[str, GpuState]:
        """Present limits, clocks, power, energy and temperature of GPUs, by UUID."""
        return self._read("state", gpus, GpuState)

    def energy(self, gpus: str | Sequence[str]) -> dict[str, EnergyReading]:
        """Energy counters, mJ, with the time of reading, by UUID.

        Raises:
            NotSupported: A GPU has no counter.
        """
        return self._read("energy", gpus, EnergyReading)

    def power(self, gpus: str | Sequence[str]) -> dict[str, PowerReading]:
        """Power sensors, mW, by UUID."""
        return self._read("power", gpus, PowerReading)

    def clocks(self, gpu: str) -> SupportedClocks:
        """Clocks, MHz, that a GPU can be locked to."""
        return self._read("clocks", gpu, SupportedClocks)[gpu]

    # ---------------------------------------------------------------------------------- controls

    def set_power_limit(
        self, gpus: str | Sequence[str], power_limit_mw: int, *, block: bool = True
    ) -> None:
        """Sets the power limit, mW, taking its lease if nobody holds it.

        Args:
            gpus: UUIDs.
            power_limit_mw: Within the GPU's range and at most the site's maximum.
            block: Wait until it is set. Without, the call returns at once, and a failure is raised
                as `DeferredSetFailed` by a later call that waits.

        Raises:
            LeaseHeld, OutOfRange, PermissionRefused, NotSupported, NvmlFailure: See each.
        """
        self._set("set_power_limit", gpus, block, power_limit_mw=power_limit_mw)

    def set_gpu_clocks(
        self, gpus: str | Sequence[str], min_mhz: int, max_mhz: int, *, block: bool = True
    ) -> None:
        """Locks the graphics clock to a range, MHz. Errors as for `set_power_limit`."""
        self._set("set_gpu_clocks", gpus, block, min_mhz=min_mhz, max_mhz=max_mhz)

    def set_memory_clocks(
        self, gpus: str | Sequence[str], min_mhz: int, max_mhz: int, *, block: bool = True
    ) -> None:
        """Locks the memory clock to a range, MHz. Errors as for `set_power_limit`."""
        self._set("set_memory_clocks", gpus, block, min_mhz=min_mhz, max_mhz=max_mhz)

    def set_persistence_mode(
        self, gpus: str | Sequence[str], enabled: bool, *, block: bool = True
    ) -> None:
        """Turns persistence mode on or off. Errors as for `set_power_limit`."""
        self._set("set_persistence_mode", gpus, block, enabled=enabled)

    def reset(
        self, gpus: str | Sequence[str], control: Control | str, *, block: bool = True
    ) -> None:
        """Puts a control back to its restore target and keeps the lease; see `release`."""
        self._set("reset", gpus, block, control=Control(control).value)

    # ------------------------------------------------------------------------------------ leases

    def acquire(self, gpus: str | Sequence[str], controls: Sequence[Control | str]) -> None:
        """Takes the leases on these controls without changing anything.

        Raises:
            LeaseHeld: Another process has one.
        """
        names = [Control(control).value for control in controls]
        self._per_gpu(self._ask("acquire", gpus=_uuids(gpus), controls=names))

    def release(
        self, gpus: str | Sequence[str] = (), controls: Sequence[Control | str] = ()
    ) -> int:
        """Puts controls back and gives their leases back.

        Args:
            gpus: UUIDs; empty: all.
            controls: Empty: all.

        Returns:
            How many leases were given back. None held is no error.
        """
        names = [Control(control).value for control in controls]
        uuids = _uuids(gpus) if gpus else []
        return int(self._ask("release", gpus=uuids, controls=names)["released"])

    def leases(self) -> list[LeaseInfo]:
        """All leases on the node."""
        return LeaseList.model_validate(self._ask("leases"), strict=False).leases

    def heartbeat(self) -> int:
        """Says that this process is alive. Returns how many leases it holds."""
        return int(self._ask("heartbeat")["leases"])

    def close(self) -> None:
        """Gives back what this client took and ends the connection. Never raises."""
        if self._closed:
            return
        self._closed = True
        # A child of fork took nothing through this client unless it used it itself.
        with contextlib.suppress(errors.ZeusIpcError):
            if self._transport.used:
                self._ask("goodbye", _timeout_s=min(self._timeout_s, 2.0))
        self._transport.close()

    # --------------------------------------------------------------------------------- internals

    def _message(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        pid = os.getpid()
        if pid != self._pid:
            self._pid = pid
            self._name = secrets.token_hex(6)
        return {"v": PROTOCOL_VERSION, "op": op, "client": self._name, **arguments}

    def _ask(self, op: str, *, _timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        message = self._message(op, arguments)
        reply = self._transport.request(message, _timeout_s or self._timeout_s)
        error = reply.get("error")
        if error is not None:
            raise errors.from_wire(error)
        deferred = reply.get("deferred")
        if deferred is not None:
            self._note_deferred(deferred)
        result = reply.get("result")
        if not isinstance(result, dict):
            raise errors.RequestRejected(
                f"zeusd answered {op} with something this client cannot read; use client and "
                "daemon of matching releases"
            )
        return result

    @staticmethod
    def _note_deferred(deferred: dict[str, Any]) -> None:
        raise errors.DeferredSetFailed(int(deferred["count"]), errors.from_wire(deferred["last"]))

    def _set(self, op: str, gpus: str | Sequence[str], block: bool, **arguments: Any) -> None:
        uuids = _uuids(gpus)
        if block:
            self._per_gpu(self._ask(op, gpus=uuids, **arguments))
        else:
            arguments["gpus"] = uuids
            arguments["block"] = False
            self._transport.send(self._message(op, arguments), self._timeout_s)

    @staticmethod
    def _per_gpu(result: dict[str, Any]) -> dict[str, Any]:
        gpus: dict[str, Any] = result["gpus"]
        failed = {
            uuid: errors.from_wire(one["error"]) for uuid, one in gpus.items() if "error" in one
        }
        if not failed:
            return gpus
        if len(gpus) == 1:
            raise next(iter(failed.values()))
        raise errors.SeveralGpusFailed(failed)

    def _read(self, op: str, gpus: str | Sequence[str], kind: type[M]) -> dict[str, M]:
        answers = self._per_gpu(self._ask(op, gpus=_uuids(gpus)))
        return {uuid: kind.model_validate(answer) for uuid, answer in answers.items()}


def _uuids(gpus: str | Sequence[str]) -> list[str]:
    return [gpus] if isinstance(gpus, str) else list(gpus)
