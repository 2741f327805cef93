"""The journal's records: what remains of a damaged file."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from tests import seeds
from zeus_ipc.controls import Control
from zeusd import records
from zeusd.core.entries import Loss, PendingRestore
from zeusd.core.model import ProcessIdentity
from zeusd.records import Entry, header, record, replay

BOOT = "4a1d1c2e-9f57-4b8e-8a52-0d9f7c3b6a11"
GPUS = ("GPU-0e8a1b2c-3d4e-5f60-7182-93a4b5c6d7e8", "GPU-1f9b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")


def pending(gpu: str, control: Control, *values: tuple[int, ...], **more: Any) -> Entry:
    return PendingRestore(
        gpu=gpu,
        control=control,
        holder=ProcessIdentity(4711, 987_654),
        uid=1000,
        client='a client\nthat calls itself 2 00000000 ["pending/x",{}]',
        since_ns=123_456_789_012,
        ttl_ns=15_000_000_000,
        target=(250_000,) if control is Control.POWER_LIMIT else (),
        values=values,
        **more,
    ).to_json()


def changes() -> list[tuple[str, Entry | None]]:
    """A life of a node, about 3 KB of records."""
    first, second = GPUS
    limit, clocks = Control.POWER_LIMIT, Control.GPU_CLOCKS
    lost = Loss(second, limit, ProcessIdentity(4712, 5), "its heartbeat stopped for 15 s")
    return [
        ("driver", {"id": "550.54/77", "library": None, "module": "/sys/module/nvidia"}),
        (f"observed/{first}/power_limit", {"value": [250_000]}),
        (f"initial/{first}/power_limit", {"value": [250_000]}),
        (f"pending/{first}/power_limit", pending(first, limit, (250_000,), (150_000,))),
        (f"pending/{first}/power_limit", pending(first, limit, (150_000,), (175_000,))),
        (f"pending/{second}/gpu_clocks", pending(second, clocks, (), (600, 900))),
        (f"pending/{second}/gpu_clocks", None),
        (f"ceiling/{second}/power_limit/persisted", {"value": [200_000]}),
        (lost.key, lost.to_json()),
        (
            f"pending/{second}/power_limit",
            pending(second, limit, (250_000,), (100_000,), ending="x"),
        ),
        (f"pending/{second}/memory_clocks", pending(second, Control.MEMORY_CLOCKS, acquired=True)),
        (f"pending/{first}/gpu_clocks", pending(first, clocks, (), (1_200, 1_200), job="1234")),
        ("stopping", {}),
    ]


def replayed(all_changes: list[tuple[str, Entry | None]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, entry in all_changes:
        if entry is None:
            entries.pop(key, None)
        else:
            entries[key] = entry
    return entries


def journal() -> tuple[bytes, list[range]]:
    """A file, and where in it each record is, the first line among them."""
    data, where = b"", []
    for part in [header(BOOT), *(record(BOOT, key, entry) for key, entry in changes())]:
        where.append(range(len(data), len(data) + len(part)))
        data += part
    return data, where


def garbled(byte: int) -> set[int]:
    """Values that a byte may become: with one bit flipped, and what JSON is made of."""
    return ({byte ^ 1 << bit for bit in range(8)} | {*b'\n\0\xff "[]{},:2'}) - {byte}


def test_any_damaged_byte_loses_at_most_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    # A line does not depend on others, so whole lines are decoded once.
    monkeypatch.setattr(records, "_content", functools.lru_cache(100)(records._content))
    data, where = journal()
    assert 2500 < len(data) < 4000
    whole = replayed(changes())
    said = replay(data, BOOT)
    assert (said.entries, said.trouble, said.torn) == (whole, None, False)
    for number, part in enumerate(where):
        left = changes()
        if number > 0:
            del left[number - 1]
        without = replayed(left)
        for offset in part:
            for value in garbled(data[offset]):
                bad = bytearray(data)
                bad[offset] = value
                said = replay(bytes(bad), BOOT)
                assert said.entries in (whole, without), (offset, value)
                assert said.entries == whole or said.trouble or said.torn, (offset, value)
                assert not said.old_boot


def test_any_cut_leaves_the_records_before_it() -> None:
    data, where = journal()
    for size in range(len(data)):
        there = sum(part.stop - 1 <= size for part in where[1:])  # the newline at the end may lack
        said = replay(data[:size], BOOT)
        assert said.entries == replayed(changes()[:there])
        assert said.trouble is None or there == 0
        rest = replay(data[:size] + record(BOOT, "later", {}), BOOT)
        assert rest.entries == said.entries | {"later": {}}, "what is appended then counts"


@pytest.mark.parametrize("size", [2, 5, 40, 400])
def test_a_damaged_stretch_loses_what_it_touches(size: int) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    data, where = journal()
    for _ in range(300):
        offset = rng.randrange(len(data) - size)
        bad = data[:offset] + rng.randbytes(size) + data[offset + size :]
        touched = {
            number
            for number, part in enumerate(where)
            if part.start < offset + size and offset < part.stop
        }
        # A record may be whole although a newline beside it is not.
        first, last = min(touched), max(touched)
        lost = ({}, touched, touched - {first}, touched - {last}, touched - {first, last})
        numbered = list(enumerate(changes(), start=1))
        left = [replayed([one for number, one in numbered if number not in some]) for some in lost]
        assert replay(bad, BOOT).entries in left


def test_without_its_first_line_a_journal_counts_in_its_boot_and_in_no_other() -> None:
    data, where = journal()
    rest = data[where[0].stop :]
    assert replay(rest, BOOT).entries == replayed(changes())
    said = replay(rest, "another boot")
    assert (said.entries, said.old_boot) == ({}, False)
    assert said.trouble is not None
    said = replay(data, "another boot")
    assert (said.entries, said.old_boot, said.trouble) == ({}, True, None)


def plain_journal(number: int) -> bytes:
    """A journal of an unknown format."""
    lines: list[object] = [{"format": number, "boot": BOOT}]
    lines += [[key] if entry is None else [key, entry] for key, entry in changes()]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def test_lines_without_a_checksum_count_in_no_other_format() -> None:
    data, _ = journal()
    said = replay(data + b'["pending/x",{"x":1}]\n', BOOT)
    assert said.entries == replayed(changes())
    assert said.unread == [data.count(b"\n") + 1]
    assert "1 damaged or unknown line (" in str(said.trouble)


@pytest.mark.parametrize(
    "data",
    [
        plain_journal(1),
        plain_journal(3),
        b'3 00000000 {"format":3}\n3 00000000 ["pending/x",{}]\n',
        b"\0\n\xff\nx\n",
    ],
)
def test_an_unknown_record_is_reported_and_does_not_count(data: bytes) -> None:
    said = replay(data, BOOT)
    assert said.entries == {}
    assert said.trouble is not None


def test_a_record_of_a_later_format_among_others_is_reported() -> None:
    data, _ = journal()
    said = replay(data + b'3 00000000 ["pending/x",{}]\n', BOOT)
    assert said.entries == replayed(changes())
    assert said.trouble is not None


def test_an_empty_input_gives_an_empty_result() -> None:
    said = replay(b"", BOOT)
    assert (said.entries, said.trouble, said.torn) == ({}, None, False)
