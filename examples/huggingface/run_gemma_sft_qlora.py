"""Fine-tunes a chat model with TRL: weights in 4 bits, LoRA adapters, at the best power limit.

    python run_gemma_sft_qlora.py --dataset_name DATASET --output_dir OUT
    python run_gemma_sft_qlora.py --train_file CHATS.jsonl --output_dir OUT

The model is Gemma 3 1B unless `--model_name_or_path` names another. A data set has the columns that
`SFTTrainer` knows, such as `messages`; a line of a JSONL file is one chat:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

It takes every option of `SFTConfig`; `--help` shows all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedModel,
)
from trl import SFTConfig, SFTTrainer
from zeus_options import ZeusArguments, attach_optimizer, print_result


@dataclass
class Arguments:
    """Options for model, adapters and data."""

    model_name_or_path: str = field(
        default="google/gemma-3-1b-it", metadata={"help": "a chat model"}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "data set of the hub"})
    dataset_split: str = field(default="train", metadata={"help": "configuration of the data set"})
    train_file: str | None = field(default=None, metadata={"help": "JSONL file of chats"})
    eval_percent: int = field(default=5, metadata={"help": "share of the data for evaluation"})
    load_in_4bit: bool = field(
        default=True, metadata={"help": "store the model's weights in 4 bits"}
    )
    lora_r: int = field(default=16, metadata={"help": "rank of the adapters"})
    lora_alpha: int = field(default=32, metadata={"help": "scale of the adapters, times the rank"})
    lora_dropout: float = field(default=0.05, metadata={"help": "their dropout"})


def load_chats(options: Arguments) -> tuple[Dataset, Dataset]:
    """Loads the data sets for training and evaluation."""
    if options.dataset_name is not None:
        chats = load_dataset(options.dataset_name, split=options.dataset_split)
    elif options.train_file is not None:
        chats = load_dataset("json", data_files=options.train_file, split="train")
    else:
        raise SystemExit("Give --dataset_name, or --train_file with a JSONL file of chats.")
    parts = chats.train_test_split(options.eval_percent / 100, seed=0)
    return parts["train"], parts["test"]


def load_model(options: Arguments, args: SFTConfig) -> PreTrainedModel:
    """Loads the model on this process's device, in 4 bits if requested."""
    on_gpu = args.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported() else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # FSDP shards tensors of one type, so weights are stored in the compute type.
        bnb_4bit_quant_storage=dtype if args.fsdp else torch.uint8,
    )
    return AutoModelForCausalLM.from_pretrained(
        options.model_name_or_path,
        quantization_config=quantization if options.load_in_4bit else None,
        dtype=dtype,
        device_map={"": args.local_process_index if on_gpu else "cpu"},
        attn_implementation="eager",  # recommended for training Gemma 3
    )


def main() -> None:
    """Fine-tunes, evaluates and saves the adapters."""
    parser = HfArgumentParser((Arguments, ZeusArguments, SFTConfig))
    options, zeus_options, args = parser.parse_args_into_dataclasses()
    train, evaluation = load_chats(options)

    trainer = SFTTrainer(
        model=load_model(options, args),
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=AutoTokenizer.from_pretrained(options.model_name_or_path),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM",
            r=options.lora_r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules="all-linear",
        ),
    )
    optimizer = attach_optimizer(trainer, args, zeus_options)

    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())
    print_result(optimizer, args)


if __name__ == "__main__":
    main()
