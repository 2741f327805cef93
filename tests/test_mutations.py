"""Every safety rule has a test that fails without it: each is deleted in turn, in a copy.

Run it alone with `pytest tests/test_mutations.py -v` to see rule by rule.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One rule, where it is kept, the code without it, and the tests that must notice."""

    rule: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return self.rule.replace(" ", "-")


OPTIONS = ("-p", "no:cacheprovider", "-o", "timeout_func_only=true")
"""No test is out of time while it reports what it noticed: pytest would end with another code."""

PATIENCE_S = 8
"""Without its rule a test may wait in vain; with it, each takes a few seconds at most."""

SCHEDULES = "tests/zeusd/core/test_schedules.py::test_random_schedules"
SCHEDULES_S = 250
"""It computes, and must not count as noticing because it is not over yet: with all rules in force
it takes longer than `PATIENCE_S`."""

MUTATIONS = (
    Mutation(
        "pidfd watch",
        "zeusd/runtime/processes.py",
        "                self._reactor.add_reader(pidfd, lambda: self._died(process))\n",
        "                pass\n",
        (
            "tests/zeusd/runtime/test_processes.py::test_death_is_reported_once_and_only_while_watched",
        ),
    ),
    Mutation(
        "watch of a holder",
        "zeusd/core/control.py",
        "            self._out.add(Watch(process))\n        assert self.lease is not None\n"
        "        if item.value is None:",
        "        assert self.lease is not None\n        if item.value is None:",
        (
            "tests/zeusd/core/test_core.py::"
            "test_the_death_of_the_holder_restores_all_its_controls_and_no_others",
        ),
    ),
    Mutation(
        "heartbeat expiry",
        "zeusd/core/leased.py",
        "if self.phase is Phase.HELD and due_ns is not None and now_ns >= due_ns:",
        "if False:",
        (
            "tests/zeusd/core/test_leases.py::"
            "test_a_holder_that_says_nothing_loses_its_lease_after_the_ttl",
            SCHEDULES,
        ),
    ),
    Mutation(
        "loss told to the waking",
        "zeusd/core/control.py",
        "        self._lost[process] = loss\n",
        "",
        (
            "tests/zeusd/core/test_leases.py::"
            "test_who_lost_a_lease_is_told_by_every_set_until_it_acquires_anew",
        ),
    ),
    Mutation(
        "journal before the device",
        "zeusd/runtime/engine.py",
        "            self._journal.put(write.key, write.entry)\n",
        "            pass\n",
        (
            "tests/system/test_promises.py::"
            "test_zeusd_killed_at_any_instant_leaves_a_value_that_somebody_answers_for"
            "[True-after the device]",
        ),
    ),
    Mutation(
        "journal sync",
        "zeusd/runtime/journal.py",
        "            os.fdatasync(self._fd)\n",
        "            pass\n",
        ("tests/zeusd/runtime/test_journal.py::test_a_put_is_synced_before_it_returns",),
    ),
    Mutation(
        "journal sync before rename",
        "zeusd/runtime/journal.py",
        "            os.fsync(fd)\n            os.rename(aside, self._path)\n",
        "            os.rename(aside, self._path)\n",
        ("tests/zeusd/runtime/test_journal.py::test_a_compaction_is_whole_at_every_instant",),
    ),
    Mutation(
        "journal rename",
        "zeusd/runtime/journal.py",
        "            os.rename(aside, self._path)\n",
        "            self._path.write_bytes(data)\n",
        ("tests/zeusd/runtime/test_journal.py::test_a_compaction_is_whole_at_every_instant",),
    ),
    Mutation(
        "capture before the first write",
        "zeusd/core/control.py",
        "        elif self.spec.readable and self.life.state is State.TAKEN:\n",
        "        elif False:\n",
        ("tests/zeusd/core/test_core.py",),
    ),
    Mutation(
        "compare before restore",
        "zeusd/restore_rule.py",
        "        if foreign and not _overwrites(plan, found):\n",
        "        if False:\n",
        ("tests/zeusd/core/test_core.py", SCHEDULES),
    ),
    Mutation(
        "compare before set",
        "zeusd/runtime/workers.py",
        "            if call.expected and before not in call.expected:\n",
        "            if False:\n",
        ("tests/zeusd/runtime/test_workers.py",),
    ),
    Mutation(
        "retry of a restore",
        "zeusd/core/control.py",
        "        if (due_ns := self.retry_at_ns) is not None and now_ns >= due_ns:\n",
        "        if False:\n",
        ("tests/zeusd/core/test_core.py",),
    ),
    Mutation(
        "recovery of the dead",
        "zeusd/core/core.py",
        'ending = None if debt.holder in self._alive else "holder_gone"',
        "ending = None",
        ("tests/zeusd/core/test_core.py",),
    ),
    Mutation(
        "driver reload voids the journal",
        "zeusd/core/core.py",
        "        if self._driver is not None and self._driver != driver:\n",
        "        if False:\n",
        (
            "tests/zeusd/core/test_leases.py::"
            "test_another_load_of_the_driver_voids_what_the_journal_says",
        ),
    ),
    Mutation(
        "default deny",
        "zeusd/core/access.py",
        "        if not covering:\n",
        "        if False:\n",
        ("tests/zeusd/core/test_access.py",),
    ),
    Mutation(
        "connections per user",
        "zeusd/front/admission.py",
        "        if count > self.max_per_user:\n",
        "        if False:\n",
        ("tests/system/test_front.py::test_connections_of_one_user_are_bounded",),
    ),
    Mutation(
        "requests per user",
        "zeusd/front/server.py",
        "        verdict = self._shaper.offer(connection.uid, (connection, data), now_ns)\n",
        "        verdict = Verdict.NOW\n",
        ("tests/system/test_front.py::test_requests_of_one_user_are_bounded",),
    ),
    Mutation(
        "writes per user",
        "zeusd/core/requests.py",
        "        if self._writes.take(peer.uid, self._out.now_ns):\n",
        "        if True:\n",
        (
            "tests/zeusd/core/test_access.py::"
            "test_writes_of_one_user_are_bounded_and_others_do_not_notice",
        ),
    ),
    Mutation(
        "credentials of the very connection",
        "zeusd/front/server.py",
        '                if f"localhost:{uid}:{gid}:{pid}" != address:\n',
        "                if False:\n",
        ("tests/zeusd/front/test_server.py",),
    ),
    Mutation(
        "stuck front",
        "zeusd/runtime/port.py",
        "        if time.monotonic_ns() - self._heard_ns > SILENT_S * 1e9:\n",
        "        if False:\n",
        ("tests/system/test_front.py::test_a_front_that_stands_still_is_replaced",),
    ),
    Mutation(
        "a stuck GPU is left to its thread",
        "zeusd/runtime/sampling.py",
        "        self.sampler.replace_stuck()\n",
        "        pass\n",
        ("tests/system/test_measuring.py::test_a_driver_that_keeps_a_call_delays_no_other_gpu",),
    ),
    Mutation(
        "a senseless reading is read again",
        "zeusd/energy/channel.py",
        "if not self._meter.plausible(sensors):",
        "if not self._meter.plausible(sensors) and False:",
        ("tests/zeusd/runtime/test_sampler.py::test_one_senseless_reading_changes_nothing",),
    ),
    Mutation(
        "administration is for administrators",
        "zeusd/core/administration.py",
        "            if self._node.settings.access.is_admin(peer):\n",
        "            if True:\n",
        ("tests/zeusd/core/test_administration.py::test_only_administrators_may",),
    ),
    Mutation(
        "a user releases what is the user's own",
        "zeusd/core/leases.py",
        "    if request.whose is Whose.USER and lease.uid != peer.uid:\n        return False\n",
        "",
        (
            "tests/zeusd/core/test_administration.py::"
            "test_a_user_may_release_what_another_of_his_processes_holds",
        ),
    ),
    Mutation(
        "what is persisted is durable",
        "zeusd/core/administration.py",
        '            self._out.add(Put(pin_key(uuid, machine.control), {"value": list(value)}))\n',
        "",
        (
            "tests/zeusd/core/test_administration.py::"
            "test_what_is_persisted_outlives_zeusd_and_a_reload_and_ends_with_a_restore",
        ),
    ),
    Mutation(
        "a quiesced node stays so",
        "zeusd/core/administration.py",
        '        self._out.add(Put(QUIESCED_KEY, {"since_ns": self._out.now_ns}))\n',
        "",
        ("tests/zeusd/core/test_administration.py::test_a_quiesced_node_stays_so_over_a_restart",),
    ),
    Mutation(
        "a program's name is one plain line",
        "zeusd/runtime/processes.py",
        "_program(pid)",
        '_read(pid, "comm")',
        ("tests/zeusd/runtime/test_processes.py::test_a_programs_name_is_one_plain_line",),
    ),
    Mutation(
        "no call to a driver that is let go of",
        "zeusd/core/control.py",
        "        self._out.due_ns.pop(self, None)\n        self.life.on(Event.LEAVE)\n",
        "        pass\n",
        (
            "tests/zeusd/core/test_administration.py::"
            "test_a_gpu_that_cannot_be_put_back_does_not_keep_the_driver_open",
        ),
    ),
    Mutation(
        "a restore is confirmed by reading",
        "zeusd/restore_rule.py",
        "    if plan.readable and not took_effect(target, holds, found, plan.rounding):\n",
        "    if False:\n",
        (
            "tests/zeusd/core/test_odd_drivers.py::"
            "test_a_restore_that_the_driver_ignores_is_pending_and_tried_again",
            SCHEDULES,
        ),
    ),
    Mutation(
        "a write is read back",
        "zeusd/runtime/workers.py",
        "        return Applied(write_verified(write, read, call.value, before, time.sleep))\n",
        "        write()\n        return Applied(call.value)\n",
        ("tests/zeusd/runtime/test_workers.py",),
    ),
    Mutation(
        "an older value shown once is not believed",
        "zeusd/restore_rule.py",
        "    for _ in range(4):\n",
        "    for _ in range(0):\n",
        ("tests/zeusd/runtime/test_workers.py",),
    ),
    Mutation(
        "a value that the driver rounded is ours",
        "zeusd/restore_rule.py",
        "    if near(plan.doubt, found, plan.rounding):\n        return True\n",
        "",
        ("tests/zeusd/core/test_odd_drivers.py",),
    ),
    Mutation(
        "a pending restore needs no control that is offered",
        "zeusd/core/core.py",
        "not (offered or debt)",
        "not offered",
        ("tests/zeusd/core/test_odd_drivers.py",),
    ),
    Mutation(
        "one answer proves no control missing",
        "zeusd/runtime/devices.py",
        "            if self._refusals[control] >= UNSUPPORTED_AFTER:\n",
        "            if True:\n",
        ("tests/zeusd/runtime/test_devices.py",),
    ),
    Mutation(
        "a restore stays below the ceilings",
        "zeusd/core/restorable.py",
        "        return self._under(self._site.value)\n",
        "        return self._site.value\n",
        ("tests/zeusd/core/test_ceilings.py", SCHEDULES),
    ),
    Mutation(
        "a ceiling that falls during a restore counts",
        "zeusd/core/restorable.py",
        "        if isinstance(step, Put) and restoration.plan.target != self.target:\n",
        "        if False:\n",
        (SCHEDULES,),
    ),
    Mutation(
        "a ceiling falls back at its deadline",
        "zeusd/core/limiting.py",
        "            for name in machine.ceilings.expire(boot_ns):\n",
        "            for name in ():\n",
        ("tests/zeusd/core/test_ceilings.py",),
    ),
    Mutation(
        "what a ceiling left behind is in the journal",
        "zeusd/core/restorable.py",
        "            self._out.add(Forget(key) if value is None else Keep(key, "
        '{"value": list(value)}))\n',
        "",
        ("tests/zeusd/core/test_ceilings.py",),
    ),
    Mutation(
        "writes come before reads",
        "zeusd/runtime/workers.py",
        "            if self._urgent:\n                call",
        "            if self._urgent and not self._reads:\n                call",
        ("tests/zeusd/runtime/test_workers.py",),
    ),
    Mutation(
        "a stall is forgiven once",
        "zeusd/core/leased.py",
        "            self.lease.forgiven = True\n",
        "            pass\n",
        ("tests/zeusd/core/test_leases.py::test_a_stall_is_forgiven_once_for_each_heartbeat",),
    ),
    Mutation(
        "hard work has a bound",
        "zeusd/core/leased.py",
        "now_ns >= last_ns or ",
        "",
        (
            "tests/zeusd/core/test_leases.py::"
            "test_a_silent_holder_that_computes_keeps_its_lease_up_to_a_bound",
        ),
    ),
    Mutation(
        "a stopped holder is no busy one",
        "zeusd/core/leased.py",
        "    if before is None or now.stopped:\n",
        "    if before is None:\n",
        ("tests/zeusd/core/test_leases.py",),
    ),
    Mutation(
        "leases per user",
        "zeusd/core/requests.py",
        "        if held >= self._access.leases_per_user:\n",
        "        if False:\n",
        ("tests/zeusd/core/test_access.py",),
    ),
    Mutation(
        "losses per user",
        "zeusd/core/requests.py",
        "        if lost >= self._access.losses_per_user:\n",
        "        if False:\n",
        ("tests/zeusd/core/test_access.py",),
    ),
    Mutation(
        "who revoked is on record",
        "zeusd/core/leases.py",
        "                self._note_revoked(machine, peer)\n",
        "",
        ("tests/zeusd/core/test_audit.py",),
    ),
)


@pytest.fixture(scope="session")  # of its own for each worker
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's code and tests, to be mutated."""
    copy = tmp_path_factory.mktemp("mutated")
    skip = shutil.ignore_patterns("test_mutations.py")
    for name in ("zeus", "zeus_ipc", "zeusd", "tests", "benchmarks"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=skip)
    shutil.copy2(REPOSITORY / "pyproject.toml", copy)
    for path in (copy, *copy.parents):
        if str(path).startswith("/tmp/pytest-of"):
            path.chmod(0o755)  # some tests act as another user
    return copy


@pytest.mark.timeout(SCHEDULES_S + 50)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_rule_is_missed_when_its_code_is_gone(mutation: Mutation, copy: Path) -> None:
    path = copy / mutation.file
    original = path.read_text()
    assert original.count(mutation.before) == 1, f"{mutation.file} keeps this rule elsewhere now"
    path.write_text(original.replace(mutation.before, mutation.after))
    # A compiled module is told apart by size and second: a deleted rule could live on in it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for test in mutation.tests:
            timeout = f"timeout={SCHEDULES_S if test == SCHEDULES else PATIENCE_S}"
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", "-qx", *OPTIONS, "-o", timeout, test],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 1, (
                f"{test} does not notice (exit {ran.returncode}):\n{ran.stdout[-2000:]}"
            )
    finally:
        path.write_text(original)
