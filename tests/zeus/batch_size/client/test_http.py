"""Runs whose trials a server keeps."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import free_port, wait_for
from tests.zeus.batch_size.client.conftest import Optimize
from tests.zeus.batch_size.client.fakes import Between, FakeMonitor, epochs, job
from tests.zeus.batch_size.server.running import RunningServer, running_server
from zeus.optimizer.batch_size.common import (
    EndTrial,
    JobSpecFromClient,
    TrainingResult,
    TrialId,
    Trials,
)
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.http import HttpTrials
from zeus.utils.http import detail

TOKEN = "a secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), TOKEN=TOKEN) as running:
        yield running


def kept_by(server: RunningServer, job_id: str) -> list[dict[str, Any]]:
    """A job's trials."""
    found: list[dict[str, Any]] = server.http.get(f"/jobs/{job_id}").json()["trials"]
    return found


@pytest.fixture
def trials(server: RunningServer) -> Iterator[HttpTrials]:
    """The way there."""
    made = HttpTrials(server.url, TOKEN)
    yield made
    made.close()


def spec(job_id: str, **more: Any) -> JobSpecFromClient:
    """A job on one V100."""
    gpu = {"max_power": 250.0, "number_of_gpus": 1, "gpu_model": "V100"}
    given = job(job_id=job_id, job_id_prefix=job_id[:3], **more).model_dump()
    return JobSpecFromClient.model_validate({**given, **gpu})


def test_requests_may_be_repeated(trials: HttpTrials, server: RunningServer) -> None:
    made = [trials.register(spec("repeated")) for _ in range(2)]
    assert made[0] == made[1]
    begun = [trials.begin_trial("repeated", "key") for _ in range(2)]
    assert begun[0] == begun[1]
    assert begun[0].batch_size == 64
    assert begun[0].lease_s
    result = TrainingResult(
        job_id="repeated",
        batch_size=64,
        trial_number=1,
        time=2,
        energy=300,
        metric=float("nan"),
        current_epoch=1,
    )
    for _ in range(2):
        answer = trials.report(result)
        assert not answer.stop_train
        assert answer.predicted_cost == 600
    trial = TrialId(job_id="repeated", batch_size=64, trial_number=1)
    trials.heartbeat(trial)
    again = trials.begin_trial("repeated", "key")
    assert (again.current_epoch, again.energy, again.reason) == (1, 300, None)
    for _ in range(2):
        trials.end_trial(EndTrial(**trial.model_dump(), reason="oom"))
    assert trials.begin_trial("repeated", "key").reason == "oom"
    assert trials.begin_trial("repeated", "another key").batch_size == 32
    assert trials.release("repeated") == [64, 128]
    assert len(kept_by(server, "repeated")) == 2


@pytest.mark.parametrize("name", ["with spaces", "größer", "100%", "100%41", "a:b@c"])
def test_jobs_may_have_any_name(trials: Trials, name: str) -> None:
    trials.register(spec(name))
    begun = trials.begin_trial(name, "key")
    assert begun.job_id == name
    trials.heartbeat(TrialId(job_id=name, batch_size=64, trial_number=begun.trial_number))


def refused(status: int, ask: Any, *arguments: Any) -> str:
    """The sentence of a refusal."""
    with pytest.raises(ZeusBSORuntimeError) as error:
        ask(*arguments)
    assert error.value.status == status
    assert "\n" not in error.value.message
    return error.value.message


def test_a_list_of_faults_is_one_line() -> None:
    faults = [{"loc": ["body", "jobs", 0], "msg": "Field\n required"}, {"msg": "wrong"}, "other"]
    assert detail(httpx.Response(422, json={"detail": faults})) == (
        "jobs.0: Field required; wrong; other"
    )
    assert detail(httpx.Response(502, text="bad " * 200)) == ("bad " * 125)[:500]


def test_refusals_say_why(trials: Trials, server: RunningServer) -> None:
    trials.register(spec("refused"))
    assert "beta_knob" in refused(409, trials.register, spec("refused", beta_knob=3))
    assert "no job" in refused(404, trials.begin_trial, "unknown", "key")
    nobody = TrialId(job_id="refused", batch_size=64, trial_number=9)
    assert "no trial 9" in refused(404, trials.heartbeat, nobody)
    assert "a key has" in refused(422, trials.begin_trial, "refused", "")
    for token in (None, "", "another"):
        other = HttpTrials(server.url, token)
        assert "ZEUS_BSO_TOKEN" in refused(401, other.register, spec("refused"))
        other.close()
    gone = HttpTrials(f"http://127.0.0.1:{free_port()}")
    assert "start it" in refused(0, gone.register, spec("refused"))
    gone.close()
    assert "cannot be reached" in refused(0, gone.register, spec("refused"))


@pytest.mark.parametrize(
    "environment",
    [
        ("ALL_PROXY", "socks4://proxy:1080"),
        ("SSL_CERT_FILE", "/nonexistent/ca.pem"),
        ("ZEUS_BSO_TOKEN", "not ascii: \N{SNOWMAN}"),
        ("NO_PROXY", "[::1]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("url", ["http://master:7788", "https://master:7788"])
def test_an_environment_that_rules_out_the_server_is_named(
    environment: tuple[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv(*environment)
    with pytest.raises(ZeusBSOConfigError, match=rf"{url} .*ALL_PROXY.*SSL_CERT_FILE"):
        HttpTrials(url)


def test_without_a_proxy_a_plain_server_needs_no_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent/ca.pem")
    HttpTrials("http://master:7788").close()
    with pytest.raises(ZeusBSOConfigError, match="SSL_CERT_FILE"):
        HttpTrials("https://master:7788")


class _Another(http.server.BaseHTTPRequestHandler):
    """A server of something else, which likes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'[{"job_id": "of pipelines"}]')

    def log_message(self, *arguments: Any) -> None:
        pass


def test_another_http_server_is_not_accepted() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Another) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        trials = HttpTrials(f"http://127.0.0.1:{other.server_port}")
        assert "check the URL" in refused(422, trials.register, spec("other"))
        assert "as no batch size server does" in refused(422, trials.summaries)
        trials.close()
        other.shutdown()
        thread.join()


def test_a_run_with_a_server_that_is_killed_meanwhile(
    optimize: Optimize,
    kept: Between,
    monitor: FakeMonitor,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ZEUS_BSO_TOKEN", TOKEN)
    optimizer = optimize(server_url=server.url, store=None, job_id="cifar-killed")
    assert optimizer.get_batch_size() == 64
    with optimizer:
        epochs(optimizer, monitor, 0.1)
        assert kept_by(server, "cifar-killed")[0]["epochs"] == 1
        server.kill()
        epochs(optimizer, monitor, 0.1, 0.1)
        assert caplog.text.count("reports are sent later") == 1
        server.start_again()
        wait_for(lambda: kept_by(server, "cifar-killed")[0]["epochs"] == 3, "the newest report")
        epochs(optimizer, monitor, 0.9)
    assert optimizer.converged
    (trial,) = kept_by(server, "cifar-killed")
    assert (trial["status"], trial["converged"], trial["energy_j"]) == ("ok", True, 400)
    assert kept.asked == []  # no file beside it
