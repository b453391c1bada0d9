"""The trainers of trl: figures that they gather over their processes, and what they cannot keep equal.

A trainer of trl has a list of numbers per figure in ``_metrics["train"]``, and logs the mean. A replica sees
its own micro-batches. So each micro-batch's numbers travel in the step's sums, and every replica takes the
mean.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable, overridable

_SUM, _COUNT, _OWN = "trl.sum.", "trl.count.", "trl.tokens"  # names, or their beginnings, of a step's sums

# By trainer: the fields of its config that TrainingArguments lacks.
CONFIGS = {
    "SFTTrainer": ArgumentTable(
        "SFTConfig",
        "FabricTrainer",
        """
    model_init_kwargs trust_remote_code | idle | each replica loads the same model
    router_aux_loss_coef | refused | the auxiliary loss is not divided by the tokens of the step: choose 0.0
    chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length truncation_mode
        shuffle_dataset packing_strategy padding_free pad_to_multiple_of completion_only_loss
        assistant_only_loss loss_type pad_token | kept | test_a_kept_field_trains_as_without_fabric
    packing | kept | recipe trl_sft_packing
    eval_packing | idle | it concerns evaluations
    activation_offloading | idle | it concerns speed and memory
    """,
    ),
    "DPOTrainer": ArgumentTable(
        "DPOConfig",
        "FabricTrainer",
        """
    model_init_kwargs trust_remote_code | idle | each replica loads the same model
    router_aux_loss_coef disable_dropout dataset_num_proc max_length truncation_mode padding_free
        pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size loss_type loss_weights ld_alpha
        f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau pad_token |
        kept | test_a_kept_field_trains_as_without_fabric
    sync_ref_model | refused | the second model changes in each replica: choose False
    ref_model_mixup_alpha ref_model_sync_steps | idle | it goes with sync_ref_model
    activation_offloading | idle | it concerns speed and memory
    """,
    ),
    "GRPOTrainer": ArgumentTable(
        "GRPOConfig",
        "FabricTrainer",
        """
    model_init_kwargs trust_remote_code | idle | each replica loads the same model
    num_generations max_completion_length top_p top_k min_p generation_kwargs repetition_penalty | kept |
        recipe trl_grpo
    router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 shuffle_dataset pad_to_multiple_of temperature
        chat_template_kwargs beta epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights
        loss_type mask_truncated_completions entropy_coef off_policy_mask_threshold use_bias_correction_kl |
        kept | test_a_kept_field_trains_as_without_fabric
    steps_per_generation | refused | completions would wait in one replica: choose steps_per_generation=1, and
        a per_device_train_batch_size that is a multiple of num_generations
    generation_batch_size | idle | it goes with steps_per_generation
    num_iterations | refused | completions that are used again wait in one replica: choose 1
    use_vllm use_transformers_continuous_batching | refused | it draws random numbers of its own: choose False
    scale_rewards | refused | each replica would see its own completions only: choose "group"
    multi_objective_aggregation | refused | each replica would see its own completions only: choose
        "sum_then_normalize"
    top_entropy_quantile | refused | each replica would see its own completions only: choose 1.0
    use_adaptive_entropy log_completions | refused | each replica would see its own completions only: choose
        False
    sync_ref_model | refused | the second model changes in each replica: choose False
    ref_model_mixup_alpha ref_model_sync_steps | idle | it goes with sync_ref_model
    vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap | idle | it goes with use_vllm
    use_transformers_paged transformers_continuous_batching_config | idle | it goes with
        use_transformers_continuous_batching
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target | idle | it goes with
        use_adaptive_entropy
    log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo | idle | it goes with
        log_completions
    num_generations_eval | idle | it concerns evaluations
    ds3_gather_for_generation | idle | DeepSpeed is refused
    max_tool_calling_iterations | idle | it goes with tools
    cache_implementation | idle | it concerns speed and memory
    """,
        {"steps_per_generation": lambda given: given == 1, "scale_rewards": lambda given: given == "none"},
    ),
}

# By trainer: its arguments and methods that Trainer lacks.
TRAINERS = {
    "SFTTrainer": ArgumentTable(
        "SFTTrainer",
        "FabricTrainer",
        """
    quantization_config peft_config | idle | each replica loads the same model
    formatting_func | kept | test_a_kept_field_trains_as_without_fabric
    """,
        methods="""
    _prepare_dataset _reject_skip_prepare_without_labels | kept | test_a_kept_field_trains_as_without_fabric
    _send_telemetry | idle | it counts the users of trl
    """,
    ),
    "DPOTrainer": ArgumentTable(
        "DPOTrainer",
        "FabricTrainer",
        """
    quantization_config peft_config | idle | each replica loads the same model
    ref_model | kept | recipe trl_dpo
    """,
        methods="""
    _compute_loss _precompute_ref_logps _prepare_dataset compute_ref_log_probs | kept |
        test_a_kept_field_trains_as_without_fabric
    _send_telemetry | idle | it counts the users of trl
    """,
    ),
    "GRPOTrainer": ArgumentTable(
        "GRPOTrainer",
        "FabricTrainer",
        """
    quantization_config peft_config reward_processing_classes | idle | each replica loads the same model
    reward_funcs | kept | recipe trl_grpo
    tools rollout_func environment_factory | refused | it has not been tried: leave it out
    """,
        methods="""
    _calculate_rewards _compute_loss _generate _generate_and_score_completions _generate_single_turn
        _get_per_token_logps_and_entropies _tokenize_prompts _log_metric get_gamma_weights get_off_policy_mask
        | kept | test_a_kept_field_trains_as_without_fabric
    _get_tool_suffix_ids _tool_call_loop | idle | it goes with tools
    get_high_entropy_mask | idle | it goes with top_entropy_quantile
    _log_completion_extra | idle | it goes with log_completions
    _send_telemetry | idle | it counts the users of trl
    """,
    ),
}


class TrlFigures:
    """The figures of ``trainer``; none where the trainer is not one of trl."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        is_of_trl = trl_class(trainer) is not None
        self._lists: Any = trainer._metrics["train"] if is_of_trl else None  # noqa: SLF001
        self._counts_tokens = is_of_trl and hasattr(trainer, "_total_train_tokens")

    @contextlib.contextmanager
    def of_micro_batch(self) -> Iterator[dict[str, float]]:
        """Take the numbers that a micro-batch adds out of the lists, into the yielded sums."""
        sums: dict[str, float] = {}
        if self._lists is None:
            yield sums
            return
        kept = self.state_dict()
        self._lists.clear()
        try:
            yield sums
            for name, numbers in self._lists.items():
                valid = [x for x in numbers if x == x]  # trl leaves out what is not a number
                if valid and name != "num_tokens":
                    sums |= {_SUM + name: float(sum(valid)), _COUNT + name: float(len(valid))}
            tokens = self._tokens() - kept["tokens"][0]
            sums |= {_OWN: float(tokens)} if tokens else {}
        finally:
            self.load_state_dict(kept)

    def add_step(self, totals: Mapping[str, float]) -> None:
        """Add the numbers of a whole step of the job."""
        if self._lists is None:
            return
        self._set_tokens(self._tokens() + totals.get(_OWN, 0.0))
        for name in sorted(totals):
            if name.startswith(_SUM):
                figure, count = name.removeprefix(_SUM), int(totals[_COUNT + name.removeprefix(_SUM)])
                self._lists[figure] += [totals[name] / count] * count
                seen = self._trainer.state.num_input_tokens_seen + int(totals.get("tokens", 0.0))
                self._lists["num_tokens"] = [self._tokens() or seen]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the numbers that no log has yet, and the tokens that the trainer counts itself."""
        if self._lists is None:
            return {}
        return {**{name: list(x) for name, x in sorted(self._lists.items())}, "tokens": [self._tokens()]}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        if self._lists is not None:
            self._lists.clear()
            self._lists.update({name: list(x) for name, x in state.items() if name != "tokens"})
            self._set_tokens(state["tokens"][0])

    def _tokens(self) -> int:
        """Return the tokens since the training began, where the trainer counts them itself; else 0."""
        return int(self._trainer._total_train_tokens) if self._counts_tokens else 0  # noqa: SLF001

    def _set_tokens(self, tokens: float) -> None:
        if self._counts_tokens:
            self._trainer._total_train_tokens = int(tokens)  # noqa: SLF001


def trl_class(trainer: Any) -> type | None:
    """Return the class of trl that ``trainer`` is an instance of, or None."""
    classes = (
        x for x in type(trainer).__mro__ if x.__module__.startswith("trl.") and "_metrics" in vars(trainer)
    )
    return next(classes, None)


def refuse(trainer: Any, base: type) -> None:
    """Raise ConfigError for what a trainer of trl cannot keep equal. ``base``: the class below trl's."""
    own, args = trl_class(trainer), trainer.args
    if own is None:
        return
    if own.__name__ not in CONFIGS:
        raise ConfigError(
            f"FabricTrainer does not know the {own.__name__} of trl: choose one of {', '.join(CONFIGS)}"
        )
    table, api = CONFIGS[own.__name__], TRAINERS[own.__name__]
    config = next(x for x in type(args).__mro__ if x.__name__ == table.subject)
    given = {name: getattr(args, name) for name in own_fields(config)}
    if getattr(trainer, "aux_loss_enabled", False):
        given["router_aux_loss_coef"] = trainer.router_aux_loss_coef  # of the model, if the user chose none
    table.check(config, given)
    made = {**vars(trainer), "environment_factory": getattr(trainer, "environment_factories", None)}
    api.check(own, {name: made[name] for name in api.rows if made.get(name)})
    api.check_methods(own, type(trainer), set(overridable(own)) - set(overridable(base)))


def own_fields(config: type) -> list[str]:
    """Return the fields of a config of trl that TrainingArguments lacks."""
    shared = {x.name for x in dataclasses.fields(TrainingArguments)}
    fields: Any = dataclasses.fields(config)
    return [x.name for x in fields if x.name not in shared]
