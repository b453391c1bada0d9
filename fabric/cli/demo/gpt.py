"""A small byte-level GPT: pre-norm blocks, causal attention, dropout, tied input and output bytes."""

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

BYTES = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with dropout, on (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        dropout = self.dropout if self.training else 0.0
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        mixed: Tensor = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: Tensor = x + self.drop(self.feed(self.feed_norm(x)))
        return out


class ByteGPT(nn.Module):
    """Logits (batch, time, 256) for the byte that follows each of ``tokens`` (batch, time) int64."""

    def __init__(
        self, width: int = 192, layers: int = 6, heads: int = 6, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.blocks(self.drop(self.bytes(tokens) + positions))
        return functional.linear(self.norm(x), self.bytes.weight)
