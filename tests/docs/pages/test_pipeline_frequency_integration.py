"""Runs the code of docs/train/pipeline_frequency_integration.md."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.late import late
from tests.zeus.pipeline_frequency.heard import Heard

torch = late("torch")
dist = late("torch.distributed")

PAGE = Path(__file__).parents[3] / "docs" / "train" / "pipeline_frequency_integration.md"
BLOCKS = snippets.of(PAGE)
PLACE: dict[str, Any] = {
    **dict.fromkeys(["rank", "dp_rank", "pp_rank", "tp_rank", "local_rank"], 0),
    **dict.fromkeys(["dp_degree", "pp_degree", "tp_degree", "world_size"], 1),
}
STEP = ["step begins", "forward", "backward", "forward", "backward", "step ends"]


def block(words: str) -> snippets.Block:
    (found,) = (one for one in BLOCKS if words in one.source)
    return found


def module(name: str, source: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    exec(source, made.__dict__)
    return made


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces modules of a framework that is not installed."""

    def put(**modules: types.ModuleType) -> None:
        for name, made in modules.items():
            monkeypatch.setitem(sys.modules, name.replace("__", "."), made)

    return put


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often the GPU was waited for."""
    found: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append(None))
    return found


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "zeus.optimizer.pipeline_frequency.optimizer.PipelineFrequencyOptimizer"
    monkeypatch.setattr(path, Heard)


def test_all_blocks_are_run_below() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.usefixtures("one_process")
def test_torch_pipelining() -> None:
    optimizer = Heard()
    batch = torch.ones(2, 1), torch.zeros(2, 1)
    block("instrument(schedule, stage, optimizer)").run(
        module=torch.nn.Linear(1, 1),
        device=torch.device("cpu"),
        n_microbatches=2,
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=optimizer,
        batches=[batch, batch],
        step_weights=lambda: None,
        **PLACE,
    )
    assert optimizer.events == [*STEP, *STEP, "pause", "end"]


MEGATRON = """
def forward_step(*args, **kwargs):
    return "forward"

def backward_step(*args, **kwargs):
    return "backward"

def forward_backward_pipelining_without_interleaving(*, forward_step_func, forward_only=False):
    done = []
    for _ in range(2):
        done.append(forward_step(forward_step_func))
        if not forward_only:
            done.append(backward_step(None))
    return done

def forward_backward_pipelining_with_interleaving(*, forward_step_func, forward_only=False):
    return forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step_func, forward_only=forward_only
    )

def get_forward_backward_func():
    return forward_backward_pipelining_without_interleaving
"""


def test_megatron(framework: Callable[..., None], waits: list[None]) -> None:
    schedules = module("schedules", MEGATRON)
    get = dict.fromkeys(
        [f"get_{kind}_parallel_rank" for kind in ("data", "pipeline_model", "tensor_model")],
        lambda: 0,
    )
    sizes = {name.replace("rank", "world_size"): lambda: 1 for name in get}
    mpu = module("mpu", "", **get, **sizes)
    framework(
        megatron=module("megatron", ""),
        megatron__core=module("core", "", parallel_state=mpu),
        megatron__core__pipeline_parallel=module("pipeline", "", schedules=schedules),
    )
    space = block("def instrument_megatron").run()
    alone = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    cuda = types.SimpleNamespace(current_device=lambda: 0)
    framework(torch=module("torch", "", cuda=cuda, distributed=alone))
    space["model_provider"] = lambda: "a model"
    provider = block("def model_provider_with_clocks").run(**space)["model_provider_with_clocks"]
    for _ in range(2):  # two model chunks
        assert provider() == "a model"
    optimizer = Heard.last
    run = schedules.get_forward_backward_func()
    assert run(forward_step_func=None, forward_only=True) == ["forward"] * 2
    assert optimizer.events == ["pause"]
    assert waits == []
    for _ in range(2):
        optimizer.events.clear()
        assert run(forward_step_func=None, forward_only=False) == ["forward", "backward"] * 2
        assert optimizer.events == STEP
    assert len(waits) == 8


DEEPSPEED = """
class ForwardPass: pass
class BackwardPass: pass
class SendGrad: pass

class PipelineEngine:
    def _exec_forward_pass(self, buffer_id):
        self.done.append("forward")

    def _exec_backward_pass(self, buffer_id):
        self.done.append("backward")

    def _exec_send_grads(self, buffer_id):
        self.done.append("send")

    _INSTRUCTION_MAP = {
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
        SendGrad: _exec_send_grads,
    }

    def _run(self, *kinds):
        self.done = []
        for kind in kinds * 2:
            MethodType(self._INSTRUCTION_MAP[kind], self)(buffer_id=0)
        return self.done

    def train_batch(self, data_iter=None):
        return self._run(ForwardPass, BackwardPass, SendGrad)

    def eval_batch(self, data_iter):
        return self._run(ForwardPass)
"""


def test_deepspeed(framework: Callable[..., None], waits: list[None]) -> None:
    made = module("schedule", DEEPSPEED, MethodType=types.MethodType)
    framework(
        deepspeed=module("deepspeed", ""),
        deepspeed__runtime=module("runtime", ""),
        deepspeed__runtime__pipe=module("pipe", "", schedule=made),
    )
    space = block("def instrument_deepspeed").run()
    engine, other, optimizer = made.PipelineEngine(), made.PipelineEngine(), Heard()
    space["instrument_deepspeed"](engine, optimizer)
    assert engine.eval_batch(iter([])) == ["forward"] * 2
    assert optimizer.events == ["pause"]
    assert waits == []
    for _ in range(2):
        optimizer.events.clear()
        assert engine.train_batch() == ["forward", "backward", "send"] * 2
        assert optimizer.events == STEP
    assert len(waits) == 8
    other.train_batch()
    assert optimizer.events == STEP
