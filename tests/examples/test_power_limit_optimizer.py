"""examples/power_limit_optimizer: each script, as its README starts it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.examples.programs import (
    EXAMPLES,
    environment,
    limits_set,
    limits_w,
    run,
    torchrun,
    with_torch,
)
from tests.support import RunningDaemon, running_daemon
from zeus.optimizer.power_limit.adaptive import AVERAGED_S, REACH

FOLDER = EXAMPLES / "power_limit_optimizer"
PROFILE_STEPS = 4
SMALL = [
    *("--image-size", "32", "--batch-size", "4", "--workers", "0", "--steps-per-epoch", "30"),
    *("--warmup-steps", "1", "--profile-steps", str(PROFILE_STEPS), "--pl-step", "50"),
]
TINY = ["--synthetic", "--arch", "tiny", *SMALL]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as running:
        yield running


def trained(command: list[str], epochs: list[str], daemon: RunningDaemon, *modules: Path) -> str:
    """Runs a script to its end. Returns its output; each epoch took time and energy."""
    ran = run(command, FOLDER, environment(daemon.socket, *modules))
    assert ran.returncode == 0, ran.stderr
    lines = re.findall(r"^epoch (\S+): loss \d.*, ([\d.]+) s, (\d+) J, ", ran.stdout, re.MULTILINE)
    assert [line[0] for line in lines] == epochs, ran.stdout
    assert all(float(seconds) > 0 and int(joules) > 0 for _, seconds, joules in lines)
    return ran.stdout


def chosen(output: str) -> str:
    """The limit that a run chose, as zeusd's journal has it."""
    found = re.search(r"^chosen: (\d+) W", output, re.MULTILINE)
    assert found is not None, output
    return f"{found[1]} W"


def test_one_gpu_is_given_the_limit_that_was_chosen_for_it(daemon: RunningDaemon) -> None:
    output = trained(
        with_torch("train_single.py", *TINY, "--gpu", "1", "--epochs", "2"), ["1/2", "2/2"], daemon
    )
    other, gpu = limits_set(daemon, 2)
    assert gpu[-1] == chosen(output)
    assert len(set(gpu)) > 1
    assert not other
    assert limits_w(daemon, 2) == [250, 250]


def same_for_all_ranks(daemon: RunningDaemon, command: list[str], *keep: str | Path) -> None:
    """Trains two ranks, which try the same limits and choose the same."""
    # The search ends in one epoch: the end of another stops each rank at a limit of its own.
    command = [*command, *TINY, *map(str, keep), "--epochs", "1", "--steps-per-epoch", "60"]
    output = trained(command, ["1/1"], daemon)
    first, second = limits_set(daemon, 2)
    assert first == second
    assert first[-1] == chosen(output)
    assert limits_w(daemon, 2) == [250, 250]


def test_ranks_whose_search_goes_on_in_another_epoch_choose_the_same_limit(
    daemon: RunningDaemon,
) -> None:
    command = [*torchrun(2, "train_dp.py"), *TINY, "--epochs", "2"]
    output = trained(command, ["1/2", "2/2"], daemon)
    first, second = limits_set(daemon, 2)
    assert set(first) == set(second)
    assert first[-1] == second[-1] == chosen(output)
    assert limits_w(daemon, 2) == [250, 250]


def test_data_parallel_ranks_choose_the_same_limit(daemon: RunningDaemon, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    same_for_all_ranks(daemon, torchrun(2, "train_dp.py"), "--profile-path", profile)
    highest, *lower = json.loads(profile.read_text())["measurements"]
    reach = 1.0 if highest["time"] / PROFILE_STEPS < AVERAGED_S else REACH
    # Where other work keeps this machine's cores from the job, no limit lowers what its GPUs draw.
    assert lower or highest["energy"] / highest["time"] / 2 < reach * 100


def test_ranks_that_shard_choose_the_same_limit_and_one_gpu_continues_from_them(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run" / "model.pt"
    same_for_all_ranks(daemon, torchrun(2, "train_fsdp.py"), "--checkpoint", checkpoint)

    # A run that knows its limit from the last one has it from the first step.
    profile = tmp_path / "profile.json"
    known = [{"power_limit": 250, "energy": 100.0, "time": 1.0}]
    known += [{"power_limit": 150, "energy": 70.0, "time": 1.05}]
    profile.write_text(json.dumps({"measurements": known}))
    keep = ["--resume", checkpoint, "--profile-path", profile]
    more = ["--epochs", "2", "--steps-per-epoch", "3"]
    output = trained(with_torch("train_single.py", *TINY, *keep, *more), ["2/2"], daemon)
    assert chosen(output) == "150 W"
    assert limits_set(daemon, 1)[0][-1] == "150 W"
    assert limits_w(daemon, 1) == [250]


def pictures(folder: Path) -> Path:
    """A few random images in ImageNet's layout, of two classes."""
    from PIL import Image

    for part in ("train", "val"):
        for kind, sigma in (("flat", 5), ("rough", 60)):
            (folder / part / kind).mkdir(parents=True)
            for number in range(16):
                picture = Image.effect_noise((60, 45), sigma).convert("RGB")
                picture.save(folder / part / kind / f"{number}.jpg")
    return folder


def test_an_image_folder_is_read_by_torchvision(daemon: RunningDaemon, tmp_path: Path) -> None:
    # Only a torchvision for CUDA is to be had. What of it is Python runs on any torch.
    minor = int(importlib.metadata.version("torch").split(".")[1])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps"]
    pip += ["--no-compile", "--disable-pip-version-check"]
    pip += ["--target", str(tmp_path / "site"), f"torchvision==0.{minor + 15}.*"]
    got = subprocess.run(pip, capture_output=True, text=True)
    if got.returncode:
        print(got.stderr)
        needs.not_run("needs torchvision, which pip cannot install")
    runner = Path(__file__).with_name("torchvision_on_cpus.py")
    data = pictures(tmp_path / "data")
    command = with_torch(runner, "train_single.py", data, "--arch", "resnet18", *SMALL)
    epochs = [f"{number}/4" for number in range(1, 5)]
    # Two limits: of four, the search may need more steps than these pictures are.
    output = trained(
        [*command, "--pl-step", "150", "--epochs", "4"], epochs, daemon, tmp_path / "site"
    )
    assert limits_set(daemon, 1)[0][-1] == chosen(output)


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["/nowhere"], {}, "there is no folder /nowhere; DATA_DIR must have train/CLASS/"),
        (["--synthetic"], {}, "--arch resnet50 needs torchvision"),
        (TINY, {"ZEUS_MAX_SLOWDOWN": "0.9"}, "ZEUS_MAX_SLOWDOWN must be a number of at least 1"),
        (TINY, {}, "no zeusd listens at /nowhere"),
    ],
)
def test_errors_are_reported_in_one_sentence(
    arguments: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError(name=__name__)")
    env = environment("/nowhere", tmp_path, **env)
    refused(run(with_torch("train_single.py", *arguments), FOLDER, env), message)


def test_a_gpu_that_is_not_there_is_reported_in_one_sentence(daemon: RunningDaemon) -> None:
    command = with_torch("train_single.py", *TINY, "--gpu", "7")
    ran = run(command, FOLDER, environment(daemon.socket))
    refused(ran, "There is no GPU 7: this process sees 2")
    assert limits_set(daemon, 2) == [[], []]


def refused(ran: subprocess.CompletedProcess[str], message: str) -> None:
    """A program has ended with one sentence."""
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"train_single.py: {message}")
    assert ran.stderr.count("\n") == 1
