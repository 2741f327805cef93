"""A small language model in stages, and sentences for it to learn."""

from __future__ import annotations

import torch
from torch import nn

WORDS = 64
LENGTH = 16
WIDTH = 32


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, LENGTH, WIDTH)."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=self.later, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


def make_stage(stage: int, num_stages: int) -> nn.Module:
    """One stage of the model.

    As in real models, the first and the last stage also have the embedding and the output layer.
    """
    torch.manual_seed(stage)
    parts: list[nn.Module] = [Block()]
    if stage == 0:
        parts.insert(0, nn.Embedding(WORDS, WIDTH))
    if stage == num_stages - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*parts)


def batch(number: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences, with the next word for each word; a rule determines the next word.

    The same number gives the same sentences in every process: the first stage needs the words, and
    the last one the words that follow.
    """
    generator = torch.Generator().manual_seed(number)
    words = [torch.randint(WORDS, (size,), generator=generator)]
    for _ in range(LENGTH):
        words.append((words[-1] * 5 + 3) % WORDS)
    sentences = torch.stack(words, dim=1).to(device)
    return sentences[:, :-1], sentences[:, 1:]


def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the predicted next words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
