"""The messages at the socket of a server that starts programs.

A request is its length, with the open files that the program gets, and then JSON. The answers are
integers: the process ID of the program, and, when it has ended, its status as of `os.waitpid`.
Integers that the server is sent meanwhile are signals for the program. Who hangs up kills it.

A request of length 0 starts nothing: the server answers 0, and runs while such a connection is
open.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

INTEGER = struct.Struct("i")
MOST_FILES = 253
"""As many as Linux passes at once."""


def hold(path: str) -> socket.socket:
    """Keeps the server at a socket running while the connection is open.

    Raises:
        OSError: There is none, or it is about to end.
    """
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
        server.sendall(INTEGER.pack(0))
        if not server.recv(INTEGER.size):
            raise ConnectionResetError
    except OSError:
        server.close()
        raise
    return server


def ask(
    path: str,
    python: str,
    arguments: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    files: Mapping[int, int],
) -> socket.socket:
    """Makes the server at a socket start a program.

    Args:
        path: The socket's.
        python: The program's `sys.executable`.
        arguments: `SCRIPT.py`, `-m MODULE` or `-c CODE`, and what it is given.
        cwd: Where it runs.
        env: Its whole environment.
        files: The descriptors that it gets, and what each is here.
    """
    request = {"python": python, "arguments": [*arguments], "cwd": cwd, "env": {**env}}
    data = json.dumps({**request, "files": [*files]}).encode()
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    socket.send_fds(server, [INTEGER.pack(len(data))], [*files.values()])
    server.sendall(data)
    return server


def request(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The client's request, and the open files of the program; None if it only keeps the server, or
    was killed before it had sent all."""
    size, files, _, _ = socket.recv_fds(client, INTEGER.size, MOST_FILES)
    length = INTEGER.unpack(size)[0] if size else 0
    data = b""
    while len(data) < length and (part := client.recv(1 << 16)):
        data += part
    if data and len(data) == length:
        return json.loads(data), files
    for file in files:
        os.close(file)
    return None


def integer(server: socket.socket) -> int:
    """The next answer."""
    data = server.recv(INTEGER.size)
    assert data, "what starts programs has ended"
    return int(INTEGER.unpack(data)[0])


def move(files: Mapping[int, int]) -> None:
    """Gives open files the descriptors that the program expects."""
    free = max(*files, *files.values()) + 1
    high = {number: free + place for place, number in enumerate(files)}
    for number, file in files.items():
        os.dup2(file, high[number], inheritable=False)
        os.close(file)
    for number, file in high.items():
        os.dup2(file, number)
        os.close(file)
