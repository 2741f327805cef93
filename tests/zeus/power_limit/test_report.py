"""How a report shows estimates."""

from __future__ import annotations

import pytest

from tests.support import in_a_notebook
from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.report import Report

HIGHEST = LimitEstimate(300_000, 1.0, 200.0, 0.01, 0.01, 40)


@pytest.mark.parametrize(
    ("time_s", "energy_j", "words"),
    [
        (1.05, 174.2, "takes 12.9 % less energy (±1.4 %) and 5.0 % more time (±0.8 %)"),
        (0.99, 225.8, "takes 12.9 % more energy (±1.8 %) and 1.0 % less time (±0.8 %)"),
    ],
)
def test_more_is_more_and_less_is_less(time_s: float, energy_j: float, words: str) -> None:
    chosen = LimitEstimate(200_000, time_s, energy_j, 0.01, 0.01, 40, 0.008, 0.016)
    report = Report((HIGHEST, chosen), chosen, 90, "", 200.0)
    assert report.sentence == (
        f"At 200 W instead of 300 W a step {words}; the search took 90 steps. In force: 200 W."
    )
    assert "-12.9" not in str(report)
    first, last = str(report).splitlines()[1:3]
    assert first == "      300     1000.00 ± 10.00     200.000 ± 2.000        40"
    assert last.startswith(f"      200 {1000 * time_s:11.2f} ± {10 * time_s:5.2f}")
    assert last.endswith(f"{energy_j:.3f} ± {energy_j / 100:.3f}        40  <- chosen")


def test_without_a_choice_the_report_says_why() -> None:
    report = Report((HIGHEST,), None, 12, "GPU 0 is <lost>", None)
    assert report.sentence.endswith(
        "The search ended: GPU 0 is <lost>. This optimizer holds no limit now."
    )
    report = Report((HIGHEST,), None, 12, "GPU 0 is <lost>", None, 300.0)
    assert report.sentence.endswith("The search ended: GPU 0 is <lost>. 300 W is being set.")
    html = in_a_notebook(report)
    assert "&lt;lost&gt;" in html
    assert "<lost>" not in html


def test_the_highest_limit_is_the_best_or_stays_for_a_reason() -> None:
    reason = "no limit lowers the power that this job draws"
    stays = Report((HIGHEST,), HIGHEST, 20, reason, 300.0)
    assert stays.sentence == (
        f"The highest limit, 300 W, stays, because {reason}; the search took 20 steps. "
        "In force: 300 W."
    )
    assert (
        "300 W, is the best; the search took 20 steps"
        in Report((HIGHEST,), HIGHEST, 20, "", 300.0).sentence
    )
