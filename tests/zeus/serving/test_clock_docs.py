"""Runs the code of docs/serve/clocks.md."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import snippets
from tests.support import running_daemon, wait_for

PAGE = Path(__file__).resolve().parents[3] / "docs/serve/clocks.md"


def test_the_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = snippets.of(PAGE)
    with running_daemon("--simulate", "v100-pcie", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        with daemon.client() as client:
            uuids = [gpu.uuid for gpu in client.node().gpus]
        now = time.monotonic()
        control = block.run(
            gpu_uuids=uuids,
            begin_s=now - 0.01,
            end_s=now,
            prefill_tokens=0,
            decode_sequences=1,
            decode_context=100,
            waiting=0,
            backlog_tokens=0,
            oldest_wait_s=0.0,
            ttft_s=0.1,
            tpot_s=0.01,
        )["control"]
        try:
            wait_for(lambda: control.status().working, "the dry run to begin")
            assert control.status().wanted_mhz == 1380
        finally:
            control.close()
