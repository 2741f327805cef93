"""Whose processes are on a GPU: real processes, and lists of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import pidfds_are_closed, wait_for  # noqa: F401 - one is a fixture
from zeusd.energy.accountant import NEVER_NS, Fact, FactSpan
from zeusd.energy.split import Account, Kind
from zeusd.runtime.control_groups import ProcessWorkload, WorkloadKind
from zeusd.runtime.identities import Identities, Identity, is_ignored
from zeusd.runtime.presence import LIST_FAILED, LIST_NS, TICK_NS, UNKNOWN_PROCESS, Exits, Presence

ALICE, BOB = Account(Kind.USER, uid=1000), Account(Kind.USER, uid=1001)
DCGM = Account(Kind.SERVICE, "dcgm.service")


class Processes:
    """Stands in for /proc: processes by pid, each with a pidfd that can be ended."""

    def __init__(self) -> None:
        self.living: dict[int, tuple[int, Account]] = {}
        self.ends: dict[int, int] = {}
        self.pidfds: dict[int, int] = {}
        self.opened: list[int] = []

    def start(self, pid: int, start_ns: int, account: Account) -> None:
        self.living[pid] = (start_ns // TICK_NS, account)

    def end(self, pid: int) -> None:
        del self.living[pid]
        if pid in self.ends:
            os.write(self.ends[pid], b"x")

    def identify(self, pid: int) -> Identity | None:
        if pid not in self.living:
            return None
        self.pidfds[pid], self.ends[pid] = os.pipe()
        self.opened.append(self.ends[pid])
        return Identity(*self.living[pid], self.pidfds[pid])


class Node:
    """One GPU's presence, at a time set by hand."""

    def __init__(self) -> None:
        self.now_ns = 100 * LIST_NS
        self.processes = Processes()
        self.spans: list[FactSpan] = []
        self.exits = Exits(lambda: self.now_ns)
        identities: Identities = self.processes
        self.presence = Presence(
            lambda _, span: self.spans.append(span), identities, self.exits, ["dcgm*"], lambda: 0
        )

    def listed(self, *pids: int, after_ns: int = LIST_NS) -> None:
        self.now_ns += after_ns
        self.presence.listed("GPU-0", self.now_ns, pids)

    def present(self) -> list[tuple[Account, float, float | None]]:
        """Accounts with the begin and end of their spans, in seconds from the start."""

        def seconds(t_ns: int) -> float:
            return (t_ns - 100 * LIST_NS) / LIST_NS

        return [
            (
                span.claim.account,
                seconds(span.begin_ns),
                None if span.end_ns == NEVER_NS else seconds(span.end_ns),
            )
            for span in self.spans
            if span.fact is Fact.PRESENT and span.claim is not None
        ]


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    yield found
    found.presence.close()
    for end in found.processes.opened:
        with pytest.raises(BrokenPipeError):  # nobody has its other end, which stands for a pidfd
            os.write(end, b"x")
        os.close(end)


def test_one_sighting_tells_the_start(node: Node) -> None:
    node.listed()
    node.processes.start(5, node.now_ns + LIST_NS // 4, ALICE)
    node.processes.start(6, node.now_ns - 50 * LIST_NS, BOB)  # its context is new
    node.listed(5, 6)
    assert node.present() == [(ALICE, 1.25, None), (BOB, 1.0, None)]
    listed = [(s.begin_ns, s.end_ns) for s in node.spans if s.fact is Fact.LISTED]
    assert listed == [(101 * LIST_NS, 101 * LIST_NS), (101 * LIST_NS, 102 * LIST_NS)]


def test_an_end_is_when_the_process_ended_and_not_when_it_was_missed(node: Node) -> None:
    node.processes.start(5, node.now_ns, ALICE)
    node.listed()
    node.listed(5)
    node.now_ns += LIST_NS // 2
    pidfd = node.processes.pidfds[5]
    node.processes.end(5)
    wait_for(lambda: node.exits.ended_ns(pidfd) is not None, "the exit to be noted")
    node.listed(after_ns=LIST_NS // 2)
    assert node.present() == [(ALICE, 1.0, 2.5)]


def test_a_context_that_is_closed_ends_with_the_first_list_without_it(node: Node) -> None:
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    node.listed()
    node.listed(5)
    assert node.present() == [(ALICE, 1.0, 2.0), (ALICE, 2.0, None)]


def test_a_pid_that_another_process_got_is_another_process(node: Node) -> None:
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    pidfd = node.processes.pidfds[5]
    node.now_ns += LIST_NS // 4
    node.processes.end(5)
    wait_for(lambda: node.exits.ended_ns(pidfd) is not None, "the exit to be noted")
    node.processes.start(5, node.now_ns + LIST_NS // 4, BOB)
    node.listed(5, after_ns=3 * LIST_NS // 4)
    assert node.present() == [(ALICE, 1.0, 1.25), (BOB, 1.5, None)]


def test_a_process_begins_after_the_one_that_had_its_pid(node: Node) -> None:
    """Starts are known to a clock tick, ends exactly."""
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    pidfd = node.processes.pidfds[5]
    node.now_ns += LIST_NS // 4 + TICK_NS // 2
    node.processes.end(5)
    wait_for(lambda: node.exits.ended_ns(pidfd) is not None, "the exit to be noted")
    node.processes.start(5, node.now_ns, BOB)  # in the same tick
    node.listed(5)
    assert node.present() == [(ALICE, 1.0, 1.255), (BOB, 1.255, None)]


def test_an_unidentified_process_is_unattributed_and_not_charged_to_a_neighbour(node: Node) -> None:
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    node.listed(5, 77)
    assert node.present() == [(ALICE, 1.0, None), (UNKNOWN_PROCESS, 1.0, 2.0)]


def test_a_monitor_has_no_weight(node: Node) -> None:
    node.processes.start(5, 0, DCGM)
    node.listed(5)
    (span,) = [span for span in node.spans if span.fact is Fact.PRESENT]
    assert span.claim.weight == 0
    assert is_ignored(DCGM, ["nvidia-*", "dcgm*"])
    assert not is_ignored(Account(Kind.SERVICE, "ollama.service"), ["dcgm*"])
    assert not is_ignored(Account(Kind.JOB, "dcgm"), ["dcgm*"])


def test_failed_or_distant_lists_prove_nothing_about_the_time_between(node: Node) -> None:
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    node.now_ns += LIST_NS
    node.presence.failed("GPU-0", node.now_ns)
    node.listed(5)
    node.listed(5, after_ns=10 * LIST_NS)
    assert node.present() == [(ALICE, 1.0, 1.0), (ALICE, 3.0, 3.0), (ALICE, 13.0, None)]
    (unknown,) = [span for span in node.spans if span.fact is Fact.UNKNOWN]
    assert (unknown.reason, unknown.end_ns - unknown.begin_ns) == (LIST_FAILED, LIST_NS)


def test_a_gpu_that_is_held_from_now_on_has_no_processes(node: Node) -> None:
    node.processes.start(5, 0, ALICE)
    node.listed(5)
    node.presence.stop("GPU-0", node.now_ns + LIST_NS // 2)
    assert node.present() == [(ALICE, 1.0, 1.5)]


def spawn(code: str = "input()") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def test_a_real_process_is_its_users(tmp_path: Path) -> None:
    identities = Identities()
    with spawn() as process:
        found = identities.identify(process.pid)
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        assert 0 <= boot_ns - found.start_ticks * TICK_NS < 60 * LIST_NS
        assert found.account.uid in (os.getuid(), -1)  # a service, where the tests run in one
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identities.identify(process.pid) is None, "it is dead, and not reaped"
    os.close(found.pidfd)
    assert identities.identify(process.pid) is None
    assert identities.identify(2**40) is None


@pytest.mark.parametrize(
    ("workload", "account"),
    [
        (None, Account(Kind.USER, uid=os.getuid())),
        (ProcessWorkload(WorkloadKind.USER, "1000"), Account(Kind.USER, uid=os.getuid())),
        (ProcessWorkload(WorkloadKind.JOB, "7"), Account(Kind.JOB, "7", uid=os.getuid())),
        (ProcessWorkload(WorkloadKind.POD, "1f2e"), Account(Kind.POD, "unknown/1f2e")),
        (
            ProcessWorkload(WorkloadKind.CONTAINER, "0123456789abcdef"),
            Account(Kind.CONTAINER, "0123456789ab", uid=os.getuid()),
        ),
        (ProcessWorkload(WorkloadKind.SERVICE, "x.service"), Account(Kind.SERVICE, "x.service")),
    ],
)
def test_a_process_is_charged_as_what_its_control_group_names(
    workload: ProcessWorkload | None, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeusd.runtime.identities.workload_of", lambda groups: workload)
    found = Identities().identify(os.getpid())
    os.close(found.pidfd)
    assert found.account == account


def test_an_exit_is_noted_when_it_happens() -> None:
    clock: Callable[[], int] = time.monotonic_ns
    exits, identities = Exits(clock), Identities()
    with spawn() as process:
        found = identities.identify(process.pid)
        exits.watch(found.pidfd)
        assert exits.ended_ns(found.pidfd) is None
        before_ns = clock()
        process.communicate(b"\n")
    ended_ns = wait_for(lambda: exits.ended_ns(found.pidfd), "the exit to be noted")
    assert before_ns <= ended_ns <= clock()
    exits.forget(found.pidfd)
    exits.close()
