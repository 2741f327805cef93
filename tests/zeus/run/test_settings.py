"""The environment variables by which the master configures the loader."""

from __future__ import annotations

import math

import pytest

from zeus.run.settings import Settings

NEEDED = {"ZEUS_TARGET_METRIC": "0.5"}


def test_defaults_are_those_of_the_reference() -> None:
    assert Settings.from_env(NEEDED) == Settings(
        target_metric=0.5,
        log_dir="zeus_log",
        job_id="zeus",
        cost_thresh=math.inf,
        eta_knob=0.5,
        monitor_path="zeus_monitor",
        profile_params=(10, 40),
        use_optimal_pl=True,
    )


def test_settings_are_read_back() -> None:
    settings = Settings(
        target_metric=1 / 3,
        log_dir="/logs",
        job_id="rec01+try02",
        cost_thresh=12345.678901234567,
        eta_knob=0.1,
        monitor_path="/m",
        profile_params=(0, 7),
        use_optimal_pl=False,
    )
    assert Settings.from_env(settings.to_env()) == settings
    assert settings.to_env()["ZEUS_PROFILE_PARAMS"] == "0,7"
    assert settings.to_env()["ZEUS_USE_OPTIMAL_PL"] == "False"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("FALSE", False), ("False", False)])
def test_truth_in_any_case(text: str, value: bool) -> None:
    assert Settings.from_env({**NEEDED, "ZEUS_USE_OPTIMAL_PL": text}).use_optimal_pl is value


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "ZEUS_TARGET_METRIC is missing"),
        ({"ZEUS_TARGET_METRIC": "high"}, "ZEUS_TARGET_METRIC: must be a number, not 'high'"),
        ({"ZEUS_TARGET_METRIC": "nan"}, "must be a number"),
        (
            {**NEEDED, "ZEUS_ETA_KNOB": "1.5"},
            "ZEUS_ETA_KNOB: .* less than or equal to 1, not '1.5'",
        ),
        ({**NEEDED, "ZEUS_COST_THRESH": "much"}, "ZEUS_COST_THRESH: must be a number"),
        (
            {**NEEDED, "ZEUS_USE_OPTIMAL_PL": "1"},
            "ZEUS_USE_OPTIMAL_PL: .* a valid boolean, not '1'",
        ),
        ({**NEEDED, "ZEUS_JOB_ID": "../x"}, "ZEUS_JOB_ID: .* begins the names of files"),
        ({**NEEDED, "ZEUS_PROFILE_PARAMS": "1.0,4.0"}, "two whole numbers of iterations"),
        ({**NEEDED, "ZEUS_PROFILE_PARAMS": "10"}, "two whole numbers of iterations"),
        ({**NEEDED, "ZEUS_PROFILE_PARAMS": "10,0"}, "two whole numbers of iterations"),
    ],
)
def test_invalid_settings_are_reported_in_one_sentence(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.from_env(env)
