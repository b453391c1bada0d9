"""transformers' Trainer: a language model with unequal numbers of tokens, uneven epochs, its logs."""

import recipe
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
QUICK = True
FILES = ("model/*.safetensors",)


class Sentences(torch.utils.data.Dataset):
    """Random tokens; a part of the labels is not to be predicted."""

    def __len__(self):
        return 150

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, 64, (12,), generator=drawn)
        masked = torch.rand(12, generator=drawn) < 0.3
        return {"input_ids": tokens, "labels": tokens.masked_fill(masked, -100)}


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            figures = {k: v for k, v in logs.items() if "_per_second" not in k and "runtime" not in k}
            recipe.note(state.global_step - 1, **figures)


set_seed(7)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **size))
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 4 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=3e-3,
    warmup_steps=4,
    lr_scheduler_type="cosine",
    logging_steps=1,
    include_num_input_tokens_seen=True,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Notes()])
trainer.train()
trainer.save_model(str(recipe.OUT / "model"))
state = trainer.state
counters = {"tokens": state.num_input_tokens_seen, "flos": state.total_flos, "epoch": state.epoch}
recipe.report(trainer.model, steps=state.global_step, **counters)
