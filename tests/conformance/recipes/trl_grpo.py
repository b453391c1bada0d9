"""trl's GRPOTrainer with steps_per_generation=1: each reward group has the completions of one prompt.

Completions are drawn at random. So the training without fabric is another one, and the replicas are compared.
"""

import recipe
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

AREA = "trl"
NEEDS = ("trl",)
LAUNCH = "--adopt"
UNLIKE = ("single", "killed")
STEPS = 24
WORDS = [f"w{i}" for i in range(60)]

vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)


def reward(prompts, completions, **_):
    for begin in range(0, len(prompts), 4):
        assert len(set(prompts[begin : begin + 4])) == 1, "a group with several prompts"
    return [float(text.count("w1")) for text in completions]


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            recipe.note(state.global_step - 1, tokens=logs["num_tokens"], reward=logs["reward"])


set_seed(7)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, **size))
arguments = GRPOConfig(
    output_dir=str(recipe.OUT),
    per_device_train_batch_size=8,
    gradient_accumulation_steps=recipe.GLOBAL_BATCH // 8 // recipe.REPLICAS,
    steps_per_generation=1,
    num_generations=4,
    max_completion_length=6,
    top_p=0.95,
    top_k=40,
    min_p=0.001,
    repetition_penalty=1.05,
    generation_kwargs={"no_repeat_ngram_size": 4},
    max_steps=recipe.STEPS,
    learning_rate=3e-3,
    logging_steps=1,
    gradient_checkpointing=False,
    bf16=False,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
rows = Dataset.from_list([{"prompt": f"w{i % 60} w{i * 7 % 60}"} for i in range(60)])
trainer = GRPOTrainer(
    model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=rows,
    processing_class=tokenizer,
    callbacks=[Notes()],
)
trainer.train()
recipe.report(trainer.model, steps=trainer.state.global_step, tokens=trainer.state.num_input_tokens_seen)
