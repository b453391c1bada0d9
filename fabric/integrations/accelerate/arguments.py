"""Every argument and method of the Accelerator: kept, without influence on the training, or refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration

from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable, Row, rows_of

_BY = "FabricAccelerator"

ACCELERATOR = ArgumentTable(
    "Accelerator",
    _BY,
    """
    device_placement | idle | it says where tensors lie
    cpu gradient_accumulation_steps | kept | recipe accelerate_epochs
    gradient_accumulation_plugin dataloader_config | idle | its own fields are accounted for
    step_scheduler_with_optimizer | kept | test_a_scheduler_of_epochs_makes_one_step
    kwargs_handlers | idle | its handlers are accounted for
    mixed_precision | refused | fp8 has not been tried: choose "bf16"
    split_batches | refused | batches are those of one replica: give its batch size
    rng_types | idle | fabric seeds each micro-batch
    log_with | kept | test_a_loop_survives_the_death_of_its_writer_and_resumes_from_its_checkpoints
    project_dir project_config | idle | it is about files
    dynamo_backend dynamo_plugin | refused | a compiled model has not been tried: leave it out
    deepspeed_plugin deepspeed_plugins fsdp_plugin torch_tp_plugin megatron_lm_plugin parallelism_config |
        refused | it spreads a replica over several processes, and FabricAccelerator is one process per
        replica
    """,
    {
        "mixed_precision": lambda x: x in ("no", "fp16", "bf16"),
        # accelerate's own defaults stand for these values.
        "split_batches": lambda x: x is False,
        "dynamo_backend": lambda x: str(getattr(x, "value", x)).lower() == "no",
    },
)
CONFIGURATIONS = {
    DataLoaderConfiguration: ArgumentTable(
        "DataLoaderConfiguration",
        _BY,
        """
    split_batches | refused | batches are those of one replica: give its batch size
    dispatch_batches | idle | each replica reads its own batches
    even_batches | idle | each sample of a pass is used once
    use_seedable_sampler data_seed | idle | Accelerator(seed=) gives the order
    non_blocking | idle | it says how tensors are copied
    use_stateful_dataloader | idle | the committed step gives the position
    custom_classes | idle | it says which objects are moved to the device
    """,
    ),
    GradientAccumulationPlugin: ArgumentTable(
        "GradientAccumulationPlugin",
        _BY,
        """
    num_steps | kept | recipe accelerate_scaler
    adjust_scheduler | idle | schedulers count updates
    sync_with_dataloader | refused | a step ends with its pass: leave it out
    sync_each_batch | idle | gradients are exchanged once for each step
    """,
    ),
    ProjectConfiguration: ArgumentTable(
        "ProjectConfiguration",
        _BY,
        """
    project_dir logging_dir automatic_checkpoint_naming total_limit iteration | idle | it is about files
    save_on_each_node | refused | one replica writes the files: leave it out
    """,
    ),
}
# Handlers of ``kwargs_handlers`` by the names of their classes.
HANDLERS: dict[str, Row] = rows_of("""
    AutocastKwargs GradScalerKwargs | kept | recipe accelerate_scaler
    InitProcessGroupKwargs | idle | accelerate makes no process group here
    ProfileKwargs | idle | it measures
    GradientAccumulationPlugin | idle | its own fields are accounted for
    DistributedDataParallelKwargs | idle | fabric averages the gradients
    """)

METHODS: dict[str, Row] = rows_of("""
    accumulate backward clip_grad_norm_ sync_gradients gradient_accumulation_steps prepare gather_for_metrics
        unwrap_model free_memory | kept | recipe accelerate_epochs
    clip_grad_value_ | kept | test_gradients_are_clipped_by_value_once_a_step
    no_sync | idle | an incomplete step is never exchanged
    autocast | kept | recipe accelerate_scaler
    profile | idle | it measures
    unscale_gradients | idle | clipping and the optimizer do so too
    optimizer_step_was_skipped local_process_index is_local_main_process on_local_main_process
        on_local_process get_tracker get_state_dict verify_device_map device distributed_type project_dir
        logging_dir mixed_precision split_batches dispatch_batches even_batches use_seedable_sampler
        non_blocking multi_device use_stateful_dataloader use_distributed deepspeed_plugin fp8_backend
        is_fsdp2 is_composable_parallelism_enabled parallelism_config torch_device_mesh context_parallel_rank
        data_parallel_rank data_parallel_shard_rank pipeline_parallel_rank tensor_parallel_rank custom_classes
        | idle | it tells or undoes what prepare has done
    prepare_data_loader prepare_model prepare_optimizer prepare_scheduler set_trigger check_trigger
        register_for_checkpointing | kept | recipe accelerate_trigger
    skip_first_batches save_state load_state | kept | recipe accelerate_checkpoints
    gather reduce | kept | test_figures_of_the_training_and_sums_are_refused
    pad_across_processes split_between_processes | idle | every replica has the whole
    wait_for_everyone | idle | replicas meet at each step
    main_process_first local_main_process_first | idle | each replica prepares its own files
    num_processes | kept | test_what_accelerate_reports_is_that_of_the_job
    process_index is_last_process on_main_process on_last_process on_process | kept |
        test_functions_of_one_process_run_on_one_replica
    is_main_process log init_trackers end_training | kept |
        test_a_loop_survives_the_death_of_its_writer_and_resumes_from_its_checkpoints
    print | kept | test_print_acts_on_the_replica_of_is_main_process
    save save_model save_iteration should_save_model register_save_state_pre_hook register_load_state_pre_hook
        | idle | it is about files
    clear | refused | a job is one training in one process: make a script of each
    join_uneven_inputs | refused | replicas share the batches of a step evenly: leave it out
    trigger_sync_in_backward | refused | the last batch of a step is known before: use accumulate
    lomo_backward | refused | it updates parameters before their gradients are averaged: use backward
    maybe_context_parallel deepspeed_ulysses_dl_adapter | refused | it spreads a replica over several
        processes, and FabricAccelerator is one process per replica
    """)


def check_arguments(arguments: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of Accelerator that cannot be kept equal."""
    names = [name for name in Accelerator.__init__.__annotations__ if name != "return"]
    given = {**dict(zip(names, arguments, strict=False)), **named}
    ACCELERATOR.check(Accelerator, given)
    for value in (*given.values(), *(given.get("kwargs_handlers") or ())):
        for kind, table in CONFIGURATIONS.items():
            if isinstance(value, kind):
                table.check(kind, vars(value))
    for handler in given.get("kwargs_handlers") or ():
        name = type(handler).__name__
        if name not in HANDLERS:
            raise ConfigError(
                f"{_BY} refuses {name} in kwargs_handlers, which has not been tried: leave it out"
            )
        hook = getattr(handler, "comm_hook", None)
        if hook is not None and hook != type(handler)().comm_hook:
            raise ConfigError(
                f"{_BY} refuses a comm_hook, because fabric averages the gradients: leave it out"
            )


def check_plugins(accelerator: Any) -> None:
    """Raise ConfigError for what accelerate has from its own environment, such as ``accelerate config``."""
    kind = accelerator.distributed_type
    if kind != DistributedType.NO:
        raise ConfigError(
            f"{_BY} is one process per replica, and accelerate runs {kind.value}: start each replica with "
            "fabric launch, without DeepSpeed, FSDP or several processes"
        )
    ACCELERATOR.check(Accelerator, {"mixed_precision": accelerator.state.mixed_precision})


def refused_methods() -> dict[str, Row]:
    """Return the methods of the installed Accelerator that are refused, or that no row knows."""
    unknown = Row("refused", "it is a method of a newer release that fabric does not know: leave it out")
    names = [x for x in dir(Accelerator) if not x.startswith("_") and callable(getattr(Accelerator, x))]
    rows = {name: METHODS.get(name, unknown) for name in names}
    return {name: row for name, row in rows.items() if row.kind == "refused"}
