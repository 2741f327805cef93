"""transformers' own continuous batching, with a tiny random model on the CPU."""

from __future__ import annotations

import importlib

from tests.late import late
from tests.zeus.serving.batches import Recorded
from zeus.serving.transformers import install

transformers = late("transformers")

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 10]
NEW_TOKENS = 5


def test_the_composition_of_every_batch_is_seen(monkeypatch):
    module = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    home = module.ContinuousBatchProcessor
    for name in ("prepare_next_batch", "update_batch"):
        monkeypatch.setattr(home, name, getattr(home, name))  # restored at the end
    recorded = Recorded()
    assert install(recorded)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()
    model.set_attn_implementation("sdpa")
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        # Without a bound it takes most of the machine's memory.
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=32
        ),
        warmup=False,
    )

    prompts = {name: len(output.prompt_ids) for name, output in outputs.items()}
    assert sorted(prompts.values()) == [3, 5, 10]
    prefilled, decoded = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    for step in recorded.steps:
        for name, prefill, tokens, context in zip(*step, strict=True):
            assert context == prefilled[name] + decoded[name]
            (prefilled if prefill else decoded)[name] += tokens
    assert recorded.arrivals == prefilled == prompts
    # The first of the new tokens comes with the prefill.
    assert decoded == dict.fromkeys(prompts, NEW_TOKENS - 1)
    assert sorted(recorded.finished) == sorted(prompts)

    monkeypatch.delattr(module, "ContinuousBatchProcessor")
    assert not install(recorded)
