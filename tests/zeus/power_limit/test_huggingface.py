"""Real `Trainer`s train tiny models while a simulated GPU works, in virtual time, step by step."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


from tests import snippets
from tests.late import late
from tests.support import for_users
from tests.zeus.in_trainers import LIMITS, SMALL, STEPS, assert_given_back, assert_right
from tests.zeus.node import VirtualNode
from zeus import optimizer
from zeus.optimizer import power_limit
from zeus.optimizer.power_limit import Done, Energy, Profiling
from zeusd.devices.simulated import Work

torch = late("torch")
datasets = late("datasets")
transformers = late("transformers")
trl = late("trl")
accumulators = late("tensorboard.backend.event_processing.event_accumulator")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # more only wait for each other with models so small


def callback(node: VirtualNode, **options: Any) -> power_limit.HFGlobalPowerLimitOptimizer:
    return power_limit.HFGlobalPowerLimitOptimizer(node.monitor(), Energy(), **{**SMALL, **options})


def model() -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    )


def rows(count: int) -> datasets.Dataset:
    ids = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(0)).tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def simulate(trainer: Any, node: VirtualNode, work: Work, units: float = 1.0) -> None:
    """Each batch keeps the GPU busy; evaluation and checkpoints take long, and train nothing."""
    step, predict, save = trainer.training_step, trainer.prediction_step, trainer.save_model

    def training_step(*args: Any, **options: Any) -> Any:
        loss = step(*args, **options)
        work.run(units)
        return loss

    def prediction_step(*args: Any, **options: Any) -> Any:
        work.wait()
        node.clock.sleep(8)
        return predict(*args, **options)

    def save_model(*args: Any, **options: Any) -> Any:
        work.wait()
        node.clock.sleep(6)
        return save(*args, **options)

    trainer.training_step = training_step
    trainer.prediction_step = prediction_step
    trainer.save_model = save_model


def hf_trainer(
    tmp_path: Path,
    plo: power_limit.HFGlobalPowerLimitOptimizer | None,
    *,
    steps: int = 1000,
    after: list[transformers.TrainerCallback] | None = None,
    **options: Any,
) -> transformers.Trainer:
    """A trainer whose epochs have a given number of steps."""
    batches = steps * options.get("gradient_accumulation_steps", 1)
    arguments = {
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return transformers.Trainer(
        model(),
        transformers.TrainingArguments(str(tmp_path / "out"), **arguments),
        train_dataset=rows(batches),
        eval_dataset=rows(2),
        callbacks=[*([plo] if plo else []), *(after or [])],
    )


# ------------------------------------------------------------------------------ what it looks like


def test_names_that_do_not_exist_are_refused_as_by_python() -> None:
    assert power_limit.HFGlobalPowerLimitOptimizer is optimizer.HFGlobalPowerLimitOptimizer
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = power_limit.Nothing
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from zeus.optimizer import Nothing")


def test_without_the_frameworks_it_can_be_imported_and_not_made() -> None:
    program = """
        import inspect, sys
        import zeus.optimizer, zeus.optimizer.power_limit
        heavy = {"torch", "transformers", "lightning", "pytorch_lightning"} & set(sys.modules)
        assert not heavy, heavy
        for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
            sys.modules[name] = None
        from zeus.optimizer import GlobalPowerLimitOptimizer as Plain
        from zeus.optimizer import HFGlobalPowerLimitOptimizer as HF
        from zeus.optimizer.power_limit import LightningGlobalPowerLimitOptimizer as Lightning
        for cls in HF, Lightning:
            assert inspect.signature(cls) == inspect.signature(Plain)
            try:
                cls(None)
            except ImportError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    hf, lightning = done.stdout.splitlines()
    assert hf == (
        "The transformers package is not installed. Please install it to use the "
        'HFGlobalPowerLimitOptimizer. Run `pip install "zeusd[hf]"`.'
    )
    assert 'Run `pip install "zeusd[lightning]"`.' in lightning


def training_events(plo: power_limit.HFGlobalPowerLimitOptimizer) -> None:
    """A training of one step, from a trainer that passes its model by position."""
    from transformers import TrainerControl, TrainerState

    arguments = transformers.TrainingArguments("unused", report_to=[], use_cpu=True)
    event = (arguments, TrainerState(), TrainerControl(), model())
    for name in ("train_begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "train_end"):
        assert getattr(plo, f"on_{name}")(*event, optimizer=object()) is None


def test_a_trainer_may_pass_its_model_by_position(node: VirtualNode) -> None:
    plo = callback(node)
    training_events(plo)
    assert not plo.disabled
    assert_given_back(node)


def test_an_internal_error_ends_the_search_and_not_the_training(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    plo = callback(node)

    def broken() -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(plo.optimizer, "on_step_begin", broken)
    with pytest.warns(
        UserWarning, match="training continues at the highest limit.*a defect"
    ) as all_:
        training_events(plo)
        training_events(plo)
    assert len([one for one in all_ if "a defect" in str(one.message)]) == 1
    assert plo.disabled
    assert_given_back(node)


# --------------------------------------------------------------------------------------- training


def test_the_best_limit_is_found_restored_at_the_end_and_set_again_by_the_next_training(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = callback(node)
    seen: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *event: Any, **objects: Any) -> None:
            seen.append(node.limit_w())

    trainer = hf_trainer(tmp_path, plo, steps=STEPS + 5, after=[Watch()])
    simulate(trainer, node, work)
    trainer.train()
    assert_right(plo, expected)
    best = Energy().select(plo.measurements)
    assert isinstance(plo.state, Done)
    assert plo.state.optimal_power_limit == best * 1000
    assert list(dict.fromkeys(seen)) == LIMITS
    assert seen[-1] == best
    assert plo.current_power_limit == 0
    assert_given_back(node)
    seen.clear()
    trainer.train()
    assert_right(plo, expected)
    assert set(seen) == {best}
    assert_given_back(node)


def test_evaluation_and_checkpoints_in_mid_epoch_are_not_measured(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = callback(node)
    limits: list[float] = []
    trainer = hf_trainer(
        tmp_path,
        plo,
        steps=130,
        eval_strategy="steps",
        eval_steps=7,
        save_strategy="steps",
        save_steps=25,
        save_total_limit=1,
        logging_steps=10,
    )
    simulate(trainer, node, work)
    for name in ("prediction_step", "save_model"):
        real = getattr(trainer, name)

        def watched(*args: Any, real: Any = real, **options: Any) -> Any:
            if not isinstance(plo.state, Done):
                limits.append(node.limit_w())
            return real(*args, **options)

        setattr(trainer, name, watched)
    trainer.train()
    assert_right(plo, expected)
    assert set(limits) == {250}
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 13
    assert_given_back(node)


def test_an_evaluation_requested_by_a_later_callback_is_not_measured(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    class Orders(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            control.should_evaluate = state.global_step == 8
            control.should_save = state.global_step == 21

        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if state.global_step == 35:
                trainer.predict(rows(2))

    plo = callback(node)
    trainer = hf_trainer(tmp_path, plo, steps=STEPS + 40, after=[Orders()])
    simulate(trainer, node, work)
    trainer.train()
    assert_right(plo, expected)


def test_short_epochs_of_optimizer_steps_with_an_evaluation_after_each(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = callback(node)
    options = {"num_train_epochs": 14, "gradient_accumulation_steps": 2}
    trainer = hf_trainer(tmp_path, plo, steps=8, eval_strategy="epoch", **options)
    simulate(trainer, node, work, units=0.5)
    with pytest.warns(UserWarning, match="shorter than"):
        trainer.train()
    assert trainer.state.global_step == 8 * 14
    assert_right(plo, expected)


def test_it_continues_from_a_checkpoint(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 20}
    first = hf_trainer(tmp_path, callback(node), steps=100, max_steps=20, **options)
    simulate(first, node, work)
    first.train()
    plo = callback(node)
    second = hf_trainer(tmp_path, plo, steps=100, **options)
    simulate(second, node, work)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 100
    assert_right(plo, expected)
    assert_given_back(node)


def test_after_an_error_the_same_callback_trains_again(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    """There is no event for the error; as a context manager, it restores limits at once."""
    plo = callback(node)
    trainer = hf_trainer(tmp_path, plo, steps=STEPS + 30)
    simulate(trainer, node, work)
    step, failing = trainer.training_step, [True]

    def fails(*args: Any, **options: Any) -> Any:
        if failing and node.limit_w() == 150 and isinstance(plo.state, Profiling):
            raise KeyboardInterrupt
        return step(*args, **options)

    trainer.training_step = fails
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert node.limit_w() == 150
    work.wait()
    node.clock.sleep(60)  # someone debugs the failure
    with pytest.raises(KeyboardInterrupt), plo:
        trainer.train()
    assert_given_back(node)
    failing.clear()
    with plo:
        trainer.train()
    assert_right(plo, expected)
    assert_given_back(node)


# ---------------------------------------------------------------------------------------- logging


def figures_while_training(plo: power_limit.HFGlobalPowerLimitOptimizer) -> None:
    """More figures, at the two times that suit a log least."""
    optimizer = plo.optimizer
    pause, close = optimizer.on_pause, optimizer.close

    def on_pause() -> None:
        pause()
        optimizer.on_metrics({"zeus/test_limit_w": optimizer.power_limits[0] / 1000})

    def at_the_end() -> None:
        close()
        optimizer.on_metrics({"zeus/test_end": 1.0})

    vars(optimizer).update(on_pause=on_pause, close=at_the_end)


@pytest.mark.parametrize("by", ["steps", "epoch"])
def test_figures_go_where_the_loss_goes(
    node: VirtualNode, work: Work, tmp_path: Path, by: str
) -> None:
    plo = callback(node)
    trainer = hf_trainer(
        tmp_path,
        None,
        steps=60,
        eval_strategy="steps",
        eval_steps=30,
        logging_steps=10,
        logging_strategy=by,
        report_to=["tensorboard"],
    )
    plo.attach(trainer)
    plo.attach(trainer)
    assert trainer.callback_handler.callbacks.count(plo) == 1
    figures_while_training(plo)
    simulate(trainer, node, work)
    trainer.train()
    history = trainer.state.log_history
    assert [row["step"] for row in history if "zeus/test_limit_w" in row] == [30, 60]
    assert [row["step"] for row in history if "zeus/test_end" in row] == [60]
    # The trainer's own figures are all there: logging ours has not made it forget.
    due = [10, 20, 30, 40, 50, 60] if by == "steps" else [60]
    assert [row["step"] for row in history if "loss" in row] == due
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    board = accumulators.EventAccumulator(str(events))
    board.Reload()
    assert {"train/zeus/test_limit_w", "train/zeus/test_end"} <= set(board.Tags()["scalars"])
    (point, _) = board.Scalars("train/zeus/test_limit_w")
    assert (point.step, point.value) == (30, 250.0)
    # The evaluation has cut one limit's steps in two.
    limits = [one.value for one in board.Scalars("train/zeus/power_limit_w")]
    assert list(dict.fromkeys(limits)) == [250, 200, 150, 100]
    (chosen,) = board.Scalars("train/zeus/chosen_power_limit_w")
    assert chosen.value == min(plo.measurements, key=lambda one: one.energy).power_limit
    assert not plo.disabled


def test_a_log_that_fails_ends_only_the_logging(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    class Full(transformers.TrainerCallback):
        def on_log(self, *event: Any, logs: dict[str, float], **objects: Any) -> None:
            if "zeus/test" in logs:
                raise OSError("No space left on device")

    plo = callback(node)
    trainer = hf_trainer(tmp_path, plo, steps=20, after=[Full()])
    plo.attach(trainer)
    plo.optimizer.on_progress = lambda optimizer: optimizer.on_metrics({"zeus/test": 1.0})
    simulate(trainer, node, work)
    with pytest.warns(UserWarning, match="logs no more.*No space left") as told:
        trainer.train()
    assert len(for_users(told)) == 1
    assert len(plo.measurements) == 1
    assert not plo.disabled


def test_only_the_main_process_logs(
    node: VirtualNode, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plo = callback(node)
    trainer = hf_trainer(tmp_path, plo, steps=10)
    plo.attach(trainer)
    plo.optimizer.on_progress = lambda optimizer: optimizer.on_metrics({"zeus/test": 1.0})
    simulate(trainer, node, work)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.train()
    assert not [row for row in trainer.state.log_history if "zeus/test" in row]


# -------------------------------------------------------------------------------------------- TRL


def test_sft_trainer(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models

    plo = callback(node)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}))
    trainer = trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(
            str(tmp_path / "out"),
            per_device_train_batch_size=1,
            max_steps=80,
            eval_strategy="steps",
            eval_steps=33,
            save_strategy="no",
            logging_steps=5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=rows(80),
        eval_dataset=rows(2),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    plo.attach(trainer)
    simulate(trainer, node, work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert_right(plo, expected)
    assert_given_back(node)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 16
    assert all("mean_token_accuracy" in row for row in logged)


# ------------------------------------------------------------------------------------------- docs


@pytest.mark.parametrize("block", snippets.of(ROOT / "docs" / "train" / "huggingface.md"), ids=str)
def test_the_code_in_the_docs_runs(
    block: snippets.Block,
    node: VirtualNode,
    work: Work,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    made = hf_trainer(tmp_path, None, steps=STEPS + 5)
    made.args.report_to = []

    class Simulated(transformers.Trainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            work.run(1)
            return loss

    monkeypatch.setattr("transformers.Trainer", Simulated)
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", lambda **options: node.monitor(**options))
    space = block.run(
        model=made.model,
        args=made.args,
        dataset=made.train_dataset,
        trainer=Simulated(made.model, made.args, train_dataset=made.train_dataset),
        monitor=node.monitor(),
    )
    made_here = [
        one for one in space.values() if isinstance(one, power_limit.HFGlobalPowerLimitOptimizer)
    ]
    assert all(not one.disabled and isinstance(one.state, Done) for one in made_here)
    assert_given_back(node)
