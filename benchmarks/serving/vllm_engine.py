"""A small Llama with random weights, and vLLM's options to run it on the CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCABULARY = 1024


def model(home: Path, *, hidden: int = 256, layers: int = 4) -> Path:
    """Writes the configuration of a model; returns its folder."""
    folder = home / "model"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `EngineArgs`."""
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        "disable_log_stats": False,
        "enable_logging_iteration_details": True,
        **more,
    }


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    """Random tokens; the same for the same seed."""
    generator = random.Random(seed)
    return {"prompt_token_ids": [generator.randrange(3, VOCABULARY) for _ in range(length)]}
