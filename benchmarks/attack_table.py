"""The table of attacks, and attacks on a zeusd that systemd runs on this machine.

    python benchmarks/attack_table.py [--socket PATH] [--seconds N] [--only ATTACK]...

Run it as root, with the Python that zeusd is installed for: it needs nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.adversary import ATTACKS, SUBUIDS
from benchmarks.attack import Honest, Observation, beside, others_may_be_played
from benchmarks.processes import Daemon, InstalledDaemon, owner_of
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH

RATIO = 2.0
"""The goal: beside any attack at most so many times what it is beside a busy loop."""
SHARES = (0.5, 0.99)

NOT_RUN = (
    "no attack is run: the attacker must be another user than the honest ones, which only root "
    "can arrange; run it as root (sudo)"
)
HEADER = (
    "| beside a user without rights who sends | p50 µs | p99 µs | p50 / busy | p99 / busy "
    "| p50 after its death / busy | p99 after its death / busy | max ms "
    "| new connection ms | dead restored ms | errors | leases lost | zeusd CPU % | peak MiB "
    "| lines that name the user |"
)


def row(seen: Observation) -> str:
    """One row of the table."""
    honest = seen.honest
    cells = [
        seen.attack.name,
        *(f"{honest.set_us(share):,.0f}" for share in SHARES),
        *(f"{seen.ratio(share):.2f}" for share in SHARES),
        *(f"{seen.ratio_after(share):.2f}" for share in SHARES),
        f"{max(honest.sets_ns) / 1e6:.1f}",
        f"{honest.connect_ms:.0f}",
        f"{max(honest.restored_s) * 1e3:.0f}",
        str(len(honest.errors) + len(seen.after.errors)),
        str(len(seen.lost)),
        f"{seen.cpu_percent:.0f}",
        f"{seen.peak_mib:.0f}",
        str(len(seen.named)),
    ]
    return f"| {' | '.join(cells)} |"


def print_table(
    names: Sequence[str], seconds: float, started: Callable[[], AbstractContextManager[Daemon]]
) -> int:
    """Runs attacks one after another, and prints a row for each.

    Args:
        names: Names of the attacks.
        seconds: How long honest users are observed beside each.
        started: A daemon for each attack, which may be the same one each time.

    Returns:
        The number of figures that missed the goal.
    """
    print(HEADER)
    print("|---|" + "--:|" * (HEADER.count("|") - 2))
    short: list[str] = []
    for number, name in enumerate(names):
        attack = ATTACKS[name]
        if attack.as_root and owner_of(SUBUIDS.start) is None:
            print(f"| {name}: not run, since /etc/subuid assigns uid {SUBUIDS.start} to no one |")
            continue
        with started() as daemon, contextlib.closing(Honest(daemon)) as honest:
            uid = daemon.attacker_uid(number)
            seen = beside(attack, honest, daemon, uid, seconds, compare=True)
        print(row(seen), flush=True)
        short += [f"{name}: {fault}" for fault in seen.faults()]
        for share in SHARES:
            for when, ratio in (
                ("", seen.ratio(share)),
                (" after the attacker's death", seen.ratio_after(share)),
            ):
                if ratio > RATIO:
                    text = f"p{share * 100:g}{when} is {ratio:.2f} times the busy loop's"
                    short.append(f"{name}: {text}")
    print(f"\nGoal: at most {RATIO:g} times the busy loop's p50 and p99, also after the attacker's")
    print("death, no error, no lease lost, one line a minute with the user of each client that")
    print("violates the protocol.")
    print("\n".join(f"- missed: {line}" for line in short) or "- all meet it")
    return len(short)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which attacks are run, and for how long."""
    parser.add_argument("--seconds", type=float, default=9.0, help="seconds of each attack (9)")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), metavar="ATTACK")


def attack_installed(names: Sequence[str], seconds: float, path: str) -> int:
    """Attacks the zeusd that systemd runs here. Returns how many fell short of the goal."""
    daemon = InstalledDaemon(path)
    return print_table(names, seconds, lambda: contextlib.nullcontext(daemon))


def main() -> int:
    """Prints the table. Returns 1 if an attack fell short of the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--socket", metavar="PATH", default=DEFAULT_SOCKET_PATH)
    add_options(parser)
    options = parser.parse_args()
    if not others_may_be_played():
        parser.error(NOT_RUN)
    short = attack_installed(options.only or list(ATTACKS), options.seconds, options.socket)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
