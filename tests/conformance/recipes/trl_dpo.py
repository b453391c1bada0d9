"""trl's DPOTrainer: preferences against a frozen reference model, its rewards in the logs."""

import copy

import recipe
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer

AREA = "trl"
NEEDS = ("trl",)
LAUNCH = "--adopt"
WORDS = [f"w{i}" for i in range(60)]


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            names = ("loss", "learning_rate", "num_tokens", "rewards/margins", "logps/chosen")
            recipe.note(state.global_step - 1, **{name: logs[name] for name in names})


vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)


def row(index):
    drawn = torch.Generator().manual_seed(index)
    words = [WORDS[i] for i in torch.randint(0, 60, (4 + index % 9,), generator=drawn)]
    return {"prompt": words[0], "chosen": " " + words[1], "rejected": " " + " ".join(words[2:])}


set_seed(7)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, **size))
arguments = DPOConfig(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 4 // recipe.REPLICAS,
    max_steps=recipe.STEPS,
    learning_rate=3e-3,
    logging_steps=2,
    gradient_checkpointing=False,
    bf16=False,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
rows = Dataset.from_list([row(i) for i in range(150)])
frozen = copy.deepcopy(model)
trainer = DPOTrainer(
    model,
    ref_model=frozen,
    args=arguments,
    train_dataset=rows,
    processing_class=tokenizer,
    callbacks=[Notes()],
)
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, tokens=trainer._total_train_tokens)
