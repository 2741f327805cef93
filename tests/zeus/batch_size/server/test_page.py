"""The page, in a real browser."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page, browser
from tests.zeus.batch_size.server.running import RunningServer, running_server
from tests.zeus.batch_size.server.training import result, spec, train
from zeus.optimizer.batch_size.common import EndTrial, NewTrial, TrialId
from zeus.optimizer.batch_size.http import HttpTrials

pytestmark = pytest.mark.needs("chromium")

EVIL = "job <img src=x onerror=\"document.title='owned'\"><script>document.title='owned'<"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        found.see(1400, 1500)
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One whose changes need a token."""
    with running_server(tmp_path_factory.mktemp("server"), TOKEN="secret") as found:
        yield found


@pytest.fixture
def trials(server: RunningServer) -> Iterator[HttpTrials]:
    """Its jobs and trials: none yet."""
    made = HttpTrials(server.url, "secret")
    for job in made.summaries():
        made.delete(job["job_id"])
    yield made
    made.close()


def text(page: Page, selector: str) -> str:
    found: str = page.run(f"document.querySelector({selector!r}).innerText")
    return found


def opened(page: Page, server: RunningServer, job_id: str = "") -> None:
    page.open("about:blank")
    page.open(server.url + (f"/#{job_id}" if job_id else ""))


def begun(trials: HttpTrials) -> NewTrial:
    return trials.begin_trial("job", uuid.uuid4().hex)


def trained(trials: HttpTrials, runs: int) -> None:
    for _ in range(runs):
        train(trials, begun(trials))


def test_it_fits_a_phone(page: Page, server: RunningServer, trials: HttpTrials) -> None:
    trials.register(spec("job" + "-with-a-name-that-is-longer-than-any-phone-is-wide" * 3))
    trials.register(spec(policy="pruning-gts"))
    trained(trials, 2)
    page.see(390, 844)
    opened(page, server, "job")
    page.wait_for("document.querySelectorAll('#trials tbody tr').length === 2")
    assert page.run("document.documentElement.scrollWidth") == 390
    # Nothing sticks out but what can be scrolled to, and the plots' letters can be read.
    wide = (
        "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll') &&"
        " one.getBoundingClientRect().right > 390).map(one => one.outerHTML)"
    )
    assert page.run(wide) == []
    letters = "document.querySelector('#posterior text').getBoundingClientRect().height"
    assert page.run(letters) > 10
    page.see(1400, 1500)


def test_the_page_shows_a_job_as_it_continues(
    page: Page, server: RunningServer, trials: HttpTrials
) -> None:
    opened(page, server)
    page.wait_for("document.querySelector('#none').innerText.includes('No job has registered')")
    trials.register(spec(policy="pruning-gts"))
    page.wait_for("document.querySelector('#title').innerText.startsWith('job')")
    page.wait_for("document.querySelector('#posterior').textContent === 'No run has ended yet.'")
    trained(trials, 4)
    page.wait_for("document.querySelectorAll('#trials tbody tr').length === 4")
    assert "best batch size\n32" in text(page, "#tiles")
    assert "−23.1 % on the default 64" in text(page, "#tiles")
    # 64, 32 and 16 have reached the target; 8 was too costly.
    assert page.run("document.querySelectorAll('#posterior .mean').length") >= 3
    assert page.run("document.querySelector('#posterior .mean.best').dataset.size") == "32"
    assert page.run("document.querySelectorAll('#regret circle.converged').length") == 3
    assert page.run("document.querySelectorAll('#regret circle.stopped').length") == 1
    assert page.run("document.querySelector('#regret .line').points.length") == 4
    rows = page.run("[...document.querySelectorAll('#trials tbody tr')].map(r => r.innerText)")
    assert rows[0].startswith("4\t8\tstopped early, too expensive")
    assert rows[-1].startswith("1\t64\treached the target\t4\t0.5\t")
    assert "1.3 kJ" in rows[-1]
    best = page.run("document.querySelector('#sizes tr.best').innerText")
    assert best.startswith("32\t1 kJ")
    # Live: a run begins, and reports.
    running = begun(trials)
    page.wait_for("document.querySelectorAll('#regret circle.running').length === 1")
    assert "1 running" in text(page, "#title")
    trials.report(result(running, 2, 1000.0))
    page.wait_for("document.querySelector('#trials tbody tr').innerText.includes('500 J')")
    # The page shows what is under the mouse.
    x, y = page.run(
        "(() => { const box = document.querySelectorAll('#posterior .hit')[2]"
        ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + 50]; })()"
    )
    page.move(x, y)
    page.wait_for("!document.querySelector('#posterior-tip').classList.contains('gone')")
    assert "batch size 32" in text(page, "#posterior-tip")


def test_sizes_that_are_kept_out_are_released_with_the_token(
    page: Page, server: RunningServer, trials: HttpTrials
) -> None:
    trials.register(spec())
    trial = begun(trials).model_dump(include=set(TrialId.model_fields))
    trials.end_trial(EndTrial(**trial, reason="oom"))
    opened(page, server, "job")
    page.wait_for("document.querySelector('#why')?.innerText.includes('does not suffice for 64')")
    assert "out of GPU memory" in text(page, "#trials")
    page.click("#release")
    page.wait_for("document.querySelector('#said').innerText.includes('asks for a token')")
    page.type("#token", "secret")
    page.click("#release")
    page.wait_for("document.querySelector('#kept-out').classList.contains('gone')")
    assert not any(one["excluded"] for one in trials.details("job")["estimates"])


def test_metadata_of_jobs_is_never_executed(
    page: Page, server: RunningServer, trials: HttpTrials
) -> None:
    name = EVIL.replace("/", "")
    trials.register(spec(name, gpu_model=EVIL))
    opened(page, server)
    page.wait_for("document.querySelector('#title')?.innerText.includes('<img src=x')")
    assert name in text(page, "#title")
    assert name in text(page, "#jobs a b")
    assert EVIL in text(page, "#about")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title") == "Batch size optimizer"
    # The policy alone would be enough.
    page.run(
        "document.body.insertAdjacentHTML('beforeend', "
        '\'<img src="data:," onerror="window.ran = 1">\')'
    )
    page.run("new Promise((done) => setTimeout(done, 200))")
    assert page.run("window.ran") is None


def test_jobs_are_picked_and_filtered(
    page: Page, server: RunningServer, trials: HttpTrials
) -> None:
    for n in range(9):
        trials.register(spec(f"job-{n}", gpu_model=f"GPU {n}"))
    opened(page, server)
    page.wait_for("document.querySelectorAll('#jobs a').length === 9")
    page.click("#jobs a:nth-child(4)")
    page.wait_for("document.querySelector('#title').innerText.startsWith('job-3')")
    page.type("#filter", "gpu 7")
    page.wait_for("document.querySelectorAll('#jobs a').length === 1")
    page.click("#jobs a")
    page.wait_for("document.querySelector('#title').innerText.startsWith('job-7')")
    page.run("location.hash = 'gone'")
    page.wait_for("document.querySelector('#none').innerText.includes('there is no job gone')")


def test_reading_with_a_token_and_a_server_that_is_away(page: Page, tmp_path: Path) -> None:
    with running_server(tmp_path, TOKEN="secret", READ_TOKEN="look") as server:
        trials = HttpTrials(server.url, "secret")
        trials.register(spec())
        trials.close()
        opened(page, server)
        page.wait_for("document.querySelector('#away').innerText.includes('asks for a token')")
        page.type("#token", "look")
        page.wait_for("document.querySelector('#title').innerText.startsWith('job')")
        page.wait_for("document.querySelector('#away').innerText === ''")
        server.kill()
        page.wait_for("document.querySelector('#away').innerText.includes('no answer')")
        server.start_again()
        page.wait_for("document.querySelector('#away').innerText === ''")
        assert text(page, "#title").startswith("job")
