"""Measures the cost of the journal per change, with and without thousands of entries that remain.

    python benchmarks/journal.py [FOLDER]     # where the journal is written; default: in memory

205 sleeping processes with 21 lost leases each leave 4,305 entries, which remain as long as the
processes do. The rows are measured in turn, in one run, on one file system.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeus_ipc.controls import Control
from zeusd.core.entries import Loss, PendingRestore
from zeusd.core.model import ProcessIdentity
from zeusd.runtime.journal import EntryChange, Journal

SLEEPERS, LOST = 205, 21
CHANGES = 10_000
ROUNDS = 10


def entry(milliwatts: int) -> PendingRestore:
    return PendingRestore(
        *(
            "GPU-0e8a1b2c-3d4e-5f60-7182-93a4b5c6d7e8",
            Control.POWER_LIMIT,
            ProcessIdentity(4711, 987_654),
        ),
        *(1000, "0f1e2d3c4b5a", 123_456_789, 15_000_000_000, (250_000,)),
        ((150_000,), (milliwatts,)),
    )


def journal(folder: str, name: str, entries: int) -> Journal:
    opened = Journal(folder, name, "boot")
    opened.open()
    losses = [
        Loss(
            f"GPU-{number % 8}",
            Control.POWER_LIMIT,
            ProcessIdentity(number, number),
            "it was silent",
        )
        for number in range(entries)
    ]
    opened.commit([EntryChange(loss.key, loss) for loss in losses])
    return opened


def put(kept: Journal, number: int) -> None:
    kept.commit([EntryChange("pending/one", entry(number), intent=True)])


def note(kept: Journal, number: int) -> None:
    kept.commit([EntryChange("pending/one", entry(number))], sync=False)


def each(kept: Journal, action: Callable[[Journal, int], None], count: int) -> list[float]:
    """Microseconds of each change."""
    took = []
    for number in range(count):
        begun = time.perf_counter_ns()
        action(kept, number)
        took.append((time.perf_counter_ns() - begun) / 1000)
    return took


def main() -> None:
    """Measures and prints."""
    folder = (
        sys.argv[1]
        if len(sys.argv) > 1
        else tempfile.mkdtemp(prefix="zeusd-journal-", dir="/dev/shm")
    )
    many = SLEEPERS * LOST
    rows: dict[tuple[str, int], list[float]] = {}
    kept = {entries: journal(folder, f"with-{entries}", entries) for entries in (0, many)}
    for _ in range(ROUNDS):
        for entries, one in kept.items():
            for action in (put, note):
                took = each(one, action, CHANGES // ROUNDS)
                rows.setdefault((action.__name__, entries), []).extend(took)
    print(f"{CHANGES} changes each, in {folder}\n")
    print("| change | live entries | mean us | p50 us | p99.9 us | max us | mean / without |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    names = {"put": "a record, synced", "note": "a record whose sync may wait"}
    for (name, entries), took in rows.items():
        took = sorted(took)
        mean, alone = sum(took) / len(took), rows[(name, 0)]
        print(
            f"| {names[name]} | {entries} | {mean:.1f} | {took[len(took) // 2]:.1f} "
            f"| {took[int(len(took) * 0.999)]:.0f} | {took[-1]:.0f} "
            f"| {mean / (sum(alone) / len(alone)):.2f} |"
        )
    for one in kept.values():
        one.delete()


if __name__ == "__main__":
    main()
