from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zeusd.core.audit_log import AuditLog
from zeusd.core.effects import Note
from zeusd.core.entries import Recorded, Strange
from zeusd.records import Entry, replay
from zeusd.runtime import journal as module
from zeusd.runtime.journal import EntryChange, Journal, JournalError, orphans
from zeusd.runtime.state_files import AuditFile

BOOT = "boot-1"


def opened(directory: Path, name: str = "journal", boot: str = BOOT) -> Journal:
    journal = Journal(directory, name, boot)
    journal.open()
    return journal


def put(journal: Journal, key: str, entry: Entry) -> None:
    journal.commit([EntryChange(key, Strange(entry), intent=True)])


def kept(directory: Path) -> Path:
    """A journal with an entry, which nobody has open."""
    journal = opened(directory)
    put(journal, "a", {"x": 1})
    journal.close()
    return journal.path


def plain(entries: dict[str, Recorded]) -> dict[str, Entry]:
    return {key: entry.to_json() for key, entry in entries.items()}


def reread(directory: Path, boot: str = BOOT) -> dict[str, Entry]:
    journal = Journal(directory, "journal", boot)
    entries = plain(journal.open())
    journal.close()
    return entries


def test_stored_entries_survive_a_restart_and_forgotten_ones_do_not(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path / "state")
    put(journal, "a", {"x": 1})
    put(journal, "b", {"x": 2})
    put(journal, "a", {"x": 3})
    journal.commit([EntryChange("b", None)])
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
    put(journal, "a", {"x": 1})
    assert len(synced) == 1
    assert b'["a",{"x":1}]\n' in synced[0]
    journal.close()


def test_a_compaction_is_whole_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is complete and synced before its rename, and the rename is synced after."""
    journal = opened(tmp_path)
    put(journal, "a", {"x": 1})
    steps: list[str] = []
    aside = tmp_path / "journal.new"
    real_fsync, real_rename = os.fsync, os.rename

    def whole(path: Path) -> bool:
        said = replay(path.read_bytes(), BOOT)
        return said.entries == {"a": {"x": 1}, "b": {"x": 2}} and said.trouble is None

    def fsync(fd: int) -> None:
        assert whole(journal.path), "the journal in force is whole"
        steps.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        if steps[-1] == "file":
            assert whole(aside), "what is synced is complete"
        real_fsync(fd)

    def rename(source: object, target: object) -> None:
        assert whole(journal.path)
        steps.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(journal, "_rewrite_after", 0)
    put(journal, "b", {"x": 2})
    assert steps == ["file", "rename", "directory"]
    journal.close()


def test_a_torn_last_record_is_dropped_and_the_rest_counts(tmp_path: Path) -> None:
    path = kept(tmp_path)
    with path.open("ab") as file:
        file.write(b'["b",{"x":')
    assert reread(tmp_path) == {"a": {"x": 1}}
    assert reread(tmp_path) == {"a": {"x": 1}}


@pytest.mark.parametrize(
    "data",
    [b"\x00garbage\nmore\n", b'{"format":7,"boot":"boot-1"}\n["a",{"x":1}]\n'],
    ids=["garbage", "of a later zeusd"],
)
def test_an_unreadable_journal_is_moved_aside_and_zeusd_starts(tmp_path: Path, data: bytes) -> None:
    kept(tmp_path).write_bytes(data)
    assert reread(tmp_path) == {}
    (aside,) = tmp_path.glob("journal.bad-*")
    assert aside.read_bytes() == data


def test_entries_of_another_boot_are_dropped(tmp_path: Path) -> None:
    kept(tmp_path)
    assert reread(tmp_path, boot="boot-2") == {}


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(JournalError, match="another zeusd uses"):
        opened(tmp_path)
    journal.close()
    opened(tmp_path).close()


FOREIGN = pytest.param("foreign", marks=pytest.mark.needs("root"))
LEFTOVERS = ("link", "directory", FOREIGN, "writable", "fifo")


def leave(kind: str, path: Path, target: Path) -> None:
    """Puts something in a state file's place that must not be used."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text('{"format":1,"boot":"boot-1"}\n["pending/x",{"x":1}]\n')
        path.chmod(0o666 if kind == "writable" else 0o600)
        if kind == "foreign":
            os.chown(path, 65534, 65534)


@pytest.mark.parametrize("name", ["journal", "journal.lock", "journal.new"])
@pytest.mark.parametrize("kind", LEFTOVERS)
def test_an_untrusted_journal_is_moved_aside_unread_and_unfollowed(
    tmp_path: Path, kind: str, name: str
) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    leave(kind, state / name, target)
    journal = Journal(state, "journal", BOOT)
    assert journal.open() == {}
    put(journal, "a", {"x": 1})
    journal.close()
    assert reread(state) == {"a": {"x": 1}}
    assert target.read_text() == "precious"
    (aside,) = state.glob(f"{name}.bad-*")
    assert os.path.lexists(aside)


@pytest.mark.parametrize("kind", ["writable", FOREIGN])
def test_a_state_directory_that_cannot_be_trusted_is_moved_aside(tmp_path: Path, kind: str) -> None:
    """To write the journal is to have zeusd write to GPUs."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal").write_text("x")
    state.chmod(0o777)
    if kind == "foreign":
        state.chmod(0o700)
        os.chown(state, 65534, 65534)
    journal = Journal(state, "journal", BOOT)
    assert journal.open() == {}
    put(journal, "a", {"x": 1})
    journal.close()
    assert state.is_dir()
    assert state.stat().st_uid == os.getuid()
    assert len(list(tmp_path.glob("state.bad-*"))) == 1


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "home"])
def test_what_was_never_a_state_directory_is_not_moved(tmp_path: Path, kind: str) -> None:
    """As root, zeusd could move /dev/null, /bin or a user's home."""
    named, home = tmp_path / "named", tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    home.chmod(0o770)
    if kind == "home":
        named = home
    else:
        leave(kind, named, home)
    with pytest.raises(JournalError, match="alone may write; choose another with --state-dir"):
        opened(named)
    assert os.path.lexists(named)
    assert [path.name for path in home.iterdir()] == ["thesis.tex"]
    assert not list(tmp_path.glob("*.bad-*"))


def test_a_state_directory_that_was_moved_and_linked_is_used(tmp_path: Path) -> None:
    state, moved = tmp_path / "state", tmp_path / "moved"
    kept(state)
    state.rename(moved)
    state.symlink_to(moved)
    assert reread(state) == {"a": {"x": 1}}
    state.unlink()
    state.symlink_to(tmp_path / "nowhere")
    with pytest.raises(JournalError, match="choose another with --state-dir"):
        opened(state)


@pytest.mark.parametrize("kind", ["removed", "replaced", "moved", "directory"])
def test_a_journal_that_is_gone_while_zeusd_runs_is_written_again(
    tmp_path: Path, kind: str
) -> None:
    state = tmp_path / "state"
    for check in (lambda journal: journal.verify(), lambda journal: put(journal, "b", {"x": 2})):
        journal = opened(state)
        put(journal, "a", {"x": 1})
        if kind == "directory":
            shutil.rmtree(state)
        elif kind == "moved":
            journal.path.rename(state / "elsewhere")
        else:
            journal.path.unlink()
            if kind == "replaced":
                journal.path.write_text("something else")
        check(journal)
        found = replay(journal.path.read_bytes(), BOOT)
        assert "a" in found.entries
        journal.close()


def test_a_directory_that_others_recreate_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    monkeypatch.setattr(os, "rename", lambda *_: None)
    with pytest.raises(JournalError, match="choose another"):
        opened(state)


def test_where_nothing_can_be_written_zeusd_starts_and_every_put_fails_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path / "state")
    real_open = os.open

    def read_only(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    journal = Journal(tmp_path / "state", "journal", BOOT)
    assert plain(journal.open()) == {"a": {"x": 1}}
    with pytest.raises(OSError, match="Read-only"):
        put(journal, "b", {"x": 2})
    monkeypatch.undo()
    put(journal, "b", {"x": 2})
    journal.close()
    assert reread(tmp_path / "state") == {"a": {"x": 1}, "b": {"x": 2}}


def test_the_file_does_not_grow_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REWRITE_AFTER", 50)
    journal = opened(tmp_path)
    for number in range(200):
        put(journal, "a", {"x": number})
        journal.commit([EntryChange("a", Strange({"x": -number}))], sync=False)
        assert journal.path.read_bytes().count(b'"a"') <= 51
    journal.close()
    assert reread(tmp_path) == {"a": {"x": -199}}


@pytest.mark.parametrize("entries", [10, 300])
def test_rewriting_costs_no_more_than_appending_however_much_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """As with thousands of lost leases of processes that sleep: they are not written each time."""
    monkeypatch.setattr(module, "REWRITE_AFTER", 50)
    journal = opened(tmp_path)
    journal.commit([EntryChange(f"loss/{number}", Strange({})) for number in range(entries)])
    rewritten: list[int] = []
    rename = os.rename

    def counted(*paths: object) -> None:
        rename(*paths)
        rewritten.append(replayed_records(journal.path))

    monkeypatch.setattr(os, "rename", counted)
    for number in range(600):
        put(journal, "a", {"x": number})
    assert rewritten
    assert sum(rewritten) <= 600 + 50 + entries
    journal.close()


def replayed_records(path: Path) -> int:
    return len(replay(path.read_bytes(), BOOT).entries)


class FullDisk:
    """Fails each `os.write` while it is full, after a few bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        return self._write(fd, data[:9] if self.full else data)


def test_all_changes_of_one_event_are_written_and_synced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    synced: list[dict[str, object]] = []

    def sync(fd: int) -> None:
        synced.append(dict(replay(journal.path.read_bytes(), BOOT).entries))

    monkeypatch.setattr(os, "fdatasync", sync)
    changes = [
        EntryChange("a", Strange({"x": 1})),
        EntryChange("b", Strange({"x": 2}), intent=True),
        EntryChange("a", None),
    ]
    journal.commit(changes)
    assert synced == [{"b": {"x": 2}}]
    journal.commit([])
    journal.commit([EntryChange("never", None)])
    assert len(synced) == 1, "there was nothing to write"
    journal.close()


def test_a_value_with_a_durable_record_is_written_without_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REWRITE_AFTER", 12)
    journal = opened(tmp_path)
    put(journal, "a", {"x": 1})
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for number in range(10):
        journal.commit([EntryChange("a", Strange({"x": number}))], sync=False)
    assert synced == []
    assert journal.durable("a") == Strange({"x": 1})
    assert replay(journal.path.read_bytes(), BOOT).entries == {"a": {"x": 9}}
    put(journal, "b", {})
    assert len(synced) == 1
    assert journal.durable("a") == Strange({"x": 9})
    journal.commit([EntryChange("a", Strange({"x": 10}))], sync=False)
    assert journal.durable("a") == Strange({"x": 10})  # the whole was written again
    journal.close()
    assert reread(tmp_path) == {"a": {"x": 10}, "b": {}}


def test_on_a_full_disk_intents_are_forgotten_and_the_rest_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    put(journal, "kept", {"x": 1})
    put(journal, "gone", {"x": 1})
    disk = FullDisk(monkeypatch)
    disk.full = True
    with pytest.raises(OSError, match="full"):
        journal.commit(
            [
                EntryChange("kept", Strange({"x": 2})),
                EntryChange("intent", Strange({}), True),
                EntryChange("gone", None),
            ]
        )
    for key, number in (("noted", 5), ("gone", 1), ("gone", 7)):
        with pytest.raises(OSError, match="full"):
            journal.commit([EntryChange(key, Strange({"x": number}))], sync=False)
    durable = {key: journal.durable(key) for key in ("kept", "gone", "intent", "noted")}
    # An entry to be deleted covers nothing, although it is still on disk; nor do later ones.
    assert durable == {"kept": Strange({"x": 1}), "gone": None, "intent": None, "noted": None}
    assert journal.states("kept") == [Strange({"x": 1}), Strange({"x": 2})], (
        "which of them, a kill decides"
    )
    assert journal.states("gone") == [None, Strange({"x": 7})]
    with pytest.raises(OSError, match="full"):
        journal.commit()
    disk.full = False
    journal.commit()
    assert journal.states("kept") == [Strange({"x": 2})]
    assert journal.durable("kept") == Strange({"x": 2})
    journal.close()
    assert reread(tmp_path) == {"kept": {"x": 2}, "noted": {"x": 5}, "gone": {"x": 7}}


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_journal_that_cannot_be_rewritten_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may have room for a record and none for a second journal."""
    monkeypatch.setattr(module, "REWRITE_AFTER", 3)
    journal = opened(tmp_path)
    monkeypatch.setattr(os, "rename", failing(errno.ENOSPC))
    for number in range(20):
        put(journal, "a", {"x": number})
    assert not (tmp_path / "journal.new").exists(), "it takes room"
    monkeypatch.undo()
    assert replay(journal.path.read_bytes(), BOOT).entries == {"a": {"x": 19}}
    journal.close()


def test_a_damaged_journal_stays_in_force_until_its_successor_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path)
    with path.open("ab") as file:
        file.write(b"damage\n")
    monkeypatch.setattr(os, "rename", failing(errno.ENOSPC))  # or zeusd is killed before it
    assert reread(tmp_path) == {"a": {"x": 1}}
    monkeypatch.undo()
    assert reread(tmp_path) == {"a": {"x": 1}}


def test_orphans_are_the_journals_whose_owner_is_gone(tmp_path: Path) -> None:
    living = opened(tmp_path, "embedded-1")
    put(living, "pending/x", {"x": 1})
    dead = opened(tmp_path, "embedded-2")
    put(dead, "pending/y", {"y": 1})
    dead.close()
    found = []
    for orphan, entries in orphans(tmp_path, BOOT):
        found.append(plain(entries))
        orphan.delete()
    assert found == [{"pending/y": {"y": 1}}]
    assert not (tmp_path / "embedded-2").exists()
    living.close()


def test_every_line_is_json(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    put(journal, "a", {"text": "newline\nand \u2713"})
    journal.close()
    lines = journal.path.read_text().splitlines()
    assert all(re.match("2 [0-9a-f]{8} ", line) for line in lines if line)
    first, second = (json.loads(line[11:]) for line in lines if line)
    assert first == {"format": 2, "boot": BOOT}
    assert second == ["a", {"text": "newline\nand \u2713"}]


def test_a_journal_that_another_process_took_meanwhile_fails_each_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zeusd that started on a read-only disk has no lock until there is something to write."""
    opened(tmp_path / "state").close()
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    late = Journal(tmp_path / "state", "journal", BOOT, wait_s=60)
    late.open()
    monkeypatch.undo()
    other = opened(tmp_path / "state")
    with pytest.raises(OSError, match="another zeusd uses"):
        put(late, "a", {})
    other.close()
    put(late, "a", {})
    late.close()


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_still_takes_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    """Else the next zeusd finds a lease that was released."""
    journal = opened(tmp_path)
    for number in range(3):
        put(journal, "pending/a", {"x": number})
        put(journal, "pending/a/b", {"x": number})
    put(journal, 'odd"[é\n', {})
    if not sync:
        journal.commit([EntryChange("pending/a", Strange({"x": 4}))], sync=False)
    size = journal.path.stat().st_size
    FullDisk(monkeypatch).full = True
    journal.commit([EntryChange("pending/a", None), EntryChange('odd"[é\n', None)])
    assert journal.path.stat().st_size == size
    said = replay(journal.path.read_bytes(), BOOT)
    assert (said.entries, said.trouble, said.torn) == ({"pending/a/b": {"x": 2}}, None, False)
    with pytest.raises(OSError, match="full"):
        put(journal, "pending/a", {"x": 5})
    assert journal.durable("pending/a") is None
    monkeypatch.undo()
    put(journal, "pending/a", {"x": 6})
    journal.close()
    assert reread(tmp_path) == {"pending/a/b": {"x": 2}, "pending/a": {"x": 6}}


def test_a_deletion_on_a_full_disk_waits_for_what_was_changed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    for key in ("first", "ceiling", "debt"):
        put(journal, key, {})
    disk = FullDisk(monkeypatch)
    disk.full = True
    with pytest.raises(OSError, match="full"):
        journal.commit([EntryChange("debt", Strange({"x": 1}))], sync=False)
    with pytest.raises(OSError, match="full"):
        journal.commit(
            [
                EntryChange("resting", Strange({})),
                EntryChange("ceiling", None),
                EntryChange("debt", None),
            ]
        )
    found = replay(journal.path.read_bytes(), BOOT).entries
    assert found == {"first": {}, "ceiling": {}, "debt": {}}
    journal.close()
    assert set(reread(tmp_path)) == {"first", "ceiling", "debt"}, "as if zeusd was killed"


def test_the_audit_log_names_the_time_between_its_last_save_and_a_restart(tmp_path: Path) -> None:
    earlier, later = AuditLog(), AuditLog()
    earlier.note(5, Note("lease_expired", {"gpu": "GPU-0"}))
    AuditFile(str(tmp_path), BOOT).save(earlier)
    os.utime(tmp_path / "audit.json", (0, 0))
    AuditFile(str(tmp_path), BOOT).load(later, 10**20)
    first, second = later.dump()
    assert (first["event"], first["t_ns"]) == ("lease_expired", 5)
    age_ns = second["last_ns"] - second["t_ns"]
    assert (second["event"], second["last_ns"]) == ("restarted", 10**20)
    assert 0 <= time.time_ns() - age_ns < 3600 * 10**9
