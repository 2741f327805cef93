"""The trials stored by a server. Every call is one request, which may be repeated."""

from __future__ import annotations

import os
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from zeus.optimizer.batch_size.common import (
    HEARTBEAT_URL,
    IDEMPOTENCY_HEADER,
    JOB_TRIALS_URL,
    JOBS_URL,
    RELEASE_URL,
    REPORT_URL,
    TRIALS_URL,
    CreatedJob,
    EndTrial,
    JobSpecFromClient,
    NewTrial,
    ReportResponse,
    TrainingResult,
    TrialId,
    Trials,
)
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.utils.http import client, detail
from zeus_ipc.overriding import override

try:
    import httpx
except ImportError:
    raise ImportError(
        "a batch size server is reached with httpx; install it with pip install 'zeusd[bso]'"
    ) from None

TOKEN_ENV = "ZEUS_BSO_TOKEN"
"""Environment variable with the server's token, if it requires one."""

READ_S = 15.0

Answer = TypeVar("Answer", bound=BaseModel)


def _path(template: str, job_id: str) -> str:
    return template.format(job_id=quote(job_id, safe=""))


class HttpTrials(Trials):
    """Implements `Trials`. Thread-safe.

    Raises:
        ZeusBSOConfigError: It is not a URL, or cannot be used.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ZeusBSOConfigError(
                f"a server's URL must be such as http://master:7788, not {url!r}"
            )
        self._url = url.rstrip("/")
        token = os.environ.get(TOKEN_ENV) if token is None else token
        try:
            self._http = client(self._url, token, READ_S)
        except ValueError as error:
            raise ZeusBSOConfigError(str(error)) from None

    @override
    def register(self, spec: JobSpecFromClient) -> CreatedJob:
        return self._ask("POST", JOBS_URL, spec, CreatedJob)

    @override
    def begin_trial(self, job_id: str, key: str) -> NewTrial:
        return self._ask(
            "POST", _path(JOB_TRIALS_URL, job_id), None, NewTrial, {IDEMPOTENCY_HEADER: key}
        )

    @override
    def report(self, result: TrainingResult) -> ReportResponse:
        return self._ask("POST", REPORT_URL, result, ReportResponse)

    @override
    def heartbeat(self, trial: TrialId) -> None:
        self._send("POST", HEARTBEAT_URL, trial)

    @override
    def end_trial(self, end: EndTrial) -> None:
        self._send("PATCH", TRIALS_URL, end)

    @override
    def close(self) -> None:
        self._http.close()

    # The methods of a `Store` that `bso` uses.

    def summaries(self) -> Any:
        """The reply to `GET /jobs`."""
        return self.ask("GET", JOBS_URL, "gpu_model")

    def details(self, job_id: str) -> Any:
        """The reply to `GET /jobs/{job_id}`."""
        return self.ask("GET", _path(f"{JOBS_URL}/{{job_id}}", job_id), "trials")

    def delete(self, job_id: str) -> None:
        """Deletes a job and its trials."""
        self._send("DELETE", _path(f"{JOBS_URL}?job_id={{job_id}}", job_id), None)

    def release(self, job_id: str) -> list[int]:
        """Makes excluded sizes available again, and returns them."""
        path = _path(RELEASE_URL, job_id)
        found: list[int] = self.ask("POST", path, "released")["released"]
        return found

    def ask(self, method: str, path: str, field: str) -> Any:
        """Sends a request without a body; returns the reply, from JSON, which has this field.

        Raises:
            ZeusBSORuntimeError: It is refused, or there is no such reply.
        """
        try:
            found = self._send(method, path, None).json()
            rows = found if isinstance(found, list) else [found]
            if not all(field in row for row in rows):
                raise ValueError
        except (ValueError, TypeError):
            raise self._no_server(path) from None
        return found

    def _no_server(self, path: str) -> ZeusBSORuntimeError:
        return ZeusBSORuntimeError(
            f"{self._url} answered {path} as no batch size server does; check the URL", 422
        )

    def _ask(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        kind: type[Answer],
        headers: dict[str, str] | None = None,
    ) -> Answer:
        answer = self._send(method, path, body, headers)
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError:
            raise self._no_server(path) from None

    def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        content = None if body is None else body.model_dump_json()
        try:
            answer = self._http.request(method, path, content=content, headers=headers)
        except (httpx.HTTPError, RuntimeError) as error:  # the latter: it is closed
            raise ZeusBSORuntimeError(
                f"the batch size server at {self._url} cannot be reached "
                f"({type(error).__name__}: {error}); start it, or give another URL"
            ) from None
        if answer.is_success:
            return answer
        raise ZeusBSORuntimeError(
            f"the batch size server at {self._url} refused {method} {path} with status "
            f"{answer.status_code}: {detail(answer)}",
            answer.status_code,
        )
