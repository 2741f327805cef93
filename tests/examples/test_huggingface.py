"""The Hugging Face examples, as a user runs them, at a zeusd with simulated GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.programs import TORCHRUN
from tests.preloaded import Preloaded
from tests.support import RunningDaemon, running_daemon

EXAMPLES = Path(__file__).parents[2] / "examples" / "huggingface"
SEARCH = ["--zeus_warmup_steps", "1", "--zeus_profile_steps", "4", "--zeus_pl_step", "50"]
TRAINING = ["--per_device_train_batch_size", "2", "--use_cpu", "--disable_tqdm", "true"]
LOGGING = ["--logging_steps", "5", "--report_to", "tensorboard", "--save_strategy", "no"]
PRELOADED = ("torch.distributed.launcher", "transformers.trainer", "datasets", "trl", "peft")
OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
TINY_GEMMA = Path(__file__).with_name("tiny_gemma.py")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100:setter_ms=0", gpus=2) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """Runs programs for which Hugging Face's packages have been imported."""
    started = Preloaded(*PRELOADED, env=OFFLINE)
    yield started.python
    started.close()


def run(daemon: RunningDaemon, *command: str, **env: str) -> str:
    """Runs an example to its end. Returns what it printed."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "ZEUSD_SOCK_PATH": daemon.socket,
            **OFFLINE,
            **env,
        },
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def assert_given_back(daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        assert client.leases() == []


def printed_as_shown(out: str) -> None:
    """The report has the shape of that on the page."""
    page = (EXAMPLES / "README.md").read_text()
    shown = page[page.index("limit (W)") : page.index("Times and energies are of")]
    header, *_ = shown.splitlines()
    assert header in out
    number = r"\d+(\.\d+)?"
    row = rf"^ +\d+ +{number} ± +{number} +{number} ± +{number} +\d+(  <- chosen)?$"
    lines = [line for line in shown.splitlines()[1:] if "±" in line and line[0] == " "]
    assert all(re.match(row, line) for line in lines)
    assert len(re.findall(row, out, re.MULTILINE)) > 1, out


def text(path: Path) -> Path:
    path.write_text(
        "A limit that is lower costs time, and one that is higher costs energy.\n" * 200
    )
    return path


def test_causal_language_model_in_two_processes(
    python: str, daemon: RunningDaemon, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    out = run(
        daemon,
        *(python, "-m", *TORCHRUN, "--nproc_per_node", "2"),
        str(EXAMPLES / "run_clm.py"),
        *("--train_file", str(text(tmp_path / "text.txt")), "--block_size", "32"),
        *("--output_dir", str(tmp_path / "out"), "--max_steps", "80"),
        *("--eval_strategy", "steps", "--eval_steps", "10", "--zeus_profile_path", str(profile)),
        # The time of a step on a busy machine can hide what limits do: then the adaptive search
        # keeps nothing but the highest.
        *("--zeus_search", "exhaustive"),
        *(*SEARCH, *TRAINING, *LOGGING),
        ZEUS_MAX_SLOWDOWN="1.2",
    )
    assert out.count("<- chosen") == 1
    printed_as_shown(out)
    assert len(json.loads(profile.read_text())["measurements"]) == 4
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert_given_back(daemon)


def test_supervised_fine_tuning_in_4_bits(
    python: str, daemon: RunningDaemon, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    run(daemon, python, str(TINY_GEMMA), str(model))
    chat = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is what it is."},
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(80)))
    out = run(
        daemon,
        python,
        str(EXAMPLES / "run_gemma_sft_qlora.py"),
        *("--model_name_or_path", str(model), "--train_file", str(chats), "--max_slowdown", "1.2"),
        *("--output_dir", str(tmp_path / "out"), "--max_steps", "80", "--max_length", "64"),
        *("--bf16", "false", *SEARCH, *TRAINING, *LOGGING),
        CUDA_VISIBLE_DEVICES="0",
    )
    assert "<- chosen" in out
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert_given_back(daemon)
