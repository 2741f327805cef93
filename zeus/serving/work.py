"""FLOPs and bytes of each request in a step, from an engine's description of its model."""

from __future__ import annotations

import numpy as np

from zeus.serving.columns import Floats
from zeus.serving.wire import EngineStep, Work


def of_rows(work: Work, step: EngineStep) -> tuple[Floats, Floats]:
    """FLOPs and bytes of each request. Weights are read once, and divided equally among
    requests."""
    tokens = np.asarray(step.tokens, np.float64)
    attended = np.asarray(step.context, np.float64) + tokens
    outputs = np.where(np.asarray(step.prefill, bool), 1.0, tokens)
    flops = (
        work.token_flops * tokens
        + work.attention_flops * tokens * attended
        + work.output_flops * outputs
    )
    at, moved = zip(*work.weights, strict=True)
    weights = np.interp(tokens.sum(), at, moved) / max(1, tokens.size)
    own = (
        work.token_bytes * tokens
        + work.context_bytes * attended
        + work.output_bytes * outputs
        + weights
    )
    return flops, own
