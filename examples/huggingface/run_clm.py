"""Trains a causal language model with `Trainer`, at its best power limit.

    python run_clm.py --model_name_or_path MODEL --dataset_name DATASET --output_dir OUT
    python run_clm.py --train_file TEXT --output_dir OUT        a tiny model with random weights

It takes every option of `TrainingArguments`; `--help` shows all. One line in `main` adds the power
limit optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from zeus_options import ZeusArguments, attach_optimizer, print_result

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass
class ModelArguments:
    """Options for the model."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "pretrained model to continue from"}
    )
    config_name: str | None = field(default=None, metadata={"help": "configuration of a new model"})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "tokenizer, if not that of the model or configuration"}
    )


@dataclass
class DataArguments:
    """Options for the data."""

    dataset_name: str | None = field(default=None, metadata={"help": "data set of the hub"})
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "configuration of the data set"}
    )
    train_file: str | None = field(default=None, metadata={"help": "a text file"})
    validation_file: str | None = field(default=None, metadata={"help": "a text file"})
    validation_percent: int = field(
        default=5,
        metadata={"help": "share of the training data for validation, if there is no other"},
    )
    block_size: int = field(default=256, metadata={"help": "tokens per sequence"})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "number of training sequences"}
    )


def load_texts(options: DataArguments) -> DatasetDict:
    """Loads the texts as data sets `train` and `validation` with a column `text`."""
    if options.dataset_name is not None:
        data = load_dataset(options.dataset_name, options.dataset_config_name)
    elif options.train_file is not None:
        files = {"train": options.train_file, "validation": options.validation_file}
        data = load_dataset("text", data_files={name: path for name, path in files.items() if path})
    else:
        raise SystemExit("Give --dataset_name, or --train_file with a text file.")
    if "validation" not in data:
        parts = data["train"].train_test_split(options.validation_percent / 100, seed=0)
        data = DatasetDict(train=parts["train"], validation=parts["test"])
    return data


def make_tokenizer(texts: Dataset) -> PreTrainedTokenizerFast:
    """Builds a small byte-level tokenizer for the tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts["text"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def load_model(
    options: ModelArguments, texts: Dataset
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer: pretrained, from a configuration, or tiny."""
    named = options.tokenizer_name or options.config_name or options.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(named) if named else make_tokenizer(texts)
    if options.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(options.model_name_or_path), tokenizer
    if options.config_name is not None:
        config = AutoConfig.from_pretrained(options.config_name)
    else:
        config = LlamaConfig(vocab_size=len(tokenizer), **TINY)
    return AutoModelForCausalLM.from_config(config), tokenizer


def cut(texts: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Concatenates all texts, and cuts them into sequences of the same length."""

    def blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream: list[int] = []
        for ids in tokenizer(batch["text"])["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
        whole = range(0, len(stream) - block_size + 1, block_size)
        sequences = [stream[start : start + block_size] for start in whole]
        return {"input_ids": sequences, "labels": [list(one) for one in sequences]}

    return texts.map(blocks, batched=True, remove_columns=texts.column_names)


def main() -> None:
    """Trains, evaluates and saves."""
    parser = HfArgumentParser((ModelArguments, DataArguments, ZeusArguments, TrainingArguments))
    model_options, data_options, zeus_options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    with args.main_process_first(desc="preparing the data"):
        texts = load_texts(data_options)
        model, tokenizer = load_model(model_options, texts["train"])
        train = cut(texts["train"], tokenizer, data_options.block_size)
        validation = cut(texts["validation"], tokenizer, data_options.block_size)
    if data_options.max_train_samples is not None:
        train = train.select(range(min(len(train), data_options.max_train_samples)))
    if not len(train):
        raise SystemExit(f"The text is shorter than a block of {data_options.block_size} tokens.")

    trainer = Trainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    optimizer = attach_optimizer(trainer, args, zeus_options)

    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    if len(validation):
        trainer.log_metrics("eval", trainer.evaluate())
    print_result(optimizer, args)


if __name__ == "__main__":
    main()
