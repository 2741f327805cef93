"""The figures of docs/explain/reliability.md.

    python benchmarks/reliability.py restore   # SIGKILL of a holder to all 8 GPUs restored
    python benchmarks/reliability.py attack    # an honest client's latency beside hostile ones
    python benchmarks/reliability.py systemd   # kill -9 of zeusd to recovered, in a container

The first two start a zeusd of their own; as root they act as other users. The last needs root and
systemd-nspawn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)

SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"
LIMIT = 250_000
HONEST_UID = 12345

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1], timeout_s=30)
client.set_power_limit([gpu.uuid for gpu in client.node().gpus], 150_000)
print("holding", flush=True)
sys.stdin.read()
"""


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of all lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.contextmanager
def site(
    gpus: int, latency_ms: float, text: str = ""
) -> Iterator[tuple[RunningDaemon, NvmlDouble]]:
    """zeusd on the recording library, where everybody may set."""
    with public_directory() as directory:
        privilege = 0 if os.getuid() == 0 else 1
        double = NvmlDouble(directory, [{}] * gpus, privilege=privilege, latency_ms=latency_ms)
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            *configuration(directory, text + ALL_MAY),
            gpus=gpus,
            env=double.env,
            directory=directory,
        ) as daemon:
            yield daemon, double


def measure_restore(runs: int) -> None:
    """Prints how long after a holder's death the last of 8 GPUs was written."""
    print(f"SIGKILL of the holder to the last of 8 limits restored, {runs} runs, ms")
    print(f"{'one setter takes':>18} {'p50':>8} {'p99':>8} {'max':>8} {'p99 beyond it':>14}")
    for latency_ms, attack in ((0.0, None), (12.0, None), (12.0, "requests without end")):
        with site(8, latency_ms) as (daemon, double), contextlib.ExitStack() as stack:
            took_ms = []
            if attack is not None:
                print(f"the same beside another user who sends {attack}:")
                arguments = (daemon.socket, double.uuid(1))
                source = PREFIX + str(ATTACKS[attack])
                attacker = script(source, *arguments, **as_user(HONEST_UID))
                stack.callback(attacker.wait)
                stack.callback(attacker.kill)
                assert attacker.stdout is not None
                attacker.stdout.readline()
            for _ in range(runs):
                holder = script(HOLDER, daemon.socket, **as_nobody())
                assert holder.stdout is not None
                holder.stdout.readline()
                killed_ns = time.monotonic_ns()
                holder.kill()
                wait_for(
                    lambda: all(double.limit_mw(gpu) == LIMIT for gpu in range(8)), "the limits"
                )
                holder.wait()
                last_ns = max(call.t_ns for call in double.calls(SET_LIMIT)[-8:])
                took_ms.append((last_ns - killed_ns) / 1e6)
        p50, p99 = quantile(took_ms, 0.5), quantile(took_ms, 0.99)
        print(
            f"{latency_ms:>15g} ms {p50:>8.1f} {p99:>8.1f} {max(took_ms):>8.1f} "
            f"{p99 - latency_ms:>14.1f}",
            flush=True,
        )


HONEST = """
import sys, time
from zeus_ipc import Client
client = Client(sys.argv[1], timeout_s=30)
gpu = client.node().gpus[0].uuid
client.set_power_limit(gpu, 200_000)
print("ready", flush=True)
sys.stdin.readline()
took, end = [], time.monotonic() + float(sys.argv[2])
watts = 0
while time.monotonic() < end:
    watts = (watts + 1) % 50
    began = time.monotonic_ns()
    client.set_power_limit(gpu, 150_000 + 1000 * watts)
    took.append((time.monotonic_ns() - began) / 1e6)
    time.sleep(0.002)
took.sort()
print(len(took), took[len(took) // 2], took[int(len(took) * 0.99)], took[-1], flush=True)
"""

PREFIX = """
import os, socket, struct, sys, time, contextlib, msgpack, zmq
path, gpu = sys.argv[1:]
context = zmq.Context()
def dealer():
    one = context.socket(zmq.DEALER)
    one.setsockopt(zmq.LINGER, 0)
    one.setsockopt(zmq.SNDTIMEO, 100)
    one.connect("ipc://" + path)
    return one
def message(number, **more):
    return msgpack.packb({"v": 1, "id": number, **more})
print("ready", flush=True)
"""

ATTACKS = {
    "nobody": None,
    "a busy loop": "while True: pass\n",
    "requests without end": """
one = dealer()
for number in range(10**9):
    with contextlib.suppress(zmq.ZMQError):
        one.send(message(number, op="heartbeat"))
""",
    "never reads": """
many = [dealer() for _ in range(20)]
for number in range(10**9):
    with contextlib.suppress(zmq.ZMQError):
        many[number % 20].send(message(number, op="clocks", gpus=[gpu]), zmq.NOBLOCK)
""",
    "reads without end": """
one = dealer()
for number in range(10**9):
    with contextlib.suppress(zmq.ZMQError):
        one.send(message(number, op="state", gpus=[gpu]))
    with contextlib.suppress(zmq.ZMQError):
        while True:
            one.recv(zmq.NOBLOCK)
""",
    "1 kHz sets on another GPU": """
one = dealer()
for number in range(10**9):
    with contextlib.suppress(zmq.ZMQError):
        one.send(message(number, op="set_power_limit", gpus=[gpu],
                         power_limit_mw=150_000 + number % 5000, block=False))
    time.sleep(0.001)
""",
    "frames of 10 MiB": """
frame = bytes(10 * 2**20)
one = dealer()
while True:
    with contextlib.suppress(zmq.ZMQError):
        one.send(frame)
""",
    "malformed messages": """
one = dealer()
while True:
    with contextlib.suppress(zmq.ZMQError):
        one.send(os.urandom(200))
""",
    "10,000 idle connections": """
held = []
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
while True:
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    with contextlib.suppress(OSError):
        one.connect(path)
    held.append(one)
    if len(held) > 10_000:
        held.pop(0).close()
        time.sleep(0.001)
""",
    "slow handshakes": """
held = []
while True:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(0.1)
    with contextlib.suppress(OSError):
        one.connect(path)
        one.send(b"\\xff" + bytes(8) + b"\\x7f")
        held.append(one)
    if len(held) > 500:
        held.pop(0).close()
    time.sleep(0.001)
""",
}


def as_user(uid: int) -> dict[str, object]:
    """Options of Popen that make the child this user, where this process may do that."""
    return {} if os.getuid() else {"user": uid, "group": uid, "extra_groups": []}


def measure_attack(seconds: float) -> None:
    """Prints an honest client's latency beside each hostile one, and against a mere busy loop."""
    if os.getuid() != 0:
        print("as an ordinary user, attacker and victim are the same user: the limits hit both")
    print(f"blocking sets of an honest user, {seconds:g} s each, ms")
    header = f"{'beside another user who':<28} {'sets':>6} {'p50':>7} {'p99':>7} {'max':>7}"
    print(f"{header} {'p99 / alone':>12} {'p99 / busy loop':>16}")
    alone = busy = 0.0
    for name, source in ATTACKS.items():
        with site(2, 0.0) as (daemon, double):
            honest = script(HONEST, daemon.socket, str(seconds), **as_user(HONEST_UID))
            assert honest.stdout is not None
            assert honest.stdin is not None
            honest.stdout.readline()
            attacker: subprocess.Popen[str] | None = None
            if source is not None:
                arguments = (daemon.socket, double.uuid(1))
                attacker = script(PREFIX + source, *arguments, **as_nobody())
                assert attacker.stdout is not None
                attacker.stdout.readline()
                time.sleep(1.0)
            honest.stdin.write("\n")
            honest.stdin.flush()
            count, p50, p99, worst = (float(part) for part in honest.stdout.readline().split())
            if attacker is not None:
                attacker.kill()
                attacker.wait()
            honest.kill()
            honest.wait()
        alone = alone or p99
        busy = p99 if name == "a busy loop" else busy
        against_busy = f"{p99 / busy:>16.2f}" if busy else f"{'':>16}"
        print(
            f"{name:<28} {count:>6.0f} {p50:>7.2f} {p99:>7.2f} {worst:>7.1f} "
            f"{p99 / alone:>12.2f} {against_busy}",
            flush=True,
        )


def measure_systemd(runs: int) -> None:
    """Prints how long after `kill -9` of zeusd its clients' sets are done again."""
    from tests.system import test_systemd
    from tests.system.machine import why_not

    if why_not() is not None:
        sys.exit(f"cannot boot a systemd here: {why_not()}")
    with contextlib.contextmanager(test_systemd.boot_node)() as node:
        user = node.user()
        assert user.set(0, 200) == "ok"
        took_ms, restored_ms = [], []
        for number in range(runs):
            dying = node.user()
            assert dying.set(1, 150) == "ok"
            began = time.monotonic()
            node.machine.systemctl("kill", "--signal=KILL", "--kill-whom=main", "zeusd")
            dying.kill()
            assert user.set(0, 180 + number % 10) == "ok"
            took_ms.append((time.monotonic() - began) * 1e3)
            wait_for(lambda: node.limits()[1] == LIMIT, "what the dead held")
            restored_ms.append((time.monotonic() - began) * 1e3)
            time.sleep(7.0)  # stays below the unit's limit of starts
        user.kill()
    print(f"kill -9 of zeusd under systemd, {runs} runs, ms")
    print(f"{'':<34} {'p50':>8} {'max':>8}")
    for name, values in (
        ("until a living client's set is done", took_ms),
        ("until the dead's limit is back", restored_ms),
    ):
        print(f"{name:<36} {quantile(values, 0.5):>6.0f} {max(values):>8.0f}")


def main() -> None:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["restore", "attack", "systemd"], nargs="+")
    parser.add_argument("--runs", type=int, help="restore: 200; systemd: 20")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    options = parser.parse_args()
    if "restore" in options.what:
        measure_restore(options.runs or 200)
    if "attack" in options.what:
        measure_attack(options.seconds)
    if "systemd" in options.what:
        measure_systemd(options.runs or 20)


if __name__ == "__main__":
    main()
