"""Every argument, hook and callback of Lightning that a user may choose: kept, without influence, or refused.

The names come from the installed release. A name without a row here is refused where it is used, so that a
new release cannot change what is trained in silence. docs/adopt/lightning.md has the refusals.
"""

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from fabric.client.loop.later_changes import (
    refuse_changed_batches,
    refuse_early_changes,
    refuse_later_hooks,
)
from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable, Row, rows_of
from fabric.integrations.lightning.release import ROOT
from fabric.integrations.user_source import Hooks, collective, kept_value, skips

_pl: Any = importlib.import_module(ROOT)
_signature: Any = importlib.import_module(f"{ROOT}.utilities.signature_utils")
_BY = "FabricStrategy"
_PACKAGES = (ROOT, "lightning_fabric", "lightning.fabric")
_log = logging.getLogger(__name__)

TRAINER = ArgumentTable(
    "Trainer",
    _BY,
    """
    accelerator | idle | it chooses the replica's device
    strategy max_steps check_val_every_n_epoch enable_checkpointing | kept |
        test_a_trainer_survives_a_kill_and_a_join_with_the_curve_of_an_undisturbed_job
    devices num_nodes | refused | a replica is one process with one device: start more replicas
    precision | refused | a GradScaler is not in the shared state: say "bf16-mixed", "bf16-true" or "32-true"
    logger log_every_n_steps default_root_dir | kept | recipe lightning_csv
    callbacks | kept | test_a_callback_that_has_loaded_a_state_has_it
    fast_dev_run | kept | recipe lightning_fast_dev_run
    max_epochs limit_train_batches | kept | recipe lightning_limited
    min_epochs min_steps | kept | recipe lightning_early_stopping
    max_time | refused | each replica has its own clock, so the replicas would part: say max_steps
    limit_val_batches | idle | every replica validates
    limit_test_batches | idle | it concerns Trainer.test
    limit_predict_batches | idle | it concerns Trainer.predict
    overfit_batches gradient_clip_algorithm | kept | recipe lightning_overfit
    val_check_interval | refused | each replica has its own clock, so the replicas would part: give a number
        of batches, or a part of an epoch
    num_sanity_val_steps | idle | it validates before the training
    enable_progress_bar | idle | it shows progress
    enable_model_summary | idle | it prints
    accumulate_grad_batches gradient_clip_val | kept | recipe lightning_trainer
    deterministic benchmark | idle | it chooses kernels
    inference_mode | idle | it concerns the validation
    use_distributed_sampler | idle | a replica is one process, for which Lightning replaces no sampler
    profiler | idle | it measures
    detect_anomaly | idle | it checks
    barebones | idle | it leaves logging out
    plugins | refused | the plugin is not known to keep replicas equal: leave it out
    sync_batchnorm | idle | a replica is one process: say FabricStrategy(buffers="average")
    reload_dataloaders_every_n_epochs | refused | the job's order of data is agreed when it begins: leave it
        out
    enable_autolog_hparams | idle | it logs hyperparameters
    model_registry | idle | it uploads files
    """,
    {"val_check_interval": lambda x: isinstance(x, int | float)},
)

# Methods that run in each step, and those whose values are shared state.
_RUNNING = (
    *("training_step", "forward", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "lr_scheduler_step"),
    *("configure_gradient_clipping", "on_before_batch_transfer", "on_after_batch_transfer"),
)
_EVALUATING = (
    *("validation_step", "on_validation_start", "on_validation_end", "on_validation_epoch_start"),
    *("on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
)
_SAVES = ("state_dict", "on_save_checkpoint", "get_extra_state")
CALLBACKS: dict[str, Row] = rows_of("""
    Callback Checkpoint | kept | test_a_callback_that_has_loaded_a_state_has_it
    BackboneFinetuning | refused | it adds parameters to the optimizer in mid-training, which a replica that
        joins lacks: give the optimizer all parameters, and set the backbone's learning rate by a scheduler
    BaseFinetuning | refused | it adds parameters to the optimizer in mid-training, which a replica that joins
        lacks: give the optimizer all parameters, and set their learning rates by a scheduler
    BasePredictionWriter | idle | it concerns Trainer.predict
    BatchSizeFinder | refused | it trains outside of the job before the first step: run it in a script without
        fabric, and write its result into the DataLoader
    DeviceStatsMonitor LearningRateMonitor ThroughputMonitor | idle | it logs
    EMAWeightAveraging | kept | recipe lightning_overfit
    EarlyStopping | kept | recipe lightning_early_stopping
    GradientAccumulationScheduler | refused | the number of micro-batches of a step is agreed when the job
        begins: say accumulate_grad_batches
    LambdaCallback | kept | recipe lightning_hooks
    LearningRateFinder | refused | it trains outside of the job before the first step: run it in a script
        without fabric, and write its result into configure_optimizers
    ModelCheckpoint | kept | test_all_replicas_give_a_checkpoint_the_same_name
    ModelPruning | refused | it replaces parameters in mid-training, and the other replicas do not know that:
        prune after the training
    ModelSummary RichModelSummary | idle | it prints
    OnExceptionCheckpoint | idle | it writes a file
    ProgressBar RichProgressBar TQDMProgressBar | idle | it shows progress
    SaveConfigCallback | idle | it writes the file of LightningCLI's settings
    SpikeDetection | refused | it judges the losses of one replica alone: leave it out, and say on_nan
    StochasticWeightAveraging | refused | it replaces the scheduler in mid-training, which a replica that
        joins lacks: take WeightAveraging, and torch's SWALR as the scheduler
    Timer | refused | each replica has its own clock, so the replicas would part: say max_steps
    WeightAveraging | kept | recipe lightning_averaging
    """)

_HOOKS = """
    on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end
        on_train_batch_start on_train_batch_end on_validation_start on_validation_end
        on_validation_epoch_start on_validation_epoch_end on_validation_batch_start on_validation_batch_end
        on_before_optimizer_step on_before_zero_grad on_before_backward on_after_backward | kept | recipe
        lightning_hooks
    on_test_start on_test_end on_test_epoch_start on_test_epoch_end on_test_batch_start on_test_batch_end
        on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end on_predict_batch_start
        on_predict_batch_end | idle | after the training
    """
_STATE = """
    state_dict load_state_dict | kept | test_a_callback_that_has_loaded_a_state_has_it
    on_exception | idle | the training is over
    """
CALLBACK = ArgumentTable(
    "Callback",
    _BY,
    "",
    methods=_HOOKS
    + _STATE
    + """
    setup teardown | kept | recipe lightning_hooks
    on_save_checkpoint | idle | it writes into a file
    on_sanity_check_start on_sanity_check_end | idle | before the training
    on_load_checkpoint | refused | FabricStrategy shares a callback's state_dict: return the state there
    """,
)
_DATA_HOOKS = """
    train_dataloader val_dataloader transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer
        prepare_data setup teardown | kept | recipe lightning_hooks
    test_dataloader | idle | it concerns Trainer.test
    predict_dataloader | idle | it concerns Trainer.predict
    """
DATA_MODULE = ArgumentTable("LightningDataModule", _BY, "", methods=_DATA_HOOKS + _STATE)
MODULE = ArgumentTable(
    "LightningModule",
    _BY,
    "",
    methods=_HOOKS
    + _DATA_HOOKS
    + """
    on_save_checkpoint on_load_checkpoint | kept | test_what_hooks_save_is_shared_state
    training_step forward configure_optimizers | kept |
        test_a_trainer_survives_a_kill_and_a_join_with_the_curve_of_an_undisturbed_job
    validation_step configure_callbacks configure_gradient_clipping clip_gradients backward optimizer_step
        optimizer_zero_grad lr_scheduler_step configure_model on_validation_model_zero_grad
        on_validation_model_eval on_validation_model_train | kept | recipe lightning_hooks
    test_step | idle | it concerns Trainer.test
    predict_step | idle | it concerns Trainer.predict
    manual_backward toggle_optimizer untoggle_optimizer | kept | recipe lightning_manual
    configure_sharded_model | kept | recipe lightning_overfit
    on_test_model_eval on_test_model_train on_predict_model_eval | idle | after the training
    """,
)
SCHEDULER: dict[str, Row] = rows_of("""
    scheduler interval frequency | kept | recipe lightning_trainer
    name | idle | it names a curve
    reduce_on_plateau monitor strict | kept | recipe lightning_plateau
    """)
PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def check_trainer(trainer: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a Trainer that FabricStrategy cannot keep equal, before anything runs."""
    plugin, devices = type(trainer.precision_plugin), _devices(trainer)
    refused = {
        f"devices={devices}": ("devices", devices != 1),
        f"num_nodes={trainer.num_nodes}": ("num_nodes", trainer.num_nodes != 1),
        f'precision="{trainer.precision}"': ("precision", str(trainer.precision).startswith("16")),
        f"plugins={plugin.__name__}": ("plugins", plugin.__name__ not in PRECISIONS),
        f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}": (
            "reload_dataloaders_every_n_epochs",
            bool(trainer.reload_dataloaders_every_n_epochs),
        ),
        "val_check_interval=... of time": (
            "val_check_interval",
            getattr(trainer, "_val_check_time_interval", None) is not None,
        ),
    }
    for shown, (name, holds) in refused.items():
        if holds:
            TRAINER.check_value(name, None, shown)
    new = TRAINER.unknown(_pl.Trainer.__init__)
    TRAINER.check(_pl.Trainer.__init__, {x: getattr(trainer, x) for x in new if hasattr(trainer, x)})
    for callback in trainer.callbacks:
        _check_callback(callback)
    module, data = trainer.lightning_module, trainer.datamodule
    MODULE.check_methods(_pl.LightningModule, type(module), hooks_of(_pl.LightningModule))
    if data is not None:
        DATA_MODULE.check_methods(_pl.LightningDataModule, type(data), hooks_of(_pl.LightningDataModule))
    _check_optimization(trainer)


def check_kept_values(trainer: Any) -> None:
    """Raise ConfigError for a value that the user's hooks keep from step to step and the loss depends on."""
    module = trainer.lightning_module
    given = {"trainer": trainer, "pl_module": module}
    hooks = Hooks(_RUNNING, _EVALUATING, ("training_step", "forward"), _SAVES, given, ("should_stop",))
    things = [module, *trainer.callbacks, *list(module.modules())[1:]]
    called = collective(things, hooks)
    if called:
        raise ConfigError(
            f"{called} under FabricStrategy: leave it out of the training, and log figures with self.log"
        )
    skipping = skips(module, "on_train_batch_start")
    if skipping:
        raise ConfigError(
            f"{skipping} returns -1, which ends an epoch early, and the job's data are dealt out in whole "
            "epochs: give the Trainer limit_train_batches"
        )
    refuse_later_hooks(things, given, module)
    refuse_early_changes(things)
    refuse_changed_batches(things)
    kept = kept_value(things, hooks)
    if kept:
        raise ConfigError(
            f"{kept}: make it from trainer.global_step, keep it in a buffer (register_buffer), or save it in "
            "state_dict of the callback"
        )


def _devices(trainer: Any) -> int:
    """Return how many devices the Trainer was told to use. All devices of the host count as one, with a word:
    Lightning does not keep whether they were given, or chosen by its default "auto"."""
    strategy = trainer.strategy
    named = len(strategy.parallel_devices or [strategy.root_device])
    if named == 1 or named != trainer.accelerator.auto_device_count():
        return named
    if not strategy.has_device:
        _log.warning(
            "fabric: this replica trains on %s alone, although the Trainer found %d devices: start a replica "
            "for each device, or say devices=1",
            strategy.root_device,
            named,
        )
    return 1


def _check_callback(callback: Any) -> None:
    kind = type(callback)
    owner = next(x for x in kind.__mro__ if x.__module__.startswith(_PACKAGES))
    row = CALLBACKS.get(owner.__name__)
    if row is None:
        raise ConfigError(
            f"{_BY} does not know the callback {owner.__name__}, which a newer release has: leave it out"
        )
    if row.kind == "refused":
        raise ConfigError(f"{_BY} refuses the callback {kind.__name__}, because {row.words}")
    if owner is _pl.Callback:
        CALLBACK.check_methods(owner, kind, hooks_of(owner))


def hooks_of(base: Any) -> list[str]:
    """Return the hooks that a subclass of Lightning's class ``base`` may override."""
    owners = [x for x in base.__mro__ if x.__module__.startswith(_PACKAGES)]
    names = {name for owner in owners for name, value in vars(owner).items() if inspect.isfunction(value)}
    return sorted(name for name in names if not name.startswith("_") and name not in _CALLED)


_CALLED = rows_of("""
    all_gather freeze log log_dict lr_schedulers optimizers print save_hyperparameters remove_ignored_hparams
        to_onnx to_tensorrt to_torchscript toggled_optimizer unfreeze load_from_checkpoint apply_to_collection
        cpu cuda double float half to type dtype device | idle | users call these methods, and do not override
        them
    """)


def _check_optimization(trainer: Any) -> None:
    module, optimizers = trainer.lightning_module, trainer.strategy.optimizers
    fit, parts = trainer.fit_loop, ("automatic_optimization", "manual_optimization")
    inner = getattr(fit, "epoch_loop", None)
    for loop in (fit, inner, *(getattr(inner, x, None) for x in parts)):
        if loop is not None and not type(loop).__module__.startswith(ROOT):
            raise ConfigError(
                f"FabricStrategy follows the Trainer's own loops, and this one has a {type(loop).__name__}: "
                "call fabric.client.attach in a loop of your own"
            )
    if len(optimizers) != 1:
        raise ConfigError(
            f"FabricStrategy takes one optimizer, and configure_optimizers gives {len(optimizers)}: call "
            "fabric.client.attach in a loop of your own"
        )
    if _signature.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "FabricStrategy gives training_step the batches of the job, and training_step takes "
            "dataloader_iter: give it the arguments batch and batch_idx"
        )
