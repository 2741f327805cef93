"""The page, in a real browser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page, browser
from tests.support import wait_for
from tests.zeus.pipeline_frequency.server.running import (
    RunningServer,
    Training,
    frontier,
    job_body,
    ok,
    rank_bodies,
    register,
    running_server,
)

pytestmark = pytest.mark.needs("chromium")

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        found.see(1280, 1500)
        yield found


@contextlib.contextmanager
def serving(tmp_path: Path, **settings: str) -> Iterator[RunningServer]:
    frontier().write(tmp_path / "plans")
    args = json.dumps({"solution_path": str(tmp_path / "plans")})
    with running_server(tmp_path, {"SCHEDULER_ARGS": args, **settings}) as server:
        yield server


def text(page: Page, selector: str) -> str:
    found: str = page.run(f"document.querySelector({selector!r}).innerText")
    return found


def test_a_person_chooses_a_plan_by_clicking_and_all_ranks_get_it(
    page: Page, tmp_path: Path
) -> None:
    with serving(tmp_path, TOKEN="secret") as server:
        server.http.headers["Authorization"] = "Bearer secret"
        training = Training(server.http, 2)
        with training.in_background():
            page.open(server.url)
            page.wait_for("document.querySelectorAll('#chart .dot').length === 20")
            page.click("#automatic")
            page.wait_for("document.querySelector('#said').innerText.includes('asks for a token')")
            page.type("#token", "secret")
            assert "plan in force\n19" in text(page, "#tiles")
            page.click("#chart .dot[data-plan='6']")
            assert "Plan 6" in text(page, "#confirm")
            assert "2.684 s" in text(page, "#confirm")
            tip = text(page, "#tip")
            assert "gap" in tip
            assert "changes an iteration" in tip
            assert training.plans() == {0: {19}, 1: {19}}  # not before it is confirmed
            page.click("#run")
            page.wait_for("document.querySelector('#said').innerText.startsWith('Plan 6 from')")
            wait_for(lambda: training.plans() == {0: {6}, 1: {6}}, "all ranks to run plan 6")
            page.wait_for("document.querySelector('#chart .force[data-plan=\"6\"]') !== null")
            page.wait_for("document.querySelector('#choice').innerText === 'Asked for: plan 6.'")
            page.type("#deadline", "2.5")
            page.click("#by-deadline button")
            wanted = frontier().by_deadline(2.5)
            wait_for(lambda: training.plans() == {0: {wanted}, 1: {wanted}}, "the deadline")
            page.type("#slowdown", "10")
            page.click("#by-slowdown button")
            wanted = frontier().by_max_slowdown(1.1)
            wait_for(lambda: training.plans() == {0: {wanted}, 1: {wanted}}, "the slowdown")
            page.click("#automatic")
            wait_for(lambda: training.plans() == {0: {19}, 1: {19}}, "the fastest again")
            page.wait_for("document.querySelector('#choice').innerText.startsWith('Automatic')")
        # At each switch all ranks changed between the same two iterations.
        assert len({tuple(ran) for ran in training.ran.values()}) == 1


def test_a_straggler_is_shown(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        training = Training(server.http, 3, {1: 1.3})
        with training.in_background(0.02):
            page.open(server.url)
            page.wait_for(
                "document.querySelector('#pipelines')?.innerText.includes('straggler, 30')"
            )
            page.wait_for("document.querySelector('#pipelines').innerText.includes('slowed down')")
            assert "pipelines 0, 2" in page.wait_for(
                "[...document.querySelectorAll('#force text')].map((one) => one.textContent).join()"
            )
            assert "1 straggler" in text(page, "#jobs")


def test_jobs_appear_and_their_metadata_is_never_executed(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        page.open(server.url)
        page.wait_for("document.querySelector('#none').innerText.includes('No job')")
        first = ok(server.http.post("/register_job", json=job_body(job_metadata="first")))
        ok(server.http.post(f"/register_rank/{first}", json=rank_bodies()[0]))
        page.wait_for("document.querySelector('#problem').innerText === 'Waiting for ranks 1.'")
        job_id = register(server.http, job_metadata=EVIL)
        report = {"rank": 0, "iteration": 1, "version": 1}
        ok(server.http.post(f"/progress/{job_id}", json=report))
        page.wait_for("document.querySelectorAll('#jobs a').length === 2")
        page.click("#jobs a:first-child")
        page.wait_for("document.querySelector('#title')?.innerText.includes('<img src=x')")
        page.wait_for("document.querySelectorAll('#ranks tbody tr').length === 2")
        assert EVIL in text(page, "#title")
        assert EVIL in text(page, "#jobs a b")
        assert page.run("document.querySelectorAll('img').length") == 0
        assert page.run("document.title") == "Pipeline frequency optimizer"
        # The policy alone would be enough.
        page.run(
            "document.body.insertAdjacentHTML('beforeend', "
            '\'<img src="data:," onerror="window.ran = 1">\')'
        )
        page.run("new Promise((done) => setTimeout(done, 200))")
        assert page.run("window.ran") is None
        server.kill()
        page.wait_for("document.querySelector('#away').innerText.includes('no answer')")
        server.start_again()
        page.wait_for("document.querySelector('#away').innerText === ''")
        assert EVIL in text(page, "#title")
