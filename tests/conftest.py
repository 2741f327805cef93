"""Which tests can run here, and how `scripts/test` shares them out over its workers."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import signal
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests import late, needs, preloaded, seeds

TRAINERS = (
    "tests/zeus/power_limit/test_huggingface.py",
    "tests/zeus/power_limit/test_lightning.py",
    "tests/zeus/measure/test_trainers.py",
    "tests/zeus/serving/test_transformers.py",
    "tests/zeus/pipeline_frequency/test_torch_pipelining.py",
    "tests/zeus/run/test_dataloader.py",
    "tests/zeus/compat/test_imports.py",
    "tests/docs/pages/test_pipeline_frequency_integration.py",
    "tests/docs/pages/test_migrating.py",
    "tests/docs/pages/test_extending.py",
)
"""Files that import PyTorch or trainers: one worker runs all of them, as that takes seconds."""

FIRST = ("tests/system/test_systemd.py", "tests/system/test_package.py", "TRAINERS")
"""What takes longest and cannot be parted: all of each is about one machine that booted, or one
process that imported much."""

WAITING = (
    "tests/docs/test_site.py",
    "tests/zeusctl/test_top.py",
    "tests/examples/test_pipeline_frequency_optimizer.py",
    "tests/system/test_problems.py",
    "tests/examples/test_huggingface.py",
    "tests/zeusctl/test_receipt.py",
    "tests/zeusd/test_restore.py",
    "tests/system/test_attacks.py",
    "tests/examples/test_power_limit_optimizer.py",
    "tests/system/test_odd_drivers.py",
    "tests/zeus/power_limit/test_distributed.py",
    "tests/system/test_slurm.py",  # uses the installation that test_systemd.py has made
    "tests/zeus/pipeline_frequency/client/test_distributed.py",
    "tests/zeus/pipeline_frequency/server/test_page.py",
    "tests/system/test_starting.py",
    "tests/zeusctl/test_reading.py",
    "tests/zeusctl/test_changing.py",
    "tests/zeusctl/exercise/test_exercise.py",
    "tests/zeusctl/test_exporter.py",
    "tests/zeus/batch_size/server/test_page.py",
    "tests/zeus/serving/test_clock_control.py",
    "tests/zeus/power_limit/test_interrupted.py",
    "tests/zeus/batch_size/server/test_command.py",
    "tests/docs/pages/test_tutorial.py",
    "tests/examples/test_batch_size_optimizer.py",
    "tests/examples/test_zeus_run.py",
    "tests/system/test_containers.py",
    "tests/zeus/pipeline_frequency/client/test_optimizer.py",
    "tests/zeus/pipeline_frequency/server/test_drift.py",
    "tests/system/test_serve.py",
    "tests/zeus/serving/test_whole_path.py",
    "tests/system/test_shared_gpu.py",
    "tests/examples/test_serving.py",
)
"""Files that mostly wait, for devices, programs and pages, the longest first. They run beside those
that compute: if all waited at once, the processors would be idle."""

APART = (
    "tests/test_mutations.py",
    "tests/zeusd/core/test_schedules.py",
    "tests/system/test_measuring.py",
    "tests/system/test_whole_path.py",
    "tests/system/test_crashes.py",
    "tests/system/test_lease_ends.py",
    "tests/system/test_restores.py",
    "tests/system/test_rights.py",
    "tests/system/test_quiesce.py",
)
"""Files whose tests share nothing and mostly wait: each test goes to whichever worker is free, and
they are spread over the whole run."""

SILENT_S = 600.0
"""After so many seconds in which no worker has ended a test, the run ends: above the timeout of any
test, and faulthandler's in pyproject.toml, which say more."""

TESTS = os.path.dirname(__file__) + os.sep
"""Where an exception that a server reports is raised on purpose."""

AGAIN_S = 20.0
"""Pause between the alarms of a test that has taken too long."""

WAITING_END, APART_END = 0.7, 0.9
"""By when the last of these has begun, as a part of all other files: what comes last is short and
computes, so that all workers end at about the same time."""


def pytest_configure(config: pytest.Config) -> None:
    """What `--strict-markers` allows, and how tests are interrupted."""
    # zeusd trusts no folder that others may write, whatever the user's umask lets tests make.
    os.umask(0o022)
    # A shell's background job ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get(seeds.VARIABLE, seeds.DEFAULT) == seeds.DEFAULT:
        hypothesis.settings.register_profile("same", derandomize=True, database=None)
        hypothesis.settings.load_profile("same")
    if not hasattr(config, "workerinput"):
        os.environ[preloaded.SHARED] = tempfile.mkdtemp(prefix="zeusd-tests-")
    config.addinivalue_line("markers", "needs(*names): what the test needs: see tests/needs.py")


def pytest_runtest_logreport(report: Any) -> None:
    """A run over several workers ends, even if no worker answers."""
    if hasattr(report, "node") and report.when == "teardown":  # on the process that shares out
        faulthandler.dump_traceback_later(SILENT_S, exit=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what workers shared."""
    faulthandler.cancel_dump_traceback_later()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(preloaded.SHARED))


def pytest_itemcollected(item: pytest.Item) -> None:
    """A need that nobody knows is an error at once."""
    for mark in item.iter_markers("needs"):
        if unknown := {*mark.args} - needs.NAMES:
            raise pytest.UsageError(f"{item.nodeid} needs {unknown}: tests/needs.py has no such")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that cannot run here is not run."""
    needs.require(*(name for mark in item.iter_markers("needs") for name in mark.args))


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_set_timer() -> Iterator[None]:
    """The alarm of a test's timeout comes again: what it interrupts may wait at its own end, as
    `with subprocess.Popen(...)` does."""
    yield
    if (left_s := signal.getitimer(signal.ITIMER_REAL)[0]) > 0:
        signal.setitimer(signal.ITIMER_REAL, left_s, AGAIN_S)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Prints the last lines: which tests did not run, and how to run them."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    if lines := needs.summary(reasons):
        terminalreporter.section(needs.TITLE)
        for line in lines:
            terminalreporter.line(line)


for _name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"):
    os.environ.pop(_name, None)  # of a systemd that started the shell: no daemon here is its unit

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # more tests run at a time than there are cores

gc.disable()  # until collection is over: nothing that is imported is garbage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On each worker alike: the order in which tests are handed out; else pytest's own."""
    if not hasattr(config, "workerinput"):
        return
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(_unit_of(item.nodeid), []).append(item)
    apart = [name for name in units if name.partition("::")[0] in APART]
    apart.sort(key=lambda name: zlib.crc32(name.encode()))  # the longest are not neighbours
    waiting = [name for name in WAITING if name in units]
    others = [name for name in units if name not in {*FIRST, *waiting, *apart}]
    place = {name: float(number - len(FIRST)) for number, name in enumerate(FIRST)}
    for names, end in ((waiting, WAITING_END), (apart, APART_END), (others, 1.0)):
        place |= {name: end * number / len(names) for number, name in enumerate(names)}
    items[:] = [item for name in sorted(units, key=place.__getitem__) for item in units[name]]


def _unit_of(nodeid: str) -> str:
    """The group of tests that stay on one worker: a test, a file, or files that import trainers."""
    path = nodeid.partition("::")[0]
    if path in TRAINERS:
        return "TRAINERS"
    return nodeid if path in APART else path


def _loggers() -> list[logging.Logger]:
    found = logging.root.manager.loggerDict.values()
    return [logging.root, *(one for one in found if isinstance(one, logging.Logger))]


class _Bugs(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "bug" and record.exc_info:
            *_, (frame, _) = traceback.walk_tb(record.exc_info[2])
            if not frame.f_code.co_filename.startswith(TESTS):  # else it is on purpose
                self.seen.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True, scope="module")
def _logs() -> Iterator[None]:
    """Levels that a server in this process sets end with the file: other files count records. No
    server may report a bug of its own."""
    before, bugs = {one: one.level for one in _loggers()}, _Bugs()
    logging.getLogger("zeusd").addHandler(bugs)
    yield
    logging.getLogger("zeusd").removeHandler(bugs)
    for one in _loggers():
        if one.level != before.get(one, logging.NOTSET):
            one.setLevel(before.get(one, logging.NOTSET))
    assert not bugs.seen


def pytest_collection_finish() -> None:
    """What is there before the first test stays: nobody needs to look through it for garbage again,
    as frameworks have it done after each training. But for levels of logs, which servers set where
    they are imported.
    """
    for one in _loggers():
        if one.name.partition(".")[0] == "zeus":
            one.setLevel(logging.NOTSET)
    late.collected()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole, as what their modules make is not to be made twice, but for `APART`.

    The groups of pytest-xdist 3.8 would do the same, had they not lost their effect with pytest
    9.2 (pytest-xdist's issue 1386).
    """
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit_of(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would put those with the most tests first
    return Sharing(config, log)
