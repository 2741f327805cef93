"""FLOPs and bytes of vLLM's model, from vLLM's own counts (`vllm.v1.metrics.perf`).

vLLM counts a step as a whole. Except for weights, its count is linear in a request's tokens,
context, and the product of both, so a few counts of a single request are enough. Sliding windows
are not considered: context counts in full.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from zeus.serving.wire import Work

log = logging.getLogger(__name__)

CONTEXT = 1024
"""Context at which its cost is determined."""
SIZES = [2**power for power in range(15)]
"""Numbers of tokens of a step for which weights are determined; with more, a mixture of experts
reads all."""


def work(config: Any, engine: str) -> Work | None:
    """FLOPs and bytes of each token.

    Args:
        config: vLLM's configuration.
        engine: Name of the engine.

    Returns:
        None if this vLLM does not report them. Never raises.
    """
    try:
        home = importlib.import_module("vllm.v1.metrics.perf")
        model = home.ModelMetrics(config)
        if not model.is_enabled():
            return None
        return _read(model, home.ExecutionContext.from_single_request, engine)
    except Exception as error:  # noqa: BLE001 - never raise into the engine
        log.info("vLLM does not report its model's FLOPs and bytes: %s", error)
        return None


def _read(model: Any, of: Any, engine: str) -> Work:
    def flops(tokens: int, attended: int, prefill: bool) -> float:
        return float(model.get_num_flops(of(tokens, attended, prefill)))

    def moved(tokens: int, attended: int, prefill: bool) -> float:
        context = of(tokens, attended, prefill)
        return float(model.get_read_bytes(context) + model.get_write_bytes(context))

    attention = (flops(1, 2 * CONTEXT, False) - flops(1, CONTEXT, False)) / CONTEXT
    output = flops(2, 2, False) - flops(2, 2, True)
    token = flops(1, CONTEXT, False) - CONTEXT * attention - output
    context_bytes = (moved(1, 2 * CONTEXT, False) - moved(1, CONTEXT, False)) / CONTEXT
    output_bytes = moved(2, 2, False) - moved(2, 2, True)
    # In a prefill of the whole context: the token's own bytes, those of context, and weights.
    steps = [
        (size, moved(size, size, True) - size * context_bytes - output_bytes) for size in SIZES
    ]
    (few, low), (many, high) = steps[-2:]
    token_bytes = (high - low) / (many - few)  # if all weights are read
    weights = [(float(size), max(0.0, found - size * token_bytes)) for size, found in steps]
    return Work(
        engine,
        max(0.0, token),
        max(0.0, attention),
        max(0.0, output),
        max(0.0, token_bytes),
        max(0.0, context_bytes),
        max(0.0, output_bytes),
        weights,
    )
