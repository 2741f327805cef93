"""Warnings point at the user's line, whatever is between it and ours."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import for_users
from tests.zeus.node import VirtualNode
from zeus.measure import EnergyCallback
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint
from zeus.utils.warn import warn


def refuse(*figures: Any) -> None:
    raise OSError("the disk is full")


def a_monitor(node: VirtualNode) -> None:
    ZeusMonitor(cpu_indices=[7])  # here


def a_read(node: VirtualNode) -> None:
    monitor = node.monitor()
    node.nvml.lose(0)
    with monitor.window("step") as window:
        node.clock.sleep(1)
    _ = window.total_energy  # here


def a_loop(node: VirtualNode) -> None:
    callback = EnergyCallback(node.monitor(), log=refuse, log_every=1, print_summary=False)
    with callback:  # here
        for _ in callback.steps(range(1)):
            node.clock.sleep(1)


def an_argument(node: VirtualNode) -> None:
    MaxSlowdownConstraint(10)  # here


def a_hook(node: VirtualNode) -> None:
    optimizer = GlobalPowerLimitOptimizer(node.monitor())
    optimizer.on_progress = refuse
    optimizer.on_step_begin()  # here
    optimizer.on_train_end()


def a_library(node: VirtualNode) -> None:
    """As a trainer's frames, which are in site-packages."""
    code = compile(
        "def train(warn): warn('from a callback')",
        "/venv/lib/python3/site-packages/trainer.py",
        "exec",
    )
    library: dict[str, Any] = {}
    exec(code, library)
    library["train"](warn)  # here


@pytest.mark.parametrize("act", [a_monitor, a_read, a_loop, an_argument, a_hook, a_library])
def test_a_warning_points_at_the_users_line(
    node: VirtualNode, act: Callable[[VirtualNode], None]
) -> None:
    lines, first = inspect.getsourcelines(act)
    here = first + next(i for i, line in enumerate(lines) if line.endswith("# here\n"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act(node)
    assert [(one.filename, one.lineno) for one in for_users(seen)] == [(__file__, here)]


def test_a_thread_of_ours_warns_at_the_line_that_runs_it() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("from a thread",))
        thread.start()
        thread.join()
    assert [str(one.message) for one in for_users(seen)] == ["from a thread"]


def test_a_training_without_steps_is_told_what_to_do(node: VirtualNode) -> None:
    optimizer = GlobalPowerLimitOptimizer(node.monitor())
    with pytest.warns(UserWarning, match=r"saw no step of it: iterate over plo\.steps"):
        with optimizer:
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer:
            for _ in optimizer.steps(range(2)):
                pass
    optimizer = GlobalPowerLimitOptimizer(node.monitor())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), optimizer:
            raise KeyError
    assert node.limit_w() == 250
