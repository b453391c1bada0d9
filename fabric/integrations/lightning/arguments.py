"""Every argument, hook and callback of Lightning that a user may choose: kept, without influence, or refused.

The names come from the installed release. A name without a row here is refused where it is used, so that a
new release cannot change what is trained in silence. docs/adopt/lightning.md has the refusals.
"""

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from fabric.client.loop.later_changes import refuse_later_hooks
from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable, Kept, NoInfluence, Refusal, Row, refusals, rows_of
from fabric.integrations.hook_source import Hooks, collective, kept_value, skips
from fabric.integrations.lightning.release import ROOT
from fabric.integrations.lightning.run_files import overrides

_pl: Any = importlib.import_module(ROOT)
_signature: Any = importlib.import_module(f"{ROOT}.utilities.signature_utils")
_BY = "FabricStrategy"
_log = logging.getLogger(__name__)
_CLOCK = "each replica has its own clock, so the replicas would part"
_JOB = Kept("test_a_trainer_survives_a_kill_and_a_join_with_the_curve_of_an_undisturbed_job")
_ONE = "a replica is one process with one device: start more replicas"

TRAINER = ArgumentTable(
    "Trainer",
    _BY,
    {
        "accelerator": NoInfluence("it chooses the replica's device"),
        **rows_of(_JOB, "strategy max_steps check_val_every_n_epoch enable_checkpointing"),
        **rows_of(Refusal(_ONE), "devices num_nodes"),
        "precision": Refusal(
            'a GradScaler is not in the shared state: say "bf16-mixed", "bf16-true" or "32-true"'
        ),
        **rows_of(Kept("recipe lightning_csv"), "logger log_every_n_steps default_root_dir"),
        "callbacks": Kept("test_a_callback_that_has_loaded_a_state_has_it"),
        "fast_dev_run": Kept("recipe lightning_fast_dev_run"),
        **rows_of(Kept("recipe lightning_limited"), "max_epochs limit_train_batches"),
        **rows_of(Kept("recipe lightning_early_stopping"), "min_epochs min_steps"),
        "max_time": Refusal(f"{_CLOCK}: say max_steps"),
        "limit_val_batches": NoInfluence("every replica validates"),
        "limit_test_batches": NoInfluence("it concerns Trainer.test"),
        "limit_predict_batches": NoInfluence("it concerns Trainer.predict"),
        **rows_of(Kept("recipe lightning_overfit"), "overfit_batches gradient_clip_algorithm"),
        "val_check_interval": Refusal(
            f"{_CLOCK}: give a number of batches, or a part of an epoch", lambda x: isinstance(x, int | float)
        ),
        "num_sanity_val_steps": NoInfluence("it validates before the training"),
        "enable_progress_bar": NoInfluence("it shows progress"),
        "enable_model_summary": NoInfluence("it prints"),
        **rows_of(Kept("recipe lightning_trainer"), "accumulate_grad_batches gradient_clip_val"),
        **rows_of(NoInfluence("it chooses kernels"), "deterministic benchmark"),
        "inference_mode": NoInfluence("it concerns the validation"),
        "use_distributed_sampler": NoInfluence(
            "a replica is one process, for which Lightning replaces no sampler"
        ),
        "profiler": NoInfluence("it measures"),
        "detect_anomaly": NoInfluence("it checks"),
        "barebones": NoInfluence("it leaves logging out"),
        "plugins": Refusal("the plugin is not known to keep replicas equal: leave it out"),
        "sync_batchnorm": NoInfluence('a replica is one process: say FabricStrategy(buffers="average")'),
        "reload_dataloaders_every_n_epochs": Refusal(
            "the job's order of data is agreed when it begins: leave it out"
        ),
        "enable_autolog_hparams": NoInfluence("it logs hyperparameters"),
        "model_registry": NoInfluence("it uploads files"),
    },
)

# Methods that run in each step, and those whose values are shared state.
_RUNNING = [
    "training_step",
    "forward",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
]
_EVALUATING = (
    *("validation_step", "on_validation_start", "on_validation_end", "on_validation_epoch_start"),
    *("on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
)
_SAVES = ("state_dict", "on_save_checkpoint", "get_extra_state")
_OWN = Kept("test_a_callback_that_has_loaded_a_state_has_it")
_SAVED = Kept("test_what_hooks_save_is_shared_state")
_HOOK = Kept("recipe lightning_hooks")
CALLBACKS: dict[str, Row] = {
    **rows_of(_OWN, "Callback Checkpoint"),
    "BackboneFinetuning": Refusal(
        "it adds parameters to the optimizer in mid-training, which a replica that joins lacks: give the "
        "optimizer all parameters, and set the backbone's learning rate by a scheduler"
    ),
    "BaseFinetuning": Refusal(
        "it adds parameters to the optimizer in mid-training, which a replica that joins lacks: give the "
        "optimizer all parameters, and set their learning rates by a scheduler"
    ),
    "BasePredictionWriter": NoInfluence("it concerns Trainer.predict"),
    "BatchSizeFinder": Refusal(
        "it trains outside of the job before the first step: run it in a script without fabric, and write "
        "its result into the DataLoader"
    ),
    **rows_of(NoInfluence("it logs"), "DeviceStatsMonitor LearningRateMonitor ThroughputMonitor"),
    "EMAWeightAveraging": Kept("recipe lightning_overfit"),
    "EarlyStopping": Kept("recipe lightning_early_stopping"),
    "GradientAccumulationScheduler": Refusal(
        "the number of micro-batches of a step is agreed when the job begins: say accumulate_grad_batches"
    ),
    "LambdaCallback": _HOOK,
    "LearningRateFinder": Refusal(
        "it trains outside of the job before the first step: run it in a script without fabric, and write "
        "its result into configure_optimizers"
    ),
    "ModelCheckpoint": Kept("test_all_replicas_give_a_checkpoint_the_same_name"),
    "ModelPruning": Refusal(
        "it replaces parameters in mid-training, and the other replicas do not know that: prune after the "
        "training"
    ),
    **rows_of(NoInfluence("it prints"), "ModelSummary RichModelSummary"),
    "OnExceptionCheckpoint": NoInfluence("it writes a file"),
    **rows_of(NoInfluence("it shows progress"), "ProgressBar RichProgressBar TQDMProgressBar"),
    "SpikeDetection": Refusal("it judges the losses of one replica alone: leave it out, and say on_nan"),
    "StochasticWeightAveraging": Refusal(
        "it replaces the scheduler in mid-training, which a replica that joins lacks: take WeightAveraging, "
        "and torch's SWALR as the scheduler"
    ),
    "Timer": Refusal(f"{_CLOCK}: say max_steps"),
    "WeightAveraging": Kept("recipe lightning_averaging"),
}

_HOOKS: dict[str, Row] = {
    **{f"on_{x}_{y}": _HOOK for x in ("fit", "train", "validation") for y in ("start", "end")},
    **{f"on_{x}_epoch_{y}": _HOOK for x in ("train", "validation") for y in ("start", "end")},
    **{f"on_{x}_batch_{y}": _HOOK for x in ("train", "validation") for y in ("start", "end")},
    **{
        f"on_{x}_{y}": NoInfluence("after the training")
        for x in ("test", "predict")
        for y in ("start", "end")
    },
    **{
        f"on_{x}_{z}_{y}": NoInfluence("after the training")
        for x in ("test", "predict")
        for y in ("start", "end")
        for z in ("batch", "epoch")
    },
    **dict.fromkeys(("on_before_optimizer_step", "on_before_zero_grad"), _HOOK),
    **dict.fromkeys(("on_before_backward", "on_after_backward"), _HOOK),
}
_STATE: dict[str, Row] = {
    "state_dict": _OWN,
    "load_state_dict": _OWN,
    "on_exception": NoInfluence("the training is over"),
}
CALLBACK_HOOKS: dict[str, Row] = {
    **_HOOKS,
    **_STATE,
    "setup": _HOOK,
    "teardown": _HOOK,
    "on_save_checkpoint": NoInfluence("it writes into a file"),
    "on_sanity_check_start": NoInfluence("before the training"),
    "on_sanity_check_end": NoInfluence("before the training"),
    "on_load_checkpoint": Refusal("FabricStrategy shares a callback's state_dict: return the state there"),
}
_STEPS: dict[str, Row] = {
    **rows_of(_JOB, "training_step forward configure_optimizers"),
    **rows_of(
        _HOOK,
        "validation_step configure_callbacks configure_gradient_clipping clip_gradients backward "
        "optimizer_step optimizer_zero_grad lr_scheduler_step",
    ),
    "test_step": NoInfluence("it concerns Trainer.test"),
    "predict_step": NoInfluence("it concerns Trainer.predict"),
    **rows_of(Kept("recipe lightning_manual"), "manual_backward toggle_optimizer untoggle_optimizer"),
}
_READING = ("train_dataloader", "val_dataloader", "transfer_batch_to_device")
_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")
DATA_HOOKS: dict[str, Row] = {
    **dict.fromkeys((*_READING, *_TRANSFER), _HOOK),
    "test_dataloader": NoInfluence("it concerns Trainer.test"),
    "predict_dataloader": NoInfluence("it concerns Trainer.predict"),
    **dict.fromkeys(("prepare_data", "setup", "teardown"), _HOOK),
}
DATA_MODULE_HOOKS: dict[str, Row] = {**DATA_HOOKS, **_STATE}
MODULE_HOOKS: dict[str, Row] = {
    **_HOOKS,
    "on_save_checkpoint": _SAVED,
    "on_load_checkpoint": _SAVED,
    **_STEPS,
    **DATA_HOOKS,
    "configure_model": _HOOK,
    "configure_sharded_model": Kept("recipe lightning_overfit"),
    "on_validation_model_zero_grad": _HOOK,
    **{f"on_validation_model_{x}": _HOOK for x in ("eval", "train")},
    **{f"on_test_model_{x}": NoInfluence("after the training") for x in ("eval", "train")},
    "on_predict_model_eval": NoInfluence("after the training"),
}
SCHEDULER: dict[str, Row] = {
    **rows_of(Kept("recipe lightning_trainer"), "scheduler interval frequency"),
    "name": NoInfluence("it names a curve"),
    **rows_of(Kept("recipe lightning_plateau"), "reduce_on_plateau monitor strict"),
}
PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def check_trainer(trainer: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a Trainer that FabricStrategy cannot keep equal, before anything runs."""
    _check_arguments(trainer)
    for callback in trainer.callbacks:
        _check_callback(callback)
    module, data = trainer.lightning_module, trainer.datamodule
    _check_hooks("LightningModule", module, _pl.LightningModule, MODULE_HOOKS)
    if data is not None:
        _check_hooks("LightningDataModule", data, _pl.LightningDataModule, DATA_MODULE_HOOKS)
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
    kept = kept_value(things, hooks)
    if kept:
        raise ConfigError(
            f"{kept}: make it from trainer.global_step, keep it in a buffer (register_buffer), or save it in "
            "state_dict of the callback"
        )


def _check_arguments(trainer: Any) -> None:
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
    for argument, (name, holds) in refused.items():
        if holds:
            raise ConfigError(f"{_BY} refuses Trainer({argument}), because {_why(TRAINER.rows[name])}")
    new = TRAINER.unknown(_pl.Trainer.__init__)
    TRAINER.check(_pl.Trainer.__init__, {x: getattr(trainer, x) for x in new if hasattr(trainer, x)})


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
    owner = next(
        x for x in kind.__mro__ if x.__module__.startswith((ROOT, "lightning_fabric", "lightning.fabric"))
    )
    row = CALLBACKS.get(owner.__name__)
    if row is None:
        raise ConfigError(
            f"{_BY} does not know the callback {owner.__name__}, which a newer release has: leave it out"
        )
    if isinstance(row, Refusal):
        raise ConfigError(f"{_BY} refuses the callback {kind.__name__}, because {row.why}")
    if owner is _pl.Callback:
        _check_hooks("Callback", callback, _pl.Callback, CALLBACK_HOOKS)


def _check_hooks(subject: str, thing: Any, base: Any, rows: Mapping[str, Row]) -> None:
    """Raise ConfigError where ``thing`` overrides a hook of ``base`` that is refused or has no row."""
    for name in hooks_of(base):
        row = rows.get(name)
        if isinstance(row, Kept | NoInfluence) or not overrides(thing, base, name):
            continue
        kind = type(thing).__name__
        if row is None:
            raise ConfigError(
                f"{_BY} does not know what {kind}.{name} changes, a hook of {subject} in a newer release: "
                "leave it out"
            )
        raise ConfigError(f"{_BY} refuses {kind}.{name}, because {row.why}")


def hooks_of(base: Any) -> list[str]:
    """Return the hooks that a subclass of Lightning's class ``base`` may override."""
    owners = [
        x for x in base.__mro__ if x.__module__.startswith((ROOT, "lightning_fabric", "lightning.fabric"))
    ]
    names = {name for owner in owners for name, value in vars(owner).items() if inspect.isfunction(value)}
    return sorted(name for name in names if not name.startswith("_") and name not in CALLED)


# Methods of Lightning's classes that users call and do not override.
CALLED = frozenset(
    (
        *(
            "all_gather",
            "freeze",
            "log",
            "log_dict",
            "lr_schedulers",
            "optimizers",
            "print",
            "save_hyperparameters",
        ),
        "remove_ignored_hparams",
        *(
            "to_onnx",
            "to_tensorrt",
            "to_torchscript",
            "toggled_optimizer",
            "unfreeze",
            "load_from_checkpoint",
        ),
        *("apply_to_collection", "cpu", "cuda", "double", "float", "half", "to", "type", "dtype", "device"),
    )
)


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


def _why(row: Row) -> str:
    return row.why if isinstance(row, Refusal) else ""


def page_table() -> str:
    """Return the table of docs/adopt/lightning.md."""
    return refusals(
        {
            "Trainer": TRAINER.rows,
            "callbacks": CALLBACKS,
            "LightningModule": MODULE_HOOKS,
            "LightningDataModule": DATA_MODULE_HOOKS,
            "your own Callback": CALLBACK_HOOKS,
            "scheduler": SCHEDULER,
        }
    )


def scheduler_keys() -> list[str]:
    """Return the keys of a scheduler's configuration in the installed release."""
    config: Any = importlib.import_module(f"{ROOT}.utilities.types").LRSchedulerConfig
    return [field.name for field in dataclasses.fields(config)]
