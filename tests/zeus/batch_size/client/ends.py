"""Runs that end in every way a process can. Each is a child of this process.

python -m tests.zeus.batch_size.client.ends DATABASE
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.zeus.batch_size.client.fakes import FakeMonitor, job
from zeus.optimizer.batch_size.client import BatchSizeOptimizer
from zeus.optimizer.batch_size.store import Store  # noqa: F401 - once, before all children


def begun(case: str) -> BatchSizeOptimizer:
    """A run under way: each case is a job."""
    monitor: Any = FakeMonitor()
    optimizer = BatchSizeOptimizer(monitor, store=sys.argv[1], job=job(job_id=f"cifar-{case}"))
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    monitor.use(2, 100)
    optimizer.on_evaluate(0.1)
    return optimizer


def told(number: int) -> None:
    """This process is sent a signal, and waits for its effect."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def returns(case: str) -> None:
    begun(case)


def raises(case: str) -> None:
    begun(case)
    raise ValueError("no data")


def memory(case: str) -> None:
    begun(case)
    raise RuntimeError("CUDA out of memory")


def exits(case: str) -> None:
    begun(case)
    sys.exit(3)


def terminated(case: str) -> None:
    begun(case)
    told(signal.SIGTERM)


def hung_up(case: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    begun(case)
    told(signal.SIGHUP)


def handled(case: str) -> None:
    """The program has its own way to end."""

    def save(number: int, frame: Any) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, save)
    begun(case)
    told(signal.SIGTERM)


def handled_within(case: str) -> None:
    """The same where the end passes through the `with` block: no failure of the training."""
    with contextlib.ExitStack() as stack:
        stack.push(lambda *error: optimizer.on_train_end())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        optimizer = begun(case)
        told(signal.SIGTERM)


def ignored(case: str) -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    optimizer = begun(case)
    os.kill(os.getpid(), signal.SIGHUP)
    optimizer.on_evaluate(0.9)


def over(case: str) -> None:
    """Work after a run does not end it, and signals have their usual effect."""
    begun(case).on_evaluate(0.9)
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        os._exit(9)
    raise ValueError("while saving")


def in_a_thread(case: str) -> None:
    thread = threading.Thread(target=begun, args=(case,))
    thread.start()
    thread.join()


def worker(case: str) -> None:
    """A child, such as a data loader's, is terminated: the run continues."""
    optimizer = begun(case)
    child = os.fork()
    if not child:
        loud = logging.Handler()
        loud.emit = lambda record: os._exit(9)
        logging.getLogger("zeus").addHandler(loud)
        told(signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    optimizer.on_evaluate(0.9)


def killed(case: str) -> None:
    begun(case)
    told(signal.SIGKILL)


def interrupted_with_a_name(case: str) -> None:
    os.environ["ZEUS_BSO_RUN_ID"] = "17"
    begun(case)
    told(signal.SIGTERM)


CASES: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        returns,
        raises,
        memory,
        exits,
        terminated,
        hung_up,
        handled,
        handled_within,
        ignored,
        over,
        in_a_thread,
        worker,
        killed,
        interrupted_with_a_name,
    )
}


def main() -> None:
    for case, function in CASES.items():
        pid = os.fork()
        if not pid:
            function(case)  # what it raises ends the child as it would end a program
            return
        print(case, os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
