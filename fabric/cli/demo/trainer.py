"""The trainer of every replica of the demo: a byte-level GPT in the documented training loop.

The corpus is on every machine: the sources of Python's own standard library, as bytes. Every replica reads
the same files in the same order up to the same size, so sample i is the same everywhere.

No code in the loop handles failures. With ``FABRIC_DISABLE=1`` the same file runs alone.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import fabric.client
from fabric.errors import ConfigError

BYTES = 256
CORPUS_BYTES = 4 << 20
CONTEXT = 64
MICRO_BATCH = 2
# Divisible by two and by three: three replicas have equal shares, and after a death two replicas have, too.
MICRO_BATCHES = 12
LEARNING_RATE = 1e-3


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
    """A small GPT with tied input and output bytes.

    Returns logits (batch, time, 256) for the byte that follows each of ``tokens`` (batch, time) int64.
    """

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


def read_corpus(limit: int = CORPUS_BYTES) -> bytes:
    """Return the first ``limit`` bytes of the sorted top-level modules of the standard library.

    Raises ConfigError where the interpreter comes without its sources.
    """
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= limit:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if not parts:
        raise ConfigError("This Python has no standard library sources; install one that has them.")
    return b"".join(parts)[:limit]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i: bytes [i*context, (i+1)*context) as int64, and the same range shifted by one byte."""

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a tenth of the run warms up, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    part = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, part)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of ``batch`` = (tokens, targets), each (samples, CONTEXT)."""
    tokens, targets = batch
    logits = model(tokens)
    return functional.cross_entropy(logits.view(-1, BYTES), targets.reshape(-1))


def train(steps: int) -> None:
    """Train to committed step ``steps``; returns when the job is complete."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT(context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps))
    dataset = ByteWindows(read_corpus(), CONTEXT)

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(
        dataset,
        global_batch_size=MICRO_BATCHES * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH,
        seed=0,
    )
    for step in session.steps(data, until=steps):
        for batch in step:
            loss = loss_of(model, batch)
            step.backward(loss)
            tokens = batch[1].numel()
            session.metrics(loss=loss.item() * tokens, tokens=tokens)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="train to this committed step")
    train(parser.parse_args().steps)


if __name__ == "__main__":
    main()
