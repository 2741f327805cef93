"""Metrics of clock control."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from typing import cast

import pytest
from click import ClickException
from prometheus_client import generate_latest

from tests.support import free_port
from zeus.serving.clock_command import serve_metrics
from zeus.serving.clock_control import ClockControl, ClockStatus
from zeus.serving.metrics import CLOCKS, Collector


class Control:
    """Has a status."""

    def status(self) -> ClockStatus:
        return ClockStatus(
            wanted_mhz=1140,
            set_mhz=1260,
            effective_mhz=math.nan,
            working=True,
            trouble="",
            changes=7,
            escapes=2,
            ttft_violations=3,
            tpot_violations=4,
            predicted_tpot_s=0.02,
            predicted_ttft_s=math.inf,
            seen_tpot_s=0.021,
            seen_ttft_s=0.1,
            saving=0.31,
            needed_mhz=1380.0,
            needed_w=412.5,
        )


def test_metrics() -> None:
    collector = Collector("llama", CLOCKS, lambda: {"0": Control().status()})
    text = generate_latest(collector.registry).decode()
    labels = 'engine="0"'
    for line in (
        f'zeus_serving_clock_hertz{{{labels},kind="wanted",model_name="llama"}} 1.14e+09',
        f'zeus_serving_clock_hertz{{{labels},kind="set",model_name="llama"}} 1.26e+09',
        f'zeus_serving_clock_hertz{{{labels},kind="needed",model_name="llama"}} 1.38e+09',
        f'zeus_serving_needed_power_watts{{{labels},model_name="llama"}} 412.5',
        f'zeus_serving_predicted_seconds{{{labels},model_name="llama",slo="tpot"}} 0.02',
        f'zeus_serving_slo_violations_total{{{labels},model_name="llama",slo="ttft"}} 3.0',
        f'zeus_serving_escapes_total{{{labels},model_name="llama"}} 2.0',
        f'zeus_serving_clock_changes_total{{{labels},model_name="llama"}} 7.0',
        f'zeus_serving_energy_saving_ratio{{{labels},model_name="llama"}} 0.31',
    ):
        assert line in text
    assert "effective" not in text.replace("effective GPU", ""), "not known: no series"


def test_metrics_are_served_by_names_of_this_machine_only() -> None:
    port = free_port()
    serve_metrics(cast("ClockControl", Control()), port, "llama", "0")
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url) as answer:
        assert b"zeus_serving_clock_changes_total" in answer.read()
    other = urllib.request.Request(url, headers={"Host": "page.example.com"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(other)
    with pytest.raises(ClickException, match=f"cannot listen on port {port}"):
        serve_metrics(cast("ClockControl", Control()), port, "llama", "0")
