"""The trials stored by a server. Every call is one request, which may be repeated."""

from __future__ import annotations

import os
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

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

Answer = TypeVar("Answer")


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
        return self._ask("POST", JOBS_URL, CreatedJob, spec)

    @override
    def begin_trial(self, job_id: str, key: str) -> NewTrial:
        return self._ask("POST", _path(JOB_TRIALS_URL, job_id), NewTrial, key=key)

    @override
    def report(self, result: TrainingResult) -> ReportResponse:
        return self._ask("POST", REPORT_URL, ReportResponse, result)

    @override
    def heartbeat(self, trial: TrialId) -> None:
        self._ask("POST", HEARTBEAT_URL, object, trial)

    @override
    def end_trial(self, end: EndTrial) -> None:
        self._ask("PATCH", TRIALS_URL, object, end)

    @override
    def close(self) -> None:
        self._http.close()

    # The methods of a `Store` that `bso` uses.

    def summaries(self) -> list[dict[str, Any]]:
        """The reply to `GET /jobs`."""
        return self._ask("GET", JOBS_URL, list[dict[str, Any]], field="gpu_model")

    def details(self, job_id: str) -> dict[str, Any]:
        """The reply to `GET /jobs/{job_id}`."""
        path = _path(f"{JOBS_URL}/{{job_id}}", job_id)
        return self._ask("GET", path, dict[str, Any], field="trials")

    def delete(self, job_id: str) -> None:
        """Deletes a job and its trials."""
        self._ask("DELETE", _path(f"{JOBS_URL}?job_id={{job_id}}", job_id), object)

    def release(self, job_id: str) -> list[int]:
        """Makes excluded sizes available again, and returns them."""
        path = _path(RELEASE_URL, job_id)
        return self._ask("POST", path, dict[str, list[int]], field="released")["released"]

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: BaseModel | None = None,
        *,
        key: str | None = None,
        field: str = "",
    ) -> Answer:
        """Sends a request; returns the reply, from JSON.

        Args:
            key: So that it may be repeated.
            field: What the reply, or each of its items, has.

        Raises:
            ZeusBSORuntimeError: It is refused, or there is no such reply.
        """
        content = None if body is None else body.model_dump_json()
        headers = None if key is None else {IDEMPOTENCY_HEADER: key}
        try:
            answer = self._http.request(method, path, content=content, headers=headers)
        except (httpx.HTTPError, RuntimeError) as error:  # the latter: it is closed
            raise ZeusBSORuntimeError(
                f"the batch size server at {self._url} cannot be reached "
                f"({type(error).__name__}: {error}); start it, or give another URL"
            ) from None
        if not answer.is_success:
            raise ZeusBSORuntimeError(
                f"the batch size server at {self._url} refused {method} {path} with status "
                f"{answer.status_code}: {detail(answer)}",
                answer.status_code,
            )
        try:
            result = TypeAdapter(kind).validate_json(answer.content)
            items: list[Any] = result if isinstance(result, list) else [result]
            if field and not all(field in item for item in items):
                raise ValueError(field)
        except ValueError:
            raise ZeusBSORuntimeError(
                f"{self._url} answered {path} as no batch size server does; check the URL", 422
            ) from None
        return result
