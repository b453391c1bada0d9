"""The rows that say how FabricTrainer treats each argument and method of the Trainer of transformers."""

import operator
from collections.abc import Mapping
from typing import Any

from fabric.client.loop.later_changes import refuse_later_hooks
from fabric.errors import ConfigError
from fabric.integrations.arguments import UNEQUAL, ArgumentTable
from fabric.integrations.huggingface import trl
from fabric.integrations.user_source import Hooks, collective, kept_value

BY = "FabricTrainer"


ARGUMENTS = ArgumentTable(
    "TrainingArguments",
    BY,
    """
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm bf16 label_smoothing_factor logging_strategy logging_steps
        logging_first_step logging_nan_inf_filter eval_strategy eval_steps eval_delay eval_on_start
        metric_for_best_model greater_is_better remove_unused_columns label_names | kept |
        test_an_argument_is_kept
    per_device_train_batch_size gradient_accumulation_steps | kept |
        test_it_reads_the_samples_of_the_trainers_own_order_in_every_pass
    num_train_epochs seed data_seed dataloader_drop_last | kept | test_it_ends_a_pass_as_the_trainer_does
    learning_rate load_best_model_at_end save_total_limit save_strategy | kept |
        test_early_stopping_loads_the_best_model
    max_steps | kept | test_max_steps_end_in_mid_pass
    train_sampling_strategy | kept | test_a_sequential_strategy_is_kept
    include_num_input_tokens_seen | kept | recipe trainer_plain
    length_column_name | idle | it goes with train_sampling_strategy
    output_dir save_steps use_cpu | kept | recipe trainer_early_stopping
    resume_from_checkpoint | idle | the Trainer does not read it: give it to train()
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs save_only_model restore_callback_states_from_checkpoint | idle | as
        without fabric, in the model's forward or a checkpoint
    report_to | kept | recipe trainer_tensorboard
    fp16 | kept | recipe trainer_scaler
    neftune_noise_alpha | idle | as without fabric; the noise depends on seed and step
    dataloader_num_workers dataloader_multiprocessing_context | kept |
        test_workers_draw_the_same_numbers_as_the_trainer_itself
    optim | refused | its state or its update cannot be kept equal: choose one such as optim="adamw_torch"
    average_tokens_across_devices | refused | the tokens of all replicas weigh the same: choose True
    auto_find_batch_size | refused | all replicas need one batch size: choose it yourself
    save_on_each_node | refused | one replica writes the files: choose False, and a shared output_dir
    enable_jit_checkpoint | refused | a replica that gets SIGTERM leaves the job, and the others go on: choose
        False
    push_to_hub | refused | replicas would push at the same time: call trainer.push_to_hub() at the end
    parallelism_config fsdp deepspeed | refused | a replica is one process: choose FABRIC_LAYOUT and
        torchtitan for models that need several
    fsdp_config | idle | it goes with fsdp
    ignore_data_skip | idle | refused by train(resume_from_checkpoint=...)
    accelerator_config | idle | its own fields are accounted for
    optim_target_modules | idle | it goes with optimizers that are refused
    bf16_full_eval fp16_full_eval tf32 torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
        liger_kernel_config use_cache torch_empty_cache_steps dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor per_device_eval_batch_size
        eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics
        full_determinism debug skip_memory_metrics dataloader_in_order | idle | it concerns speed and memory
    log_on_each_node log_level log_level_replica disable_tqdm run_name project trackio_space_id
        trackio_bucket_id trackio_static_space_id prediction_loss_only include_for_metrics hub_token
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision do_train do_eval do_predict |
        idle | it concerns files, logs or the screen
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout local_rank | idle | no process group of torch has more than one process
    """,
    {
        "optim": lambda given: not UNEQUAL.search(str(getattr(given, "value", given))),
        "fsdp": operator.not_,
    },
)

ACCELERATOR = ArgumentTable(
    "accelerator_config",
    BY,
    """
    split_batches | refused | fabric deals out the batches: choose False
    dispatch_batches | refused | every replica reads its own part of the data: leave it out
    even_batches | idle | no process group of torch has more than one process
    use_seedable_sampler | idle | the order depends on the seed and the pass alone
    gradient_accumulation_kwargs | kept | test_an_argument_is_kept
    non_blocking | idle | it concerns speed and memory
    use_configured_state | idle | it says where the accelerator's state comes from
    """,
)

TRAINER = ArgumentTable(
    "Trainer",
    BY,
    """
    model args train_dataset | kept | test_it_reads_the_samples_of_the_trainers_own_order_in_every_pass
    data_collator compute_loss_func compute_metrics optimizer_cls_and_kwargs preprocess_logits_for_metrics |
        kept | test_an_argument_of_the_trainer_is_kept
    model_init optimizers | kept | test_a_model_or_an_optimizer_that_the_user_makes_is_kept
    eval_dataset | kept | test_an_argument_is_kept
    processing_class | kept | recipe trl_sft
    callbacks | kept | test_a_callback_ends_the_training_after_the_same_step
    """,
    methods="""
    compute_loss training_step create_optimizer create_scheduler create_optimizer_and_scheduler
        get_train_dataloader _get_train_sampler _get_dataloader _prepare_inputs _prepare_input
        _get_num_items_in_batch compute_loss_context_manager autocast_smart_context_manager _clip_grad_norm
        _get_grad_norm get_optimizer_cls_and_kwargs get_decay_parameter_names
        _get_collator_with_removed_columns _remove_unused_columns _set_signature_columns_if_needed evaluate
        _evaluate evaluation_loop predict prediction_step get_eval_dataloader get_test_dataloader
        _get_eval_sampler _determine_best_metric _maybe_log_save_evaluate log store_flos floating_point_ops
        _track_num_input_tokens num_examples _get_learning_rate call_model_init _load_best_model
        _move_model_to_device _wrap_model _validate_args train _prepare_context_parallel_inputs
        _has_mixed_mesh_grads _mixed_mesh_grad_norm create_accelerator_and_postprocess _build_accelerator_args
        add_callback pop_callback remove_callback shared_state | kept | test_an_override_is_called
    _save_checkpoint _save save_model _load_from_checkpoint _load_optimizer_and_scheduler _load_scaler
        _save_scaler _save_optimizer_and_scheduler _load_callback_state | kept |
        test_a_trainer_survives_the_death_of_its_writer_and_resumes_from_its_checkpoints
    get_batch_samples _run_epoch _inner_training_loop | refused | FabricTrainer deals out the micro-batches of
        the whole job: leave it out
    set_initial_training_values get_total_train_batch_size _init_training_state _prepare_for_training
        _finalize_training | refused | the number of steps is that of the whole job: leave it out
    is_world_process_zero _get_output_dir | refused | one replica writes for all: leave it out
    _busy _end_epoch | refused | FabricTrainer has a method of this name: choose another
    _load_rng_state _save_rng_state | idle | fabric seeds every micro-batch
    create_model_card push_to_hub _push_from_checkpoint _finish_current_push init_hf_repo log_metrics
        metrics_format save_metrics save_state is_local_process_zero _issue_warnings_after_load end
        get_learning_rates get_num_trainable_parameters get_optimizer_group | idle | it concerns files, logs
        or the screen
    hyperparameter_search _hp_search_setup _report_to_hp_search _tune_save_checkpoint _update_auto_batch_size
        _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters get_cp_size get_sp_size
        get_tp_size | idle | train() refuses what needs it
    """,
)

CALLBACK = ArgumentTable(
    "TrainerCallback",
    BY,
    """
    on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_pre_optimizer_step
        on_optimizer_step on_substep_end on_step_end on_evaluate on_predict on_save on_log on_prediction_step
        on_push_begin should_log should_evaluate should_save | kept |
        test_callbacks_see_the_events_of_the_trainer
    should_training_stop | kept | test_a_callback_ends_the_training_after_the_same_step
    should_epoch_stop | refused | every epoch is read to its end: set should_training_stop
    """,
)


def refuse(trainer: Any, base: type, resumes: bool, trial: Any) -> None:
    """Raise ConfigError for what cannot be kept equal on all replicas, before anything is changed.

    ``base``: the class whose methods the user's class may override.
    """
    args = trainer.args
    of_framework = type(args).__module__.partition(".")[0] in ("transformers", "trl")
    fields = {name: getattr(args, name) for name in ARGUMENTS.rows if hasattr(args, name)}
    kind = next(x for x in type(args).__mro__ if x.__name__ == "TrainingArguments")
    unknown = {name: getattr(args, name) for name in ARGUMENTS.unknown(kind)} if of_framework else {}
    ARGUMENTS.check(kind, {**fields, **unknown})
    config: Any = args.accelerator_config
    ACCELERATOR.check(type(config), vars(config))
    TRAINER.check_methods(base, type(trainer))
    reason = next((why for why, holds in _conditions(trainer, resumes, trial).items() if holds), None)
    if reason is not None:
        raise ConfigError(f"FabricTrainer cannot keep replicas equal with {reason}")
    trl.refuse(trainer, base)
    things = [trainer, *trainer.callback_handler.callbacks, *trainer.model.modules(), trainer.compute_metrics]
    hooks = Hooks(_RUNNING, _EVALUATING, ("compute_loss", "training_step", "forward"), _SAVES, {})
    called = collective(things, hooks)
    if called:
        raise ConfigError(
            f"{called} under FabricTrainer: leave it out of the training, or use it in an evaluation"
        )
    refuse_later_hooks(things, {"model": trainer.model}, trainer.model)
    kept = kept_value(things, hooks)
    if kept:
        raise ConfigError(
            f"{kept}: make it from self.state.global_step, or return it from state() of a callback that is "
            "an ExportableState"
        )


# Methods that run in each step, and those whose values are shared state or lie in files.
_RUNNING = (
    *("compute_loss", "training_step", "forward", "on_step_begin", "on_pre_optimizer_step"),
    *("on_optimizer_step", "on_substep_end", "on_step_end", "on_epoch_begin", "on_epoch_end"),
)
_EVALUATING = (
    *("evaluate", "evaluation_loop", "prediction_step", "on_evaluate", "on_prediction_step"),
    "__call__",
)  # __call__ of compute_metrics
_SAVES = ("state", "shared_state", "state_dict", "get_extra_state")


def _conditions(trainer: Any, resumes: bool, trial: Any) -> Mapping[str, bool]:
    args = trainer.args
    custom = type(trainer.optimizer) if trainer.optimizer is not None else None
    if trainer.optimizer_cls_and_kwargs is not None:
        custom = trainer.optimizer_cls_and_kwargs[0]
    kind = f"{custom.__module__}.{custom.__qualname__}" if custom is not None else ""
    plugin = next((x for x in ("deepspeed", "fsdp") if getattr(trainer, f"is_{x}_enabled")), "")
    return {
        f"{plugin} spreads a replica over several processes": bool(plugin),
        "a model that is sharded when it is loaded spans several processes": bool(
            getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
        f"a replica of {args.world_size} ranks": args.world_size > 1,
        f"DataParallel over {args.n_gpu} GPUs: give each replica one by CUDA_VISIBLE_DEVICES": args.n_gpu > 1,
        f'the optimizer {kind}: choose one such as optim="adamw_torch"': bool(UNEQUAL.search(kind)),
        'train_sampling_strategy="batch_rebalance", whose batches are those of ranks: choose "random"': (
            args.train_sampling_strategy == "batch_rebalance"
        ),
        "ignore_data_skip=True at resume_from_checkpoint: leave it out, since skipping costs no time": (
            resumes and args.ignore_data_skip
        ),
        "a hyperparameter search": trial is not None,
    }
