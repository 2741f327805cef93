"""Stands for a program that a server runs: the process that started it sees this one.

python stand_in.py SOCKET PYTHON SCRIPT.py ...
"""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import INTEGER, ask, integer

FORWARDED = (signal.SIGTERM, signal.SIGINT)
MODULES = ("torch.distributed.run", "zeusctl", "zeusctl.exporter")


def stand_in(path: str, python: str, arguments: list[str]) -> None:
    """Runs a program in the server, and ends as that does."""
    plain = arguments[1:] if arguments[:1] == ["-u"] else arguments
    first, second, *_ = [*plain, "", ""]
    if not (first.endswith(".py") or first == "-c" or (first == "-m" and second in MODULES)):
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    files = {number: number for number in inherited()}
    with ask(path, python, plain, os.getcwd(), os.environ, files) as server:
        integer(server)
        os.closerange(3, server.fileno())
        os.closerange(server.fileno() + 1, max(files) + 1)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.send(INTEGER.pack(number)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = integer(server)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def inherited() -> list[int]:
    """The descriptors that this process was started with."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # the listing's own
    return found


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2], sys.argv[3:])
