"""A serving engine that only sleeps, with clock control: for tests, in its own process.

Each second it prints how many steps it has run and the longest call of the control. Commands on
stdin: `stop` serves no more steps while requests wait, `go` goes on, `quit` closes the control.
"""

from __future__ import annotations

import sys
import threading
import time

from zeus.serving import ClockControl, Queue, Step
from zeus_ipc import Client


def main() -> None:
    """Arguments: zeusd's socket, and `dry` for a dry run."""
    path, dry = sys.argv[1], "dry" in sys.argv[2:]
    with Client(path) as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
    control = ClockControl(gpus, 0.5, 0.025, dry_run=dry, path=path)
    commands: list[str] = []

    def listen() -> None:
        commands.extend(map(str.strip, sys.stdin))  # one by one, as they come
        commands.append("quit")

    threading.Thread(target=listen, daemon=True).start()
    steps, serving, told, longest = 0, True, 0.0, 0.0
    queue = Queue(0, 0, 0.0)
    while True:
        while commands:
            command = commands.pop(0)
            if command == "quit":
                control.close()
                print("closed", flush=True)
                return
            serving = command != "stop"
            if not serving:
                queue = Queue(1, 100, 0.1)  # its last message
        begin = time.monotonic()
        time.sleep(0.005)
        end = time.monotonic()
        if serving or queue.waiting:
            control.step(Step(begin, end, 0, 8, 4000, 0.0), queue)
            longest = max(longest, time.monotonic() - end)
            steps += 1
            queue = Queue(0, 0, 0.0)
        if end > told + 0.2:
            told = end
            status = control.status()
            print(steps, status.wanted_mhz, status.changes, int(status.working), flush=True)


if __name__ == "__main__":
    main()
