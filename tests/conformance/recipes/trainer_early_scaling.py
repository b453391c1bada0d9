"""A training_step that scales the gradients which its micro-batches have added up."""

import recipe
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

AREA = "transformers"
NEEDS = ("transformers",)
LAUNCH = "--adopt"
REFUSED = "the script changes gradients after a backward pass"


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 150

    def __getitem__(self, index):
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Scaling(Trainer):
    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        for p in self.model.parameters():
            p.grad.mul_(0.5)
        return loss


set_seed(7)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **size))
arguments = TrainingArguments(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 4 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Scaling(model, arguments, train_dataset=Sentences())
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step)
