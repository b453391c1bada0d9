"""FabricTrainer: one changed import in a script that uses the Trainer of transformers."""

import os
import time

import torch
from toy import PAUSE_S, STEPS
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from fabric.integrations.transformers import FabricTrainer as Trainer

EVERY = int(os.environ.get("EXAMPLE_EVERY", "10"))  # steps from one evaluation and checkpoint to the next


class Sentences(torch.utils.data.Dataset):
    """Random tokens; a third of the labels, more or less, are not to be predicted."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, 64, (count, 16), generator=generator)
        self.masked = torch.rand(count, 16, generator=generator) < 0.3

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        time.sleep(PAUSE_S)
        return {"input_ids": self.tokens[i], "labels": self.tokens[i].masked_fill(self.masked[i], -100)}


def main() -> None:
    set_seed(7)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **size))
    arguments = TrainingArguments(
        output_dir=os.environ.get("EXAMPLE_OUTPUT", "transformers-out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_steps=EVERY,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(150, 1), eval_dataset=Sentences(8, 2))
    trainer.train(resume_from_checkpoint=os.environ.get("EXAMPLE_CHECKPOINT"))
    trainer.save_model()


if __name__ == "__main__":
    main()
