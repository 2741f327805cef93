from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zeusd.ring import journal as module
from zeusd.ring.journal import Journal, JournalError, orphans

BOOT = "boot-1"


def opened(directory: Path, name: str = "journal", boot: str = BOOT) -> Journal:
    journal = Journal(directory, name, boot)
    journal.open()
    return journal


def reread(directory: Path, boot: str = BOOT) -> dict[str, dict[str, object]]:
    journal = Journal(directory, "journal", boot)
    entries = journal.open()
    journal.close()
    return entries


def test_what_was_put_is_there_after_a_restart_and_what_was_forgotten_is_not(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path / "state")
    journal.put("a", {"x": 1})
    journal.put("b", {"x": 2})
    journal.put("a", {"x": 3})
    journal.forget("b")
    journal.close()
    assert reread(tmp_path / "state") == {"a": {"x": 3}}


def test_the_directory_and_the_file_are_private(tmp_path: Path) -> None:
    journal = opened(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert journal.path.stat().st_mode & 0o777 == 0o600
    journal.close()


def test_a_put_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(journal.path.read_bytes()))
    journal.put("a", {"x": 1})
    assert len(synced) == 1
    assert b'["a",{"x":1}]\n' in synced[0]
    journal.close()


def test_a_torn_last_record_is_dropped_and_the_rest_counts(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.put("a", {"x": 1})
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'["b",{"x":')
    assert reread(tmp_path) == {"a": {"x": 1}}
    assert reread(tmp_path) == {"a": {"x": 1}}


def test_an_unreadable_journal_is_put_aside_and_zeusd_starts(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.put("a", {"x": 1})
    journal.close()
    journal.path.write_bytes(b"\x00garbage\nmore\n")
    assert reread(tmp_path) == {}
    (aside,) = tmp_path.glob("journal.bad-*")
    assert aside.read_bytes() == b"\x00garbage\nmore\n"


def test_entries_of_another_boot_are_dropped(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.put("a", {"x": 1})
    journal.close()
    assert reread(tmp_path, boot="boot-2") == {}


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(JournalError, match="another zeusd uses"):
        opened(tmp_path)
    journal.close()
    opened(tmp_path).close()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal").symlink_to(target)
    with pytest.raises(JournalError):
        opened(tmp_path / "state")
    assert target.read_text() == "precious"


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever can write the journal can have zeusd write to GPUs."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(JournalError, match="mode 0700"):
        opened(tmp_path / "state")
    if os.getuid() == 0:
        (tmp_path / "state").chmod(0o700)
        os.chown(tmp_path / "state", 65534, 65534)
        with pytest.raises(JournalError, match="belongs to user 65534"):
            opened(tmp_path / "state")


def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_AFTER_LINES", 50)
    journal = opened(tmp_path)
    for number in range(500):
        journal.put("a", {"x": number})
    assert len(journal.path.read_bytes().splitlines()) <= 51
    journal.close()
    assert reread(tmp_path) == {"a": {"x": 499}}


def test_a_failed_append_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    journal.put("a", {"x": 1})
    real_write = os.write

    def half(fd: int, data: bytes) -> int:
        return real_write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="full"):
        journal.put("b", {"x": 2})
    monkeypatch.undo()
    journal.put("c", {"x": 3})
    journal.close()
    assert reread(tmp_path) == {"a": {"x": 1}, "c": {"x": 3}}


def test_orphans_are_the_journals_whose_owner_is_gone(tmp_path: Path) -> None:
    living = opened(tmp_path, "embedded-1")
    living.put("debt/x", {"x": 1})
    dead = opened(tmp_path, "embedded-2")
    dead.put("debt/y", {"y": 1})
    dead.close()
    found = []
    for orphan, entries in orphans(tmp_path, BOOT):
        found.append(entries)
        orphan.delete()
    assert found == [{"debt/y": {"y": 1}}]
    assert not (tmp_path / "embedded-2").exists()
    living.close()


def test_every_line_is_json(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.put("a", {"text": "newline\nand \u2713"})
    journal.close()
    lines = journal.path.read_text().splitlines()
    assert json.loads(lines[0]) == {"format": 1, "boot": BOOT}
    assert json.loads(lines[1]) == ["a", {"text": "newline\nand \u2713"}]
