"""A config registry of torchtitan without a line of fabric: docs/adopt/torchtitan.md says how to start it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

STEPS = int(os.environ.get("EXAMPLE_STEPS", "30"))


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return 2048

    def encode(self, *_: object, **__: object) -> list[int]:
        return []

    decode = encode


class DrawnTokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, dp_world_size, dp_rank, seq_len, local_batch_size, **_) -> None:
        self._ranks, self._rank, self._number = dp_world_size, dp_rank, 0
        self._shape = (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            drawn = torch.Generator().manual_seed(self._number * self._ranks + self._rank)
            tokens = torch.randint(0, 64, self._shape, generator=drawn)
            self._number += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number = state.get("number", 0)


def tiny() -> Trainer.Config:
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dataloader, config.tokenizer = DrawnTokens.Config(), NoTokenizer.Config()
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.training.steps, config.training.disable_cuda_graphs = STEPS, True
    config.dump_folder = os.environ.get("EXAMPLE_OUTPUT", "titan-out")
    config.checkpoint.enable, config.checkpoint.interval = True, 10
    config.validator.enable = False
    return config
