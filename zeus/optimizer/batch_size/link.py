"""One run's connection to the store of its trial: reports, heartbeats, the end. Training waits only
shortly for a reply, and only while the store answers. While it does not, a thread retries, and then
sends the newest report, which includes all earlier ones.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from zeus.optimizer.batch_size.common import (
    EndTrial,
    NewTrial,
    Reason,
    ReportResponse,
    TrainingResult,
    TrialId,
    Trials,
)
from zeus.optimizer.batch_size.exceptions import ZeusBSOError, ZeusBSORuntimeError
from zeus.utils.http import retrying
from zeus_common.outage import Outage

log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 10.0)
HEARTBEATS = 4
"""Heartbeats in each lease, so that one or two may be lost."""

_SHORTEST_S = 0.05
_UNKNOWN = "the end of this run could not be reported to where its trial is kept"

T = TypeVar("T")


def may_pass(error: ZeusBSORuntimeError) -> bool:
    """Whether the same request may succeed later: no reply, or a server error."""
    return error.status in (0, 408, 425, 429) or error.status >= 500


def patiently(ask: Callable[[], T], wait_s: float) -> T:
    """Retries with exponential backoff while there is no reply, with jitter between clients.

    Raises:
        ZeusBSORuntimeError: It was refused, or there was no reply in that time.
        ImportError: tenacity is not installed.
    """
    retry = retrying(
        lambda error: isinstance(error, ZeusBSORuntimeError) and may_pass(error), BACKOFF_S, wait_s
    )
    answer: T = retry(_asked, ask)
    return answer


def _asked(ask: Callable[[], T]) -> T:
    """Makes a request; turns a bug of a store in this process into a server error."""
    try:
        return ask()
    except ZeusBSOError:
        raise
    except Exception as error:
        log.info("keeping trials failed", exc_info=True)
        raise ZeusBSORuntimeError(
            f"keeping trials failed ({type(error).__name__}: {error}); please report this", 500
        ) from error


class Link:
    """The connection, from a trial's start to its end.

    Args:
        trials: The store. Closed at the end.
        wait_s: How long a report waits for its reply, s.
    """

    def __init__(self, trials: Trials, trial: NewTrial, wait_s: float) -> None:
        self._trials = trials
        self._trial = TrialId(**trial.model_dump(include=set(TrialId.model_fields)))
        self._wait_s = wait_s
        lease_s = trial.lease_s
        self._beat_s = None if lease_s is None else max(_SHORTEST_S, lease_s / HEARTBEATS)
        self._unsent: TrainingResult | None = None
        self._outage = Outage(log, "reports of this run are received again")
        self._refused = False
        self._reason: Reason | None = None
        self._deadline = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-trial", daemon=True)
        self._thread.start()

    def report(self, result: TrainingResult) -> ReportResponse | None:
        """An epoch has ended. Returns None without a reply; the report is then sent later."""
        self._unsent = result
        if self._refused:
            return None
        if self._outage.lasts:
            self._wake.set()
            return None
        try:
            return patiently(lambda: self._send(result), self._wait_s)
        except ZeusBSORuntimeError as error:
            self._fail(error)
            self._wake.set()
            return None

    def end(self, reason: Reason | None, wait_s: float) -> None:
        """The run has ended. Sends what is outstanding, and ends the thread.

        Args:
            reason: How; None if a report has said so, or the run is to be resumed.
            wait_s: How long to wait, s.
        """
        self._reason = reason
        self._deadline = time.monotonic() + 0.8 * wait_s  # leaves the last attempt some time
        self._stop.set()
        self._wake.set()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            log.warning("%s, as nobody answered in %g s", _UNKNOWN, wait_s)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause_s = BACKOFF_S[0]
        try:
            while not self._stop.is_set():
                self._wake.wait(
                    pause_s * random.uniform(0.8, 1.2) if self._outage.lasts else self._beat_s
                )
                self._wake.clear()
                if self._stop.is_set() or self._refused:
                    continue
                try:
                    result = self._unsent
                    if self._outage.lasts and result is not None:
                        patiently(functools.partial(self._send, result), 0)
                    elif self._beat_s is not None:
                        patiently(lambda: self._trials.heartbeat(self._trial), 0)
                    self._outage.succeeded()
                    pause_s = BACKOFF_S[0]
                except ZeusBSORuntimeError as error:
                    self._fail(error)
                    pause_s = min(BACKOFF_S[1], 2 * pause_s)
            self._last()
        except Exception:  # a thread that nobody watches must not end silently
            log.exception("the batch size optimizer no longer reports")
            self._refused = True
        finally:
            self._trials.close()

    def _last(self) -> None:
        """Sends what is outstanding."""
        if self._refused:
            return
        try:
            result = self._unsent
            if result is not None:
                patiently(lambda: self._send(result), self._deadline - time.monotonic())
            if self._reason is not None:
                end = EndTrial(**self._trial.model_dump(), reason=self._reason)
                patiently(lambda: self._trials.end_trial(end), self._deadline - time.monotonic())
        except ZeusBSORuntimeError as error:
            log.warning("%s; %s", str(error).rstrip("."), _UNKNOWN)

    def _send(self, result: TrainingResult) -> ReportResponse:
        answer = self._trials.report(result)
        if self._unsent is result:  # and no newer one has come
            self._unsent = None
        return answer

    def _fail(self, error: ZeusBSORuntimeError) -> None:
        sentence = str(error).rstrip(".")
        if not may_pass(error):
            if not self._refused:
                self._refused = True
                log.warning(
                    "%s; training continues, and this run is not reported any more", sentence
                )
        else:
            self._outage.failed(f"{sentence}; training continues, and reports are sent later")
