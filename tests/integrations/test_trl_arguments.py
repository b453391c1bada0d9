"""Each field and method of trl's trainers has a row; what is called kept trains as without fabric."""

import copy
import os
import zlib

import pytest
import torch
from alone_in_job import adopted, assert_same, attach_alone

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from fabric.errors import ConfigError  # noqa: E402
from fabric.integrations.arguments import Row, overridable  # noqa: E402
from fabric.integrations.huggingface.arguments import TRAINER  # noqa: E402
from fabric.integrations.huggingface.trl import CONFIGS, TRAINERS, own_fields  # noqa: E402
from fabric.integrations.transformers import FabricTrainer  # noqa: E402

REPLICAS = 3
WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 1}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + ' ' }}{% endgeneration %}{% else %}{{ message['content'] + ' ' }}{% endif %}"
    "{% endfor %}"
)

# By field: values that differ from the default, and other fields that the value needs.
SFT = {
    "chat_template_path": [{"chat_template_path": "TEMPLATE", "rows": "messages"}],
    "dataset_text_field": [{"dataset_text_field": "body", "rows": "body"}],
    "dataset_kwargs": [{"dataset_kwargs": {"skip_prepare_dataset": True}, "rows": "prepared"}],
    "dataset_num_proc": [{"dataset_num_proc": 1}],
    "eos_token": [{"eos_token": "w3"}],
    "max_length": [{"max_length": 6}],
    "truncation_mode": [{"truncation_mode": "keep_end", "max_length": 6}],
    "shuffle_dataset": [{"shuffle_dataset": True}],
    "packing_strategy": [{"packing_strategy": "wrapped", "packing": True, "max_length": 6}],
    "padding_free": [{"padding_free": True, "max_length": None}],
    "pad_to_multiple_of": [{"pad_to_multiple_of": 8}],
    "completion_only_loss": [{"completion_only_loss": False}],
    "assistant_only_loss": [{"assistant_only_loss": True, "rows": "messages"}],
    "loss_type": [{"loss_type": "dft"}],
    "pad_token": [{"pad_token": "<unk>"}],
}
DPO = {
    "router_aux_loss_coef": [{"router_aux_loss_coef": 0.3, "experts": True}],
    "disable_dropout": [{"disable_dropout": False}],
    "dataset_num_proc": [{"dataset_num_proc": 1}],
    "max_length": [{"max_length": 6}],
    "truncation_mode": [{"truncation_mode": "keep_end", "max_length": 6}],
    "padding_free": [{"padding_free": True}],
    "pad_to_multiple_of": [{"pad_to_multiple_of": 8}],
    "precompute_ref_log_probs": [{"precompute_ref_log_probs": True}],
    "precompute_ref_batch_size": [{"precompute_ref_log_probs": True, "precompute_ref_batch_size": 5}],
    "loss_type": [
        *({"loss_type": [x]} for x in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")),
        *({"loss_type": [x]} for x in ("apo_down", "discopop", "sft", "sigmoid_norm", "aot", "aot_unpaired")),
    ],
    "loss_weights": [{"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 2.0]}],
    "ld_alpha": [{"ld_alpha": 0.5}],
    "f_divergence_type": [{"f_divergence_type": "js_divergence"}],
    "f_alpha_divergence_coef": [
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4},
    ],
    "label_smoothing": [
        {"label_smoothing": 0.1, "loss_type": [x]} for x in ("sigmoid", "robust", "exo_pair")
    ],
    "beta": [{"beta": 0.5}],
    "use_weighting": [{"use_weighting": True}],
    "discopop_tau": [{"loss_type": ["discopop"], "discopop_tau": 0.5}],
    "pad_token": [{"pad_token": "<unk>"}],
}
_VESPO = {"loss_type": "vespo"}
GRPO = {
    "router_aux_loss_coef": [{"router_aux_loss_coef": 0.3, "experts": True}],
    "disable_dropout": [{"disable_dropout": True}],
    "cast_lm_head_to_fp32": [{"cast_lm_head_to_fp32": True}],
    "shuffle_dataset": [{"shuffle_dataset": False}],
    "pad_to_multiple_of": [{"pad_to_multiple_of": 8}],
    "temperature": [{"temperature": 0.7}],
    "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    "beta": [{"beta": 0.2}],
    "epsilon": [{"epsilon": 0.1}],
    "epsilon_high": [{"epsilon_high": 0.3}],
    "delta": [{"delta": 1.5}],
    "sapo_temperature_neg": [{"loss_type": "sapo", "sapo_temperature_neg": 0.9}],
    "sapo_temperature_pos": [{"loss_type": "sapo", "sapo_temperature_pos": 0.9}],
    "vespo_k_pos": [{**_VESPO, "vespo_k_pos": 2.5}],
    "vespo_lambda_pos": [{**_VESPO, "vespo_lambda_pos": 2.5}],
    "vespo_k_neg": [{**_VESPO, "vespo_k_neg": 2.5}],
    "vespo_lambda_neg": [{**_VESPO, "vespo_lambda_neg": 2.5}],
    "importance_sampling_level": [{"importance_sampling_level": "sequence"}],
    "reward_weights": [{"reward_weights": [2.0]}],
    "loss_type": [{"loss_type": x} for x in ("grpo", "dr_grpo", "bnpo", "cispo", "luspo")],
    "mask_truncated_completions": [{"mask_truncated_completions": True}],
    "entropy_coef": [{"entropy_coef": 0.1}],
    "off_policy_mask_threshold": [{"off_policy_mask_threshold": 0.5}],
    "use_bias_correction_kl": [{"use_bias_correction_kl": False, "beta": 0.2}],
}
VALUES = {"SFTTrainer": SFT, "DPOTrainer": DPO, "GRPOTrainer": GRPO}
CASES = [
    (kind, field, i) for kind, fields in VALUES.items() for field in fields for i in range(len(fields[field]))
]
REFUSED = [
    ("SFTTrainer", {"router_aux_loss_coef": 0.3, "experts": True}, "router_aux_loss_coef=0.3"),
    ("SFTTrainer", {"experts": True}, "router_aux_loss_coef=0.001"),
    ("DPOTrainer", {"sync_ref_model": True}, "sync_ref_model=True"),
    ("GRPOTrainer", {"steps_per_generation": 2}, "steps_per_generation=2"),
    ("GRPOTrainer", {"num_iterations": 2}, "num_iterations=2"),
    ("GRPOTrainer", {"scale_rewards": "batch"}, "scale_rewards='batch'"),
    (
        "GRPOTrainer",
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation='normalize_then_sum'",
    ),
    ("GRPOTrainer", {"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
    ("GRPOTrainer", {"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
    ("GRPOTrainer", {"log_completions": True}, "log_completions=True"),
]


@pytest.fixture(autouse=True)
def same_environment():
    """Put ``os.environ`` back: a map of datasets with ``num_proc`` leaves a copy in its place."""
    before = os.environ
    yield
    os.environ = before  # noqa: B003  (the object of before, not a new one)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    attach_alone(monkeypatch, REPLICAS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)


class DrawnSFT(trl.SFTTrainer):
    """trl's, under a name of the user's own."""


class DrawnDPO(trl.DPOTrainer):
    """trl's, under a name of the user's own."""


class DrawnGRPO(trl.GRPOTrainer):
    """Its completions are a function of the prompt and of the place in the group, in place of random ones."""

    def _generate_single_turn(self, prompt_ids, *arguments, **named):
        drawn = [zlib.crc32(str((prompt, i % 2)).encode()) for i, prompt in enumerate(prompt_ids)]
        return [[3 + (x >> s) % 57 for s in range(2 + x % 4)] + [1] * (x % 2) for x in drawn], None


KINDS = {"SFTTrainer": DrawnSFT, "DPOTrainer": DrawnDPO, "GRPOTrainer": DrawnGRPO}


def tokenizer(side):
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side=side
    )
    made.chat_template = TEMPLATE
    return made


def row(kind, form, i):
    words = [WORDS[(i * 7 + j * (i + 3)) % 60] for j in range(5 + i % 6)]
    prompt, answer = " ".join(words[:2]), " " + " ".join(words[2:])
    if kind == "DPOTrainer":
        return {"prompt": prompt, "chosen": answer, "rejected": " " + " ".join(reversed(words))}
    if kind == "GRPOTrainer":
        return {"prompt": prompt}
    if form == "messages":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]
        return {"messages": turns}
    ids = [VOCABULARY[x] for x in words]
    forms = {"body": {"body": prompt + answer}, "prepared": {"input_ids": ids, "labels": ids}}
    return forms.get(form, {"prompt": prompt, "completion": answer})


def reward(completions, **_):
    return [float(len(text)) + text.count("1") for text in completions]


def trained(kind, made, folder, given, replicas=1):
    given = dict(given)
    form, experts = given.pop("rows", ""), given.pop("experts", False)
    accumulation = 2 * REPLICAS // replicas
    if kind == "GRPOTrainer":
        given = {"steps_per_generation": 1, "num_generations": 2, "max_completion_length": 5, **given}
    if given.get("chat_template_path"):
        path = folder.parent / "template.jinja"
        path.write_text(TEMPLATE)
        given["chat_template_path"] = str(path)
    set_seed(7)
    model = (
        MixtralForCausalLM(MixtralConfig(**SIZE, **TOKENS, num_key_value_heads=2, num_local_experts=2))
        if experts
        else LlamaForCausalLM(LlamaConfig(**SIZE, **TOKENS))
    )
    if kind == "GRPOTrainer" and "beta" in given:  # trl loads the reference model by its name
        model.save_pretrained(folder / "model")
        model = LlamaForCausalLM.from_pretrained(folder / "model")
    config = getattr(trl, CONFIGS[kind].subject)(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        **{"disable_tqdm": True, "log_level": "error", **given},
    )
    rows = Dataset.from_list([row(kind, form, i) for i in range(60)])
    more = {"GRPOTrainer": {"reward_funcs": reward}, "DPOTrainer": {"ref_model": copy.deepcopy(model)}}
    side = "left" if kind == "GRPOTrainer" else "right"
    trainer = made(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer(side), **more.get(kind, {})
    )
    trainer.train()
    return trainer


def test_every_field_argument_and_method_of_the_installed_trl_has_a_row():
    for name, table in CONFIGS.items():
        assert set(own_fields(getattr(trl, table.subject))) == set(table.rows), table.subject
        api = getattr(trl, name)
        assert set(TRAINERS[name].unknown(api)) <= set(TRAINER.rows), name
        assert set(overridable(api)) - set(overridable(FabricTrainer)) <= set(TRAINERS[name].methods), name
        assert set(TRAINERS[name].methods) <= set(overridable(api)), name


def test_each_kept_field_has_values_here_or_a_recipe():
    shown = Row("kept", test_a_kept_field_trains_as_without_fabric.__name__)
    for name, table in CONFIGS.items():
        kept = {x for x, row in table.rows.items() if row == shown}
        assert kept == set(VALUES[name]), name


@pytest.mark.parametrize(("kind", "field", "number"), CASES)
def test_a_kept_field_trains_as_without_fabric(tmp_path, kind, field, number):
    given = VALUES[kind][field][number]
    plain = trained(kind, KINDS[kind], tmp_path / "plain", given)
    ours = trained(kind, adopted(KINDS[kind]), tmp_path / "fabric", given, REPLICAS)
    for log in plain.state.log_history:
        if "policy_loss" in log:  # trl divides it by the micro-batches of one process
            log["policy_loss"] *= REPLICAS
    assert_same(plain, ours)


@pytest.mark.parametrize(("kind", "given", "words"), REFUSED)
def test_a_field_that_cannot_be_kept_is_refused_by_name(tmp_path, kind, given, words):
    with pytest.raises(
        ConfigError, match=rf"^FabricTrainer refuses {CONFIGS[kind].subject}\({words}\), b"
    ) as e:
        trained(kind, adopted(KINDS[kind]), tmp_path, given, REPLICAS)
    assert "\n" not in str(e.value)


def test_a_field_of_a_newer_release_is_refused_unless_it_has_its_default(tmp_path, monkeypatch):
    monkeypatch.delitem(CONFIGS["DPOTrainer"].rows, "beta")
    trained("DPOTrainer", adopted(DrawnDPO), tmp_path / "default", {}, REPLICAS)
    with pytest.raises(ConfigError, match=r"does not know DPOConfig\(beta=0.5\), an argument of a newer rel"):
        trained("DPOTrainer", adopted(DrawnDPO), tmp_path / "given", {"beta": 0.5}, REPLICAS)


def test_a_method_of_a_newer_release_is_refused_where_a_subclass_has_it(tmp_path, monkeypatch):
    monkeypatch.delitem(TRAINERS["GRPOTrainer"].methods, "_generate_single_turn")
    with pytest.raises(ConfigError, match=r"does not know what DrawnGRPO._generate_single_turn changes"):
        trained("GRPOTrainer", adopted(DrawnGRPO), tmp_path, {}, REPLICAS)
