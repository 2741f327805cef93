"""The simulated counterpart of /dev/nvidia*: other processes run work on simulated GPUs through it.

One connection is one context. Its messages are msgpack maps (see `zeus_common.simulation`). When it
ends for any reason, its work ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from zeus_common.processes import UnixListener
from zeus_common.simulation import PROFILE_PREFIX
from zeus_ipc.codec import decode_request, encode
from zeus_ipc.sockets import peer_of
from zeusd.devices.simulated.gpu import Quirks
from zeusd.devices.simulated.instructions import Instructions, instructions_of
from zeusd.devices.simulated.node import SimulatedBackend
from zeusd.devices.simulated.work import Work


class DeviceServer:
    """Serves a simulated node's devices on a SOCK_SEQPACKET Unix socket, on its own thread.

    Args:
        node: The devices.
        path: Path of the socket; one that no process serves any more is replaced.
    """

    def __init__(self, node: SimulatedBackend, path: str) -> None:
        self._node = node
        self._path = path
        self._work: dict[socket.socket, Work] = {}
        self._clients: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._indices = {spec.uuid: spec.index for spec in node.specs}
        self._thread = threading.Thread(target=self._run, name="simulated-devices", daemon=True)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)

    def start(self) -> None:
        """Starts to serve.

        Raises:
            ValueError: It cannot be served there.
        """
        try:
            # Everyone who may use a GPU may connect, as with device files.
            self._listener = UnixListener(self._path, socket.SOCK_SEQPACKET, 0o666, 64)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"{self._path} is in use; stop the zeusd that simulates there, or choose "
                    "another socket path"
                ) from None
            raise ValueError(
                f"cannot serve the simulated devices at {self._path} ({error.strerror or error}); "
                "choose a shorter socket path in a directory that exists"
            ) from None
        self._listening = self._listener.socket
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Ends all work and removes the socket."""
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=5.0)
        for client in list(self._clients):
            self._drop(client)
        self._listener.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj == self._wake_read:
                    return
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # Pause after a connection for which this process had no file descriptor: it stays
                # pending.
                time.sleep(0.05)
            return
        if len(self._clients) >= 256:
            client.close()
            return
        client.setblocking(False)
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        try:
            data = client.recv(16384)
            if not data:
                self._drop(client)
                return
            client.send(encode(self._answer(client, data)))
        except OSError:
            self._drop(client)

    def _answer(self, client: socket.socket, data: bytes) -> dict[str, Any]:
        try:
            message = decode_request(data)
            return self._handle(client, message)
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _handle(self, client: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        op = message["op"]
        work = self._work.get(client)
        if op == "open":
            if work is not None:
                raise ValueError("this connection has already opened its work")
            indices = [self._indices[uuid] for uuid in message["gpus"]]
            work = self._work[client] = self._node.open_work(
                indices, self._workload(message, indices), peer_of(client)[0]
            )
        elif op == "fault":
            gpu = message["gpu"]
            self._node.inject(
                None if gpu is None else int(gpu),
                str(message["call"]),
                message.get("code"),
                count=message.get("count"),
                latency_s=float(message.get("latency_s", 0.0)),
            )
            return {}
        elif op == "misbehave":
            wanted = dict(message["quirks"])
            clamp = wanted.pop("clamp_mw", None)
            quirks = Quirks(**wanted, clamp_mw=None if clamp is None else (clamp[0], clamp[1]))
            self._node.misbehave(int(message["gpu"]), quirks)
            return {}
        elif op == "clear_faults":
            self._node.clear_faults()
            return {}
        elif op == "outside":
            if "clocks" in message:
                self._node.reset_clocks_outside(int(message["gpu"]))
            else:
                self._node.set_outside(int(message["gpu"]), int(message["power_limit_mw"]))
            return {}
        elif op == "board":
            limit_mw = message["power_limit_mw"]
            limit_mw = None if limit_mw is None else int(limit_mw)
            self._node.set_board_limit(int(message["gpu"]), limit_mw)
            return {}
        elif op == "limited":
            self._node.limit_clocks(int(message["gpu"]), [str(one) for one in message["reasons"]])
            return {}
        elif op == "truth":
            return {"energy_j": self._node.true_energy_j(int(message["gpu"]))}
        elif work is None:
            raise ValueError("open work first")
        elif op == "launch":
            units = float(message["units"])
            if not 0 < units <= 1e9:
                raise ValueError("units must be positive")
            instruction = message.get("instruction")
            work.launch(units, None if instruction is None else str(instruction))
        elif op != "status":
            raise ValueError(f"unknown operation {op!r}")
        done, ends_ns = work.progress()
        return {"done": done, "ends_ns": ends_ns}

    def _workload(self, message: dict[str, Any], indices: Sequence[int]) -> str | Instructions:
        """The workload to run: a name, or the instructions of a profile that the client has
        read."""
        name, flat = str(message["workload"]), message.get("instructions")
        if flat is None:
            if name.startswith(PROFILE_PREFIX):
                raise ValueError("the client reads a profile and sends its instructions")
            return name
        if not isinstance(flat, dict):
            raise ValueError("instructions must map a name to a list of MHz, seconds and joules")
        rows = {
            str(instruction): list(zip(*[iter(numbers)] * 3, strict=True))
            for instruction, numbers in flat.items()
        }
        if not indices:
            raise ValueError("work needs at least one GPU")
        blocking_w = message.get("blocking_w")
        model = self._node.specs[indices[0]].model
        return instructions_of(rows, model, None if blocking_w is None else float(blocking_w))

    def _drop(self, client: socket.socket) -> None:
        work = self._work.pop(client, None)
        if work is not None:
            work.close()
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        client.close()
