"""transformers' Trainer with train_sampling_strategy="group_by_length" and padding to the longest.

Its sampler draws from torch's global generator, so the order of the training without fabric is another one.
"""

import recipe
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
UNLIKE = ("single", "killed")


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 150

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        drawn = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(3, 64, (4 + index % 9,), generator=drawn)}


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([x["input_ids"] for x in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


set_seed(7)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **size))
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    train_sampling_strategy="group_by_length",
    learning_rate=3e-3,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model, arguments, data_collator=pad, train_dataset=Sentences())
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step)
