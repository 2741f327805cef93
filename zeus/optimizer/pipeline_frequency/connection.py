"""One rank's connection to the server: a thread that registers, reports, and receives plans.

Training never waits for it beyond its first seconds. If the server is unavailable, the rank
continues with its plan, and the thread retries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from zeus.optimizer.pipeline_frequency.common import (
    GET_FREQUENCY_SCHEDULE_URL,
    REGISTER_JOB_URL,
    REGISTER_RANK_URL,
    REPORT_PROFILE_URL,
    REPORT_PROGRESS_URL,
    FrequencySchedule,
    JobInfo,
    PlanUpdate,
    Progress,
    RankInfo,
    RankProfile,
    report_interval_s,
)
from zeus.optimizer.pipeline_frequency.follower import Schedule
from zeus.optimizer.pipeline_frequency.iteration_times import Least
from zeus.utils.framework import Notes, RanksUnreachable
from zeus.utils.http import CONNECT_S, client, detail, retrying
from zeus_common.outage import Outage

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

TOKEN_ENV = "ZEUS_PFO_TOKEN"
"""Environment variable with the server's token."""

READ_S = 15.0
SCHEDULE_S = 20
"""Time after which to repeat the request: the server replies when all ranks have asked."""

BACKOFF_S = (0.5, 30.0)
POLL_S = 0.1
"""Period at which the other ranks check whether rank 0 has registered the job."""

MOST_TIMES = 10_000
"""Most iteration times that are kept while the server is unavailable; the oldest are dropped."""


_JOB_ID = TypeAdapter(Annotated[str, Field(min_length=1)])
_SCHEDULE = TypeAdapter(FrequencySchedule)
_UPDATE = TypeAdapter(PlanUpdate)
_ANYTHING = TypeAdapter(Any)


class ServerError(Exception):
    """The server refused or cannot be reached; the message is one sentence.

    Attributes:
        status: HTTP status; 0: no reply.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _JobGone(Exception):
    """The server no longer knows the job."""


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, (ServerError, RanksUnreachable))


class ServerConnection:
    """The thread.

    Args:
        job: The job that rank 0 registers.
        rank: This rank, without its clocks.
        clocks: This rank's supported clocks, MHz, once they are known.
        on_schedule: Called with each new plan, from the thread.
        state: Returns the present iteration, and the version of the plan in force.
    """

    def __init__(
        self,
        url: str,
        job: JobInfo,
        rank: RankInfo,
        clocks: Callable[[], list[int]],
        notes: Notes,
        on_schedule: Callable[[Schedule], None],
        state: Callable[[], tuple[int, int]],
    ) -> None:
        self._url = url.rstrip("/")
        self._job = job
        self._rank = rank
        self._clocks = clocks
        self._notes = notes
        self._on_schedule = on_schedule
        self._state = state
        self._times: deque[tuple[int, float]] = deque(maxlen=MOST_TIMES)
        self._instructions: deque[Least] = deque(maxlen=MOST_TIMES)
        self._profile: RankProfile | None = None
        self._info: RankInfo | None = None
        self._generation = 0
        self._registered = self._scheduled = self._profiled = False
        self._reported: set[str] = set()
        self._outage = Outage(log, f"the pipeline frequency server at {self._url} answers again")
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self.job_id = ""
        self._thread = threading.Thread(target=self._run, name="zeus-pipeline", daemon=True)

    def start(self, wait_s: float) -> None:
        """Starts, and waits at most this long for the first schedule or the first failure."""
        self._thread.start()
        self._settled.wait(wait_s)

    def finished(
        self, iterations: Iterable[tuple[int, float]], instructions: Iterable[Least]
    ) -> None:
        """Adds times of iterations, and of kinds of instructions."""
        self._times.extend(iterations)
        self._instructions.extend(instructions)

    def send_profile(self, profile: RankProfile) -> None:
        """Sends this rank's measurements as soon as the server is available, and to any server that
        may have lost them."""
        self._profile = profile
        self._wake.set()

    def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(0.5)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            http = client(self._url, os.environ.get(TOKEN_ENV), READ_S)
            retry = retrying(_may_pass, BACKOFF_S, stop=self._stop, failed=self._fail)
        except (ValueError, ImportError) as error:
            log.warning("%s; training continues without a plan", error)
            self._settled.set()
            if self._rank.rank == 0:
                with contextlib.suppress(RanksUnreachable):
                    self._notes.set("away/0", b"1")
            return
        with http:
            while not self._stop.is_set():
                try:
                    retry(self._advance, http)
                except _JobGone:
                    self.job_id = ""
                    self._generation += 1
                    self._say(
                        "gone",
                        "the server no longer knows the job; it is registered again, and "
                        "training continues",
                    )
                except Exception as error:  # a thread that nobody watches must not end silently
                    if _may_pass(error):
                        continue  # it was stopped
                    log.exception("the pipeline frequency optimizer no longer reaches its server")
                    self._settled.set()
                    break

    def _advance(self, http: httpx.Client) -> None:
        """Makes the next step: registers, gets the schedule, or reports."""
        if not self.job_id:
            self._registered = self._scheduled = False
            if not self._meet(http):
                self._stop.wait(POLL_S)
        elif not self._registered:
            self._register(http)
            self._registered, self._profiled = True, False
        elif not self._scheduled:
            self._scheduled = self._get_schedule(http)
        else:
            self._send_profile(http)
            if "no progress" not in self._reported:
                self._report(http)
            self._outage.succeeded()
            self._wake.wait(report_interval_s(self._job.world_size))
            self._wake.clear()

    def _meet(self, http: httpx.Client) -> bool:
        """Gets the job's id: rank 0 from the server, the others from rank 0."""
        key = f"job/{self._generation}"
        if self._rank.rank == 0:
            try:
                job_id: str = self._ask(http, "POST", REGISTER_JOB_URL, _JOB_ID, self._job)
            except ServerError:
                self._notes.set(f"away/{self._generation}", b"1")
                raise
            self._notes.set(key, job_id.encode())
            self.job_id = job_id
            return True
        noted = self._notes.get(key)
        if noted is not None:
            self.job_id = noted.decode()
            return True
        if not self._settled.is_set() and self._notes.get(f"away/{self._generation}") is not None:
            self._settled.set()  # rank 0 keeps trying; nobody has to wait here
        return False

    def _register(self, http: httpx.Client) -> None:
        if self._info is None:  # a running job's ranks must not change
            self._info = self._rank.model_copy(update={"available_frequencies": self._clocks()})
        self._ask(http, "POST", REGISTER_RANK_URL, _ANYTHING, self._info)

    def _get_schedule(self, http: httpx.Client) -> bool:
        """Waits for the first schedule; False if not all ranks have asked yet."""
        # ml-energy/zeus's server ignores the time limit and replies when it can.
        params = {"rank": self._rank.rank, "timeout_s": SCHEDULE_S}
        try:
            schedule: FrequencySchedule = self._ask(
                http,
                "GET",
                GET_FREQUENCY_SCHEDULE_URL,
                _SCHEDULE,
                params=params,
                timeout=SCHEDULE_S + READ_S,
            )
        except ServerError as error:
            if error.status in (408, 425, 503, 504):
                self._say("waiting", f"{str(error).rstrip('.')}; retrying")
                self._settled.set()
                self._stop.wait(BACKOFF_S[0])
                return False
            raise
        if schedule.frequencies:
            self._on_schedule(Schedule(schedule.version, tuple(schedule.frequencies)))
        self._settled.set()
        return True

    def _send_profile(self, http: httpx.Client) -> None:
        if self._profile is None or self._profiled:
            return
        try:
            self._ask(http, "POST", REPORT_PROFILE_URL, _ANYTHING, self._profile)
        except ServerError as error:
            if error.status not in (409, 422):
                raise
            # Sending it again would not help, and the rank must report all the same.
            self._say("profile", f"{str(error).rstrip('.')}; training continues without that")
        self._profiled = True

    def _report(self, http: httpx.Client) -> None:
        """Reports progress, and takes a plan that comes back."""
        iteration, version = self._state()
        progress = Progress(
            rank=self._rank.rank,
            iteration=max(0, iteration),
            iter_times=list(self._times),
            instruction_times=list(self._instructions),
            version=version,
        )
        try:
            update: PlanUpdate = self._ask(http, "POST", REPORT_PROGRESS_URL, _UPDATE, progress)
        except ServerError as error:
            if error.status == 405 or (error.status == 404 and str(error).endswith("Not Found")):
                self._say(
                    "no progress",
                    f"the server at {self._url} does not accept reports of progress; "
                    "the plan stays the same. Use a server of this release for more",
                )
                return
            raise
        for _ in progress.iter_times:
            self._times.popleft()
        for _ in progress.instruction_times:
            self._instructions.popleft()
        if update.note:
            self._say(f"note {update.note}", f"the server has no plan: {update.note}")
        if update.frequencies is not None:
            self._on_schedule(
                Schedule(update.version, tuple(update.frequencies), update.at_iteration)
            )

    def _ask(
        self,
        http: httpx.Client,
        method: str,
        path: str,
        kind: TypeAdapter[Any],
        body: BaseModel | None = None,
        params: dict[str, int] | None = None,
        timeout: float | None = None,
    ) -> Any:
        import httpx

        content = None if body is None else body.model_dump_json()
        try:
            answer = http.request(
                method,
                path.format(job_id=self.job_id),
                content=content,
                params=params,
                timeout=httpx.USE_CLIENT_DEFAULT
                if timeout is None
                else httpx.Timeout(timeout, connect=CONNECT_S),
            )
        except httpx.HTTPError as error:
            raise ServerError(
                f"the pipeline frequency server at {self._url} cannot be reached "
                f"({type(error).__name__}: {error}); start it, or pass its URL as server_url"
            ) from None
        if answer.status_code == 200:
            try:
                return kind.validate_json(answer.content, strict=True)
            except ValidationError:
                raise ServerError(
                    f"{self._url} answered {path} as no pipeline frequency server does; check the "
                    "URL"
                ) from None
        said = detail(answer)
        if answer.status_code == 404 and self.job_id and said != "Not Found":
            raise _JobGone
        raise ServerError(
            f"the pipeline frequency server refused {path.partition('/{')[0]} with status "
            f"{answer.status_code}: {said}",
            answer.status_code,
        )

    # ------------------------------------------------------------------------------ messages

    def _fail(self, error: BaseException) -> None:
        self._registered = False  # the next one that answers may have lost what this one knew
        sentence = str(error).rstrip(".")
        self._outage.failed(f"{sentence}; training continues and it is tried again")
        self._settled.set()

    def _say(self, kind: str, sentence: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s", sentence)
