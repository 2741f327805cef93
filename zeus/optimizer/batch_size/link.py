"""One run's way to who keeps its trial: reports, keeps it alive, says how it ended.

Training waits a little for an answer, and only while someone answers. Who is away is asked again
by a thread, which then sends the newest report: it has all that those before it had.
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

log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 10.0)
HEARTBEATS = 4
"""In each lease, so that one or two may be lost."""

_SHORTEST_S = 0.05
_UNKNOWN = "how this run ended is not known to who keeps its trial"

T = TypeVar("T")


def may_pass(error: ZeusBSORuntimeError) -> bool:
    """Whether the same request may succeed later: nobody answered, or who did is in trouble."""
    return error.status in (0, 408, 425, 429) or error.status >= 500


def patiently(ask: Callable[[], T], wait_s: float) -> T:
    """Asks again, ever more slowly, while nobody answers.

    Clients that were refused at the same time come back at different times.

    Args:
        ask: Raises ZeusBSORuntimeError.
        wait_s: How long; 0 asks once.

    Raises:
        ZeusBSORuntimeError: It was refused, or nobody answered in that time.
        ImportError: tenacity is not installed.
    """
    try:
        import tenacity
    except ImportError:
        raise ImportError(
            "reporting runs needs tenacity; install it with pip install 'zeusd[bso]'"
        ) from None
    shortest_s, longest_s = BACKOFF_S
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, ZeusBSORuntimeError) and may_pass(error)
        ),
        wait=tenacity.wait_random_exponential(multiplier=shortest_s, max=longest_s),
        stop=tenacity.stop_before_delay(wait_s) | tenacity.stop_after_delay(wait_s),
        reraise=True,
    )
    answer: T = retrying(_asked, ask)
    return answer


def _asked(ask: Callable[[], T]) -> T:
    """What is answered; a mistake in what keeps the trials in this process is as a server's."""
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
    """The way, from a trial's beginning to its end.

    Args:
        trials: Who keeps it. Closed at the end.
        trial: The trial.
        wait_s: How long a report waits for an answer, s.
    """

    def __init__(self, trials: Trials, trial: NewTrial, wait_s: float) -> None:
        self._trials = trials
        self._trial = TrialId(
            job_id=trial.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number
        )
        self._wait_s = wait_s
        lease_s = trial.lease_s
        self._beat_s = None if lease_s is None else max(_SHORTEST_S, lease_s / HEARTBEATS)
        self._unsent: TrainingResult | None = None
        self._away = self._refused = False
        self._reason: Reason | None = None
        self._deadline = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-trial", daemon=True)
        self._thread.start()

    def report(self, result: TrainingResult) -> ReportResponse | None:
        """An epoch has ended. None where nobody answers; it is sent later.

        Args:
            result: What was used until now.
        """
        self._unsent = result
        if self._refused:
            return None
        if self._away:
            self._wake.set()
            return None
        try:
            return patiently(lambda: self._send(result), self._wait_s)
        except ZeusBSORuntimeError as error:
            self._fail(error)
            self._wake.set()
            return None

    def end(self, reason: Reason | None, wait_s: float) -> None:
        """The run has ended. What was not sent yet is, and the thread ends.

        Args:
            reason: How; None where a report has said so, or the run is to go on elsewhere.
            wait_s: How long to wait for that, s.
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
                self._wake.wait(pause_s * random.uniform(0.8, 1.2) if self._away else self._beat_s)
                self._wake.clear()
                if self._stop.is_set() or self._refused:
                    continue
                try:
                    result = self._unsent
                    if self._away and result is not None:
                        patiently(functools.partial(self._send, result), 0)
                    elif self._beat_s is not None:
                        patiently(lambda: self._trials.heartbeat(self._trial), 0)
                    self._back()
                    pause_s = BACKOFF_S[0]
                except ZeusBSORuntimeError as error:
                    self._fail(error)
                    pause_s = min(BACKOFF_S[1], 2 * pause_s)
            self._last()
        except Exception:  # a thread that nobody watches must not end in silence
            log.exception("the batch size optimizer no longer reports")
            self._refused = True
        finally:
            self._trials.close()

    def _last(self) -> None:
        """Sends what is still to be sent."""
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
        elif self._away:
            log.debug("still nobody there: %s", sentence)
        else:
            self._away = True
            log.warning("%s; training continues, and reports are sent later", sentence)

    def _back(self) -> None:
        if self._away:
            self._away = False
            log.warning("reports of this run are received again")
