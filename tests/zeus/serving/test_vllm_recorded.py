"""The vLLM plugins, with replayed calls of a real vLLM 0.32.

`python benchmarks/serving_vllm.py record` wrote the file: eleven requests of a small model on the
CPU, with chunked prefill, preemption, a prefix cache, two aborts and one with two sequences.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.zeus.serving.batches import Recorded
from zeus.serving import recorder
from zeus.serving.vllm import probe, stats

FILE = Path(__file__).with_name("vllm_0_32.jsonl")
CACHED = 256
"""Tokens of the prompt of `again` that vLLM found in its cache."""


class Clock:
    """A clock at the instant of the replayed event."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Played:
    """A scheduler and a front end that replay a recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = [json.loads(line) for line in FILE.read_text().splitlines()]
        self.said = lines.pop()
        self.events = lines
        clock = Clock()
        self.probed, self.logged = Recorded(), Recorded()
        played = self

        class Scheduler:
            """As vLLM's, with the events' answers."""

            def __init__(self) -> None:
                self.requests: dict[str, Any] = {}

            def add_request(self, request: Any) -> None:
                self.requests[request.request_id] = request

            def schedule(self, throttle_prefills: bool = False) -> Any:
                event = played.event
                for one, computed in event["after"].items():
                    self.requests[one].num_computed_tokens = computed
                clock.now_ns = event["at_ns"]
                return SimpleNamespace(
                    num_scheduled_tokens=event["tokens"], finished_req_ids=set(event["finished"])
                )

            def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
                for one in played.event["gone"]:
                    del self.requests[one]
                return {}

        failures: list[Any] = []
        monkeypatch.setattr(recorder.log, "warning", lambda *failure: failures.append(failure))
        monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic_ns=clock))
        monkeypatch.setattr(probe, "Recorder", lambda *_, **__: self.probed)
        monkeypatch.setattr(stats, "Recorder", lambda *_: self.logged)
        monkeypatch.setenv("ZEUS_SERVING", "stats")
        assert probe.install(Scheduler)
        scheduler = Scheduler()
        logger = stats.EnergyStatLogger(SimpleNamespace())
        for event in lines:
            self.event = event
            if event["event"] == "arrived":
                clock.now_ns = event["at_ns"]
                scheduler.add_request(
                    SimpleNamespace(
                        request_id=event["request"],
                        num_prompt_tokens=event["prompt"],
                        num_computed_tokens=0,
                    )
                )
            elif event["event"] == "scheduled":
                clock.now_ns = event["begin_ns"]
                scheduler.schedule(False)
            elif event["event"] == "updated":
                clock.now_ns = event["ended_ns"]
                scheduler.update_from_output(None, None)
            else:
                clock.now_ns = event["at_ns"]
                logger.record(
                    SimpleNamespace(num_running_reqs=event["running"]),
                    SimpleNamespace(
                        finished_requests=[SimpleNamespace(**one) for one in event["finished"]]
                    ),
                )
        clock.now_ns = 2**62  # the front end waits for nothing any more
        logger.record(SimpleNamespace(num_running_reqs=0), SimpleNamespace(finished_requests=[]))
        assert not failures

    def names(self) -> list[str]:
        """The ids that callers use for the sequences."""
        found = []
        for name, one in self.said["requests"].items():
            several = one["sequences"] > 1
            found += [f"{n}_{name}" for n in range(one["sequences"])] if several else [name]
        return sorted(found)


@pytest.fixture(scope="module")
def played() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Played(patch)


def _tokens(recorded: Recorded) -> tuple[Counter[str], Counter[str]]:
    prefill: Counter[str] = Counter()
    decode: Counter[str] = Counter()
    for ids, prefills, tokens, _ in recorded.steps:
        assert len(set(ids)) == len(ids)
        for name, is_prefill, count in zip(ids, prefills, tokens, strict=True):
            (prefill if is_prefill else decode)[name] += count
    return prefill, decode


def test_every_step_has_the_rows_that_vllm_says(played: Played) -> None:
    said = [
        (contexts + decodes, prompt + generated)
        for contexts, prompt, decodes, generated in played.said["steps"]
    ]
    found = played.probed
    assert [(len(ids), sum(tokens)) for ids, _, tokens, _ in found.steps] == said
    assert all(begin < end for begin, end in found.instants)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found.instants))


def test_requests_have_the_names_that_callers_gave_them(played: Played) -> None:
    recorded = played.probed
    assert sorted(recorded.finished) == played.names() == sorted(recorded.arrivals)
    assert {recorded.arrivals[name] for name in ("a", "b")} == {30, 300}


def test_a_request_computes_its_prompt_once_and_all_tokens_but_the_first(played: Played) -> None:
    prefill, decode = _tokens(played.probed)
    preempted = {
        one["request_id"]
        for event in played.events
        for one in event.get("finished", ())
        if isinstance(one, dict) and one["num_preemptions"]
    }
    assert preempted == {"twice", "h"}
    for name, one in played.said["requests"].items():
        if not one["aborted"] and name not in preempted:
            computed = one["prompt"] - (CACHED if name == "again" else 0)
            assert (prefill[name], decode[name]) == (computed, one["asked"] - 1)
    assert decode["h"] + prefill["h"] > 350 + 39  # computed once more after the preemption
    aborted = {name: prefill[name] + decode[name] for name in ("gone-1", "gone-2")}
    assert aborted["gone-1"] < 200 + 89
    assert sum(aborted.values()) > 0


def test_the_front_end_alone_finds_the_same_rows(played: Played) -> None:
    exact, found = played.probed, played.logged
    assert len(found.steps) == len(exact.steps)
    prefill, decode = _tokens(found)
    theirs, own = _tokens(exact)
    for name in ("a", "b", "c", "d", "e", "again", "f", "g"):
        assert (round(prefill[name]), round(decode[name])) == (theirs[name], own[name])
    # vLLM does not report the end of aborted requests, and gives all sequences the same name.
    assert sorted(found.finished) == sorted(
        re.sub("^0_", "", name) for name in played.names() if "gone" not in name
    )
