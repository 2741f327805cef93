"""Every safety rule has a test that fails without it: each is deleted in turn, in a copy.

Run it alone with `pytest tests/test_mutations.py -v` to see rule by rule.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import accounting_mutations, needs
from tests.mutation import (
    PRELOADED,
    Deletion,
    Mutation,
    always,
    becomes,
    drop,
    instead,
    linked,
    never,
    rewrite,
    run_tests,
    sets,
    unreached,
    why_not_run,
    without,
)
from tests.preloaded import preloaded
from tests.support import PACKAGES

REPOSITORY = Path(__file__).resolve().parents[1]

OPTIONS = ("-p", "no:cacheprovider", "-o", "timeout_func_only=true")
"""No test is out of time while it reports what it noticed: pytest would end with another code."""

PATIENCE_S = 8
"""Without its rule a test may wait in vain; with it, each takes a few seconds at most."""


SCHEDULES = "zeusd/core/test_schedules.py::test_random_schedules"
SCHEDULES_S = 250
"""It computes, and must not count as noticing because it is not over yet: with all rules in force
it takes longer than `PATIENCE_S`."""

MUTATIONS = (
    Mutation(
        "a restore of a set takes out what the lease has added, and nothing else",
        "zeusd.restore_rule.restore_steps",
        unreached("added", "part"),
        "zeusd/core/test_power_profiles.py::test_after_a_crash_only_the_leases_own_profiles_are_cleared",
    ),
    Mutation(
        "a set is changed, and never overwritten",
        "zeusd.restore_rule.Device.write_merged",
        instead("merged", "wanted"),
        "zeusd/core/test_power_profiles.py::test_a_lease_adds_to_what_others_request_and_clears_only_its_own",
    ),
    Mutation(
        "no profile is leased beside a limit unless that is asked",
        "zeusd.core.requests.RequestAnswers",
        drop("_excluded"),
        "zeusd/core/test_power_profiles.py::test_profiles_and_limits_are_leased_together_only_if_that_is_asked",
    ),
    Mutation(
        "a counter of a whole module is not the GPU's",
        "zeusd.energy.channel.Channel",
        never("verdict"),
        "zeusd/energy/test_scope.py::test_energy_is_the_gpus_for_every_counter_scope",
    ),
    Mutation(
        "pidfd watch",
        "zeusd.runtime.processes.ProcessWatch.watch",
        drop("add_reader"),
        "zeusd/runtime/test_processes.py::test_death_is_reported_once_and_only_while_watched",
    ),
    Mutation(
        "watch of a holder",
        "zeusd.core.holding.LeaseState",
        drop("WatchProcess"),
        "zeusd/core/test_core.py::test_the_death_of_the_holder_restores_all_its_controls_and_no_others",
    ),
    Mutation(
        "heartbeat expiry",
        "zeusd.core.holding.LeaseState._check",
        always("current"),
        "zeusd/core/test_leases.py::test_a_silent_holder_that_sleeps_or_is_stopped_loses_it_at_its_ttl",
        SCHEDULES,
    ),
    Mutation(
        "loss told to the waking",
        "zeusd.core.control.ControlMachine.revoke",
        drop("lose"),
        "zeusd/core/test_leases.py::test_every_set_of_a_lost_lease_fails_until_it_is_acquired_again",
    ),
    Mutation(
        "journal before the device",
        "zeusd.runtime.engine.Engine",
        drop("_journal", "commit", "sync"),
        "system/test_crashes.py::test_zeusd_killed_at_any_instant_leaves_a_value_that_the_journal_covers"
        "[True-after the device]",
    ),
    Mutation(
        "journal sync",
        "zeusd.runtime.journal.Journal",
        drop("fdatasync", "self"),
        "zeusd/runtime/test_journal.py::test_a_put_is_synced_before_it_returns",
    ),
    Mutation(
        "journal sync before rename",
        "zeusd.runtime.journal.Journal._rewrite",
        drop("fsync"),
        "zeusd/runtime/test_journal.py::test_a_compaction_is_whole_at_every_instant",
    ),
    Mutation(
        "journal rename",
        "zeusd.runtime.journal.Journal",
        instead("rename", "self._path.write_bytes(data)"),
        "zeusd/runtime/test_journal.py::test_a_compaction_is_whole_at_every_instant",
    ),
    Mutation(
        "a record's checksum",
        "zeusd.records",
        never("_checksum"),
        "zeusd/test_records.py",
    ),
    Mutation(
        "another target needs another record",
        "zeusd.core.entries.PendingRestore.covers",
        never("_is_of"),
        "zeusd/core/test_pending_restores.py::test_another_restore_is_not_the_same",
    ),
    Mutation(
        "what may be in force is durable first",
        "zeusd.core.entries.PendingRestore",
        instead("all", "True"),
        "zeusd/core/test_pending_restores.py",
    ),
    Mutation(
        "a value that is set again is synced once",
        "zeusd.core.entries.PendingRestore.following",
        always("_is_of"),
        "zeusd/runtime/test_engine.py::test_a_limit_that_a_lease_sets_again_is_not_synced_again",
    ),
    Mutation(
        "a full disk prevents no restore",
        "zeusd.core.entries.PendingRestore.leads_to",
        sets("mine", "False"),
        "zeusd/core/test_pending_restores.py",
    ),
    Mutation(
        "what a write may still do is waited for",
        "zeusd.core.model.Values.settles_ns",
        instead("max", "0"),
        "zeusd/core/test_random_drivers.py",
    ),
    Mutation(
        "what fails after a write is no refusal",
        "zeusd.devices.port.after_a_write",
        drop("written"),
        "zeusd/devices/test_amd.py",
    ),
    Mutation(
        "one engine changes a GPU",
        "zeusd.runtime.engine.Engine",
        never("taken"),
        "zeusd/runtime/test_gpu_locks.py",
    ),
    Mutation(
        "a damaged journal is kept",
        "zeusd.runtime.journal.Journal",
        drop("keep_aside"),
        "zeusd/test_damaged_journal.py",
    ),
    Mutation(
        "what could not be written is written later",
        "zeusd.runtime.journal.Journal",
        drop("_late", "change", "key"),
        "zeusd/runtime/test_journal.py",
    ),
    Mutation(
        "capture before the first write",
        "zeusd.core.control.ControlMachine._set",
        never("values"),
        "zeusd/core/test_ceilings.py",
    ),
    Mutation(
        "compare before restore",
        "zeusd.restore_rule.restore_steps",
        never("foreign"),
        "zeusd/core/test_core.py",
        SCHEDULES,
    ),
    Mutation(
        "compare before set",
        "zeusd.runtime.workers.write_checked",
        drop("WriteRefused", "before"),
        "zeusd/runtime/test_workers.py",
    ),
    Mutation(
        "retry of a restore",
        "zeusd.core.control.ControlMachine.retry_now",
        never("PENDING"),
        "zeusd/core/test_core.py",
    ),
    Mutation(
        "recovery of the dead",
        "zeusd.core.core.Core._reconcile",
        always("restore", "alive"),
        "zeusd/core/test_core.py",
    ),
    Mutation(
        "driver reload voids the journal",
        "zeusd.core.core.Core",
        unreached("pending", "clear"),
        "zeusd/core/test_leases.py::test_another_load_of_the_driver_invalidates_the_journal",
    ),
    Mutation(
        "earlier doubts stay",
        "zeusd.core.model.Values.asking",
        sets("doubts", "{}"),
        "zeusd/core/test_odd_drivers.py",
    ),
    Mutation(
        "what a driver made of a doubt is ours",
        "zeusd.restore_rule.is_moved",
        instead("any", "False"),
        "zeusd/core/test_odd_drivers.py",
    ),
    Mutation(
        "default deny",
        "zeusd.core.access.Access.right",
        never("rules"),
        "zeusd/core/test_access.py",
    ),
    Mutation(
        "rights follow the rules",
        "zeusd.core.pending.ClientState.right",
        never("_access"),
        "zeusd/core/test_access.py",
    ),
    Mutation(
        "rights follow the GPU",
        "zeusd.core.pending.ClientState.right",
        becomes("right is None", "gpu"),
        "zeusd/core/test_access.py",
    ),
    Mutation(
        "connections per user",
        "zeusd.server.fairness.Turns.admit",
        never("connections"),
        "zeusd/server/test_server.py::test_connections_of_one_user_and_of_all_are_bounded",
    ),
    Mutation(
        "connections of all users",
        "zeusd.server.acceptor.Acceptor",
        never("open", "_maximum"),
        "zeusd/server/test_server.py::test_connections_of_one_user_and_of_all_are_bounded",
    ),
    Mutation(
        "users take turns",
        "zeusd.server.fairness.Turns",
        always("credit"),
        "zeusd/server/test_fairness.py",
    ),
    Mutation(
        "requests per user",
        "zeusd.server.fairness.Turns",
        drop("_requests", "requests_per_second", "min"),
        "zeusd/server/test_fairness.py",
    ),
    Mutation(
        "who does not read is not read",
        "zeusd.server.server.Server._read",
        never("waiting"),
        "zeusd/server/test_server.py::test_a_client_that_does_not_read_is_not_read_until_it_does",
    ),
    Mutation(
        "messages of one part",
        "zeusd.server.zmtp.ZmtpEngine._judge_header",
        never("_req"),
        "zeusd/server/test_zmtp.py",
    ),
    Mutation(
        "frames are refused by their header",
        "zeusd.server.zmtp.ZmtpEngine",
        never("_max_frame"),
        "zeusd/server/test_zmtp.py",
    ),
    Mutation(
        "descriptors found by peeking",
        "zeusd.server.descriptors.receive_guarded",
        never("MSG_CTRUNC"),
        "zeusd/server/test_server.py::test_reading_by_peeking_loses_nothing",
    ),
    Mutation(
        "a state from before a write",
        "zeusd.runtime.reads.Reads.written",
        drop("_known"),
        "zeusd/runtime/test_reads.py",
    ),
    Mutation(
        "writes per user",
        "zeusd.core.pending.RequestContext.count_change",
        never("_writes"),
        "zeusd/core/test_access.py::test_writes_of_one_user_are_bounded_and_others_do_not_notice",
    ),
    Mutation(
        "a stuck GPU is left to its thread",
        "zeusd.runtime.sampling.Sampling.check",
        drop("replace_stuck"),
        "system/test_measuring.py::test_a_driver_call_that_hangs_delays_no_other_gpu",
    ),
    Mutation(
        "a senseless reading is read again",
        "zeusd.energy.channel.Channel",
        never("plausible", "seen"),
        "zeusd/runtime/test_sampler.py::test_one_senseless_reading_changes_nothing",
    ),
    Mutation(
        "administration is for administrators",
        "zeusd.core.pending.RequestContext.for_admins",
        always("is_admin"),
        "zeusd/core/test_administration.py::test_only_administrators_may",
    ),
    Mutation(
        "a user releases what is the user's own",
        "zeusd.core.leases",
        never("USER"),
        "zeusd/core/test_administration.py::test_a_user_may_release_what_another_of_his_processes_holds",
    ),
    Mutation(
        "what is persisted is durable",
        "zeusd.core.administration.Administration",
        drop("Put", "machine"),
        "zeusd/core/test_administration.py::test_a_persisted_value_survives_zeusd_and_a_reload_and_ends_with_a_reset",
    ),
    Mutation(
        "a quiesced node stays so",
        "zeusd.core.administration.Administration",
        drop("QUIESCED", "Mark"),
        "zeusd/core/test_administration.py::test_a_quiesced_node_stays_so_over_a_restart",
    ),
    Mutation(
        "a program's name is one plain line",
        "zeusd.runtime.processes.command_of",
        instead("printable", "describe(text.split(), name)"),
        "zeusd/runtime/test_processes.py::test_a_programs_name_is_one_plain_line",
    ),
    Mutation(
        "a restore of a set is confirmed by reading",
        "zeusd.restore_rule.restore_steps",
        instead("isdisjoint", "True"),
        "zeusd/core/test_power_profiles.py::test_a_restore_is_complete_when_the_added_profiles_are_cleared",
    ),
    Mutation(
        "a restore is confirmed by reading",
        "zeusd.restore_rule.Device._read_back",
        instead("Unknown", "Holds(asked)"),
        "zeusd/core/test_odd_drivers.py::test_a_restore_that_the_driver_ignores_is_pending_and_tried_again",
    ),
    Mutation(
        "a write is read back",
        "zeusd.runtime.workers.write_checked",
        instead("write_verified", "(device.write(call.value), Holds(call.value))[1]"),
        "zeusd/runtime/test_workers.py",
    ),
    Mutation(
        "an older value shown once is not believed",
        "zeusd.restore_rule.read_settled",
        instead("range", "range(0)"),
        "zeusd/runtime/test_workers.py",
    ),
    Mutation(
        "a value that the driver rounded is ours",
        "zeusd.restore_rule.is_rounded",
        instead("near", "False"),
        "zeusd/core/test_odd_drivers.py",
    ),
    Mutation(
        "a pending restore needs no control that is offered",
        "zeusd.core.core.Core",
        always("offered", "restore"),
        "zeusd/core/test_odd_drivers.py",
    ),
    Mutation(
        "one answer proves no control missing",
        "zeusd.runtime.devices.Inspector",
        always("UNSUPPORTED_AFTER"),
        "zeusd/runtime/test_devices.py",
    ),
    Mutation(
        "a restore stays below the ceilings",
        "zeusd.core.bounds.Bounds.target",
        instead("_under", "self._site.value"),
        "zeusd/core/test_ceilings.py",
        SCHEDULES,
    ),
    Mutation(
        "a ceiling that falls during a restore counts",
        "zeusd.core.control.ControlMachine",
        never("plan", "target", "overwrite"),
        SCHEDULES,
    ),
    Mutation(
        "a ceiling falls back at its deadline",
        "zeusd.core.limiting.CeilingRequests",
        instead("expire", "()"),
        "zeusd/core/test_ceilings.py",
    ),
    Mutation(
        "a stop lowers what a deadline would lower later",
        "zeusd.core.core.Core.stop",
        drop("_ceilings", "stop"),
        "zeusd/core/test_ceilings.py",
    ),
    Mutation(
        "the last resort restores nothing above a ceiling",
        "zeusd.restore_journal.OwnerlessJournal",
        instead("_least", "target"),
        "zeusd/test_restore.py",
    ),
    Mutation(
        "what a ceiling left behind is in the journal",
        "zeusd.core.bounds.Bounds.rest",
        drop("Forget", "Put"),
        "zeusd/core/test_ceilings.py",
    ),
    Mutation(
        "what a ceiling left behind is forgotten",
        "zeusd.core.control.ControlMachine",
        drop("rest", "in_force"),
        "zeusd/core/test_ceilings.py",
    ),
    Mutation(
        "writes come before reads",
        "zeusd.runtime.workers.GpuWorker",
        becomes("self._urgent and not self._reads", "self", "_urgent"),
        "zeusd/runtime/test_workers.py",
    ),
    Mutation(
        "a stall is forgiven once",
        "zeusd.core.holding.LeaseState.forgive_stall",
        drop("forgiven"),
        "zeusd/core/test_leases.py::test_a_stall_is_forgiven_once_for_each_heartbeat",
    ),
    Mutation(
        "a restart is forgiven ever less",
        "zeusd.core.control.ControlMachine.recover",
        instead("begin", "self.holding.begin(lease, now_ns + restore.ttl_ns)"),
        "zeusd/core/test_leases.py::test_a_restart_is_forgiven_once_for_each_heartbeat",
    ),
    Mutation(
        "hard work has a bound",
        "zeusd.core.holding.LeaseState",
        never("last_ns"),
        "zeusd/core/test_leases.py::test_a_silent_holder_that_computes_keeps_its_lease_up_to_a_bound",
    ),
    Mutation(
        "a stopped holder is no busy one",
        "zeusd.core.holding",
        never("stopped"),
        "zeusd/core/test_leases.py",
    ),
    Mutation(
        "leases per user",
        "zeusd.core.requests.RequestAnswers",
        never("held", "leases_per_user"),
        "zeusd/core/test_access.py",
    ),
    Mutation(
        "losses per user",
        "zeusd.core.requests.RequestAnswers",
        never("lost"),
        "zeusd/core/test_access.py",
    ),
    Mutation(
        "who revoked is on record",
        "zeusd.core.leases.LeaseRequests",
        drop("note"),
        "zeusd/core/test_audit.py",
    ),
    Mutation(
        "no call to a driver that is closed",
        "zeusd.core.control.ControlMachine.retry_now",
        always("PENDING"),
        "zeusd/core/test_administration.py::test_a_gpu_that_cannot_be_restored_does_not_keep_the_driver_open",
    ),
    Mutation(
        "a job that starts takes nothing from other jobs on its GPU",
        "zeusd.core.administration.Administration",
        sets("kept", "[]"),
        "zeusd/core/test_administration.py::test_a_job_that_starts_takes_nothing_from_other_jobs_on_its_gpu",
    ),
    Mutation(
        "a position that may mean several GPUs means none",
        "zeusctl.slurm",
        never("meant"),
        "zeusctl/test_slurm.py::test_behind_a_lost_gpu_nothing_is_guessed",
    ),
    Mutation(
        "a lost GPU has a position",
        "zeusctl.slurm",
        drop("numbers", "range", "max"),
        "zeusctl/test_slurm.py::test_a_lost_gpu_is_counted",
    ),
    Mutation(
        "what Slurm's sources say must agree",
        "zeusctl.slurm.parts_of",
        never("listed"),
        "zeusctl/test_slurm.py::test_uuids_count_first",
    ),
    Mutation(
        "a session of the driver that died is opened again",
        "zeusd.runtime.driver.DriverThreads.check",
        drop("_close"),
        "system/test_problems.py",
    ),
    *accounting_mutations.ALL,
)


@pytest.fixture(scope="session")  # of its own for each worker
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's code and tests, to be mutated."""
    copy = tmp_path_factory.mktemp("mutated")
    skip = shutil.ignore_patterns("test_mutations.py")
    for name in (*PACKAGES, "tests", "benchmarks", "scripts"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=skip, copy_function=linked)
    shutil.copy2(REPOSITORY / "pyproject.toml", copy)
    for path in (copy, *copy.parents):
        if str(path).startswith("/tmp/pytest-of"):
            path.chmod(0o755)  # some tests act as another user
    return copy


@pytest.mark.timeout(SCHEDULES_S + 50)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_rule_is_missed_when_its_code_is_gone(mutation: Mutation, copy: Path) -> None:
    path, mutated = without(mutation, copy)
    original = path.read_text(encoding="utf-8")
    rewrite(path, mutated)
    try:
        for test in mutation.tests:
            timeout = f"timeout={SCHEDULES_S if test.endswith(SCHEDULES) else PATIENCE_S}"
            ran = run_tests(preloaded(*PRELOADED), copy, "-qx", *OPTIONS, "-o", timeout, test)
            if reason := why_not_run(ran):
                needs.not_run(reason)
            assert ran.returncode == 1, (
                f"{test} does not notice (exit {ran.returncode}):\n{ran.stdout[-2000:]}"
            )
    finally:
        rewrite(path, original)


@pytest.mark.parametrize(
    ("symbol", "deletion", "words"),
    [
        ("pack.room.Door.shut", drop("lock"), "no module has"),
        ("package.room.Door.shut", drop("lock"), "it has no shut"),
        ("package.room.Door.open", drop("lock"), "uses lock in 0 places"),
        ("package.room.Door.open", drop("log"), "uses log in 2 places"),
        ("package.room.Door.open", never("guest"), "uses guest in 0 places"),
    ],
)
def test_an_entry_that_names_no_code_or_more_than_one_piece_is_an_error(
    tmp_path: Path, symbol: str, deletion: Deletion, words: str
) -> None:
    room(tmp_path)
    with pytest.raises(LookupError, match=words):
        without(Mutation("rule", symbol, deletion), tmp_path)


@pytest.mark.parametrize(
    ("deletion", "before", "after"),
    [
        (drop("welcome"), "self.welcome(who)", "pass"),
        (never("known"), "who in self.known", "False"),
        (always("closed"), "not self.closed", "True"),
        (unreached("refuse"), "who.ünknown", "False"),
        (instead("name_of", "'you'"), "name_of(who)", "'you'"),
        (sets("last", "None"), "last = who", "last = None"),
    ],
)
def test_a_deletion_changes_what_it_names_and_nothing_else(
    tmp_path: Path, deletion: Deletion, before: str, after: str
) -> None:
    path = room(tmp_path)
    mutated = without(Mutation("rule", "package.room.Door.open", deletion), tmp_path)
    assert mutated == (path, ROOM.replace(before, after))


ROOM = """class Door:
    def open(self, who):
        log("open")
        if who in self.known and not self.closed:
            self.welcome(who)
        elif who.ünknown:
            self.refuse(who); return name_of(who)
        self.last = who
        log("done")
"""


def room(folder: Path) -> Path:
    """A module to mutate, with a letter of two bytes before code that stays."""
    (folder / "package").mkdir()
    path = folder / "package/room.py"
    path.write_text(ROOM, encoding="utf-8")
    return path
