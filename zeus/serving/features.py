"""Features that a step's energy depends on, and each request's share of them.

A step's energy is modelled as a weighted sum of features. Each feature is a game among the step's
requests, and its Shapley value has a closed form: a sum is divided by each request's own part; a
constant is divided equally; and 1 - exp(-tokens / tau), which models weights of which each further
token touches fewer new ones, is divided by an integral (see `saturating`). So the shares of every
feature add up to it, and those of the model to the step's energy.
"""

from __future__ import annotations

import numpy as np

from zeus.serving.columns import Floats, Ints, StepColumns

TAUS = (6.0, 24.0, 96.0, 400.0)
"""Tokens after which a saturating feature has reached 63 %."""

NAMES = (
    "step",
    "step with prefill",
    "decode sequences",
    "decode tokens",
    "prefill tokens",
    "decode context",
    "prefill attention",
    *(f"saturating {tau:g}" for tau in TAUS),
)

SHARED = np.array([0, 7, 8, 9, 10])
"""Features that no single request causes."""
PREFILL = np.array([1, 4, 6])
DECODE = np.array([2, 3, 5])

_NODES, _WEIGHTS = (np.array(one) / 2 for one in np.polynomial.legendre.leggauss(10))
_NODES = _NODES + 0.5


def shares(steps: StepColumns) -> Floats:
    """Each row's share of each feature of its step, rows x features.

    Tokens are in thousands, contexts in millions and attention (tokens times the mean context that
    they attend to) in thousand millions, which keeps the numbers near one.
    """
    step = steps.step_of_row
    head = 1.0 / np.maximum(np.diff(steps.first_row), 1)[step]
    prefills = np.bincount(step, steps.prefill, steps.count)
    decode = ~steps.prefill
    columns = np.zeros((step.size, len(NAMES)))
    columns[:, 0] = head
    columns[:, 1] = steps.prefill / np.maximum(prefills, 1)[step]
    columns[:, 2] = decode
    columns[:, 3] = decode * steps.tokens / 1e3
    columns[:, 4] = steps.prefill * steps.tokens / 1e3
    columns[:, 5] = decode * steps.context / 1e6
    attended = steps.context + steps.tokens / 2
    columns[:, 6] = steps.prefill * steps.tokens * attended / 1e9
    columns[:, 7:] = saturating(step, steps.tokens, steps.count)
    return columns


def saturating(step: Ints, tokens: Floats, count: int) -> Floats:
    """Each row's Shapley value of 1 - exp(-n / tau), n the tokens of its step; rows x taus.

    With q = 1 - exp(-own / tau) the game is "at least one of independent events of probability q".
    A request's value is q times the integral over t in 0..1 of the product over the others of (1 -
    t q): the probability that none of the events before it in a random order has happened.
    """
    # Rows of one step with the same number of tokens have the same share: most decode one.
    whole = np.floor(tokens)
    if np.array_equal(whole, tokens) and tokens.size and tokens.max() < 2**31:
        key = (step << 31) + whole.astype(np.int64)
        _, chosen, inverse, times = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
    else:
        chosen = inverse = np.arange(tokens.size)
        times = np.ones(tokens.size, np.int64)
    step_of, own = step[chosen], tokens[chosen]
    columns = np.zeros((chosen.size, len(TAUS)))
    for column, tau in enumerate(TAUS):
        q = -np.expm1(-own / tau)
        total = np.zeros(chosen.size)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            log_none = np.log1p(-node * q)
            all_none = np.bincount(step_of, log_none * times, count)[step_of]
            total += weight * np.exp(all_none - log_none)
        # The quadrature is exact to about 1e-4; scaled, the shares add up to the feature.
        value = q * total
        sums = np.bincount(step_of, value * times, count)
        wanted = -np.expm1(-np.bincount(step_of, own * times, count) / tau)
        scale = np.divide(wanted, sums, out=np.zeros(count), where=sums > 0)
        columns[:, column] = value * scale[step_of]
    return columns[inverse]
