"""A FabricTrainer trains as the Trainer of transformers does in one process with the same global batch."""

import types

import pytest
import torch
from alone_in_job import Net, Tokens, adopted, assert_same, attach_alone, samples, sentences, train
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from fabric.errors import ConfigError, FabricError
from fabric.integrations.transformers import CheckpointFiles

REPLICAS = 3


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    attach_alone(monkeypatch, REPLICAS)


def both(tmp_path, kind=Trainer, model=Net, data=None, **arguments):
    """Train with the Trainer and with FabricTrainer; return both."""
    data = samples(60) if data is None else data
    plain = train(kind, tmp_path / "plain", model(), data, **arguments)
    ours = train(adopted(kind), tmp_path / "fabric", model(), data, replicas=REPLICAS, **arguments)
    return plain, ours


class Unshuffled(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


class Half(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SubsetRandomSampler(range(30), generator=torch.Generator().manual_seed(5))


class Weighted(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        weights = torch.arange(1.0, 61.0)
        return WeightedRandomSampler(weights, 60, generator=torch.Generator().manual_seed(5))


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        shuffled = torch.Generator().manual_seed(5)
        return DataLoader(
            self.train_dataset, 2, shuffle=True, collate_fn=self.data_collator, generator=shuffled
        )


@pytest.mark.parametrize("kind", [Trainer, Unshuffled, Half, Weighted, OwnLoader])
def test_it_reads_the_samples_of_the_trainers_own_order_in_every_pass(tmp_path, kind):
    # The Trainer leaves the iterator of a DataLoader before its end where the last batch is full.
    assert_same(*both(tmp_path, kind, data=samples(61), num_train_epochs=3))


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        *((size, {"dataloader_drop_last": True}) for size in (61, 50, 71)),
        (61, {"seed": 5}),
        (50, {"data_seed": 5}),
        (71, {"seed": 5}),
    ],
)
def test_it_ends_a_pass_as_the_trainer_does(tmp_path, size, arguments):
    assert_same(*both(tmp_path, data=samples(size), num_train_epochs=2.5, **arguments))


def test_max_steps_end_in_mid_pass(tmp_path):
    plain, ours = both(tmp_path, data=samples(50), max_steps=7)
    assert_same(plain, ours)
    assert ours.state.epoch == plain.state.epoch


def test_a_sequential_strategy_is_kept(tmp_path):
    assert_same(*both(tmp_path, max_steps=7, train_sampling_strategy="sequential"))


def test_tokens_weigh_the_same_in_every_micro_batch(tmp_path):
    assert_same(*both(tmp_path, model=Tokens, data=sentences(50), num_train_epochs=2))


class MeanOfBatch(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(x=inputs["x"], labels=inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class OfTokens(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs, labels=labels)["logits"]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


class StepByHand(Trainer):
    """A training_step without super(), which counts its calls and its samples."""

    calls = samples = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.calls, self.samples = self.calls + 1, self.samples + len(inputs["x"])
        loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class StepWithSuper(Trainer):
    calls = samples = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.calls, self.samples = self.calls + 1, self.samples + len(inputs["x"])
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("kind", [MeanOfBatch, OfTokens])
def test_a_loss_of_a_subclass_enters_the_step_as_the_trainer_has_it(tmp_path, kind):
    assert_same(*both(tmp_path, kind, Tokens, sentences(50), num_train_epochs=2))


@pytest.mark.parametrize("kind", [StepByHand, StepWithSuper])
def test_a_training_step_of_a_subclass_is_called_once_per_micro_batch(tmp_path, kind):
    plain, ours = both(tmp_path, kind, data=samples(50), num_train_epochs=2)
    assert_same(plain, ours)
    assert (ours.calls, ours.samples) == (plain.calls, plain.samples) == (50, 100)


class SumOfMeans(Trainer):
    """Its loss does not depend on num_items_in_batch, and the Trainer does not divide it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(x=inputs["x"], labels=inputs["labels"])["loss"]


def test_an_undivided_loss_is_summed_in_a_replica_and_averaged_over_them(tmp_path):
    """As with DistributedDataParallel: a replica has a third of the micro-batches."""
    data, more = sentences(48), {"num_train_epochs": 2, "max_grad_norm": 0.0}
    plain = train(SumOfMeans, tmp_path / "plain", Tokens(), data, learning_rate=0.1 / REPLICAS, **more)
    ours = train(adopted(SumOfMeans), tmp_path / "ours", Tokens(), data, replicas=REPLICAS, **more)
    for left, right in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


class PartOfTokens(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + sum(p.square().sum() for p in model.parameters())


class Converts(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) / num_items_in_batch.item()


class WithoutAccelerator(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


class Updates(StepByHand):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.step()
        return loss


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PartOfTokens, "PartOfTokens divides only a part of the loss by num_items_in_batch"),
        (Converts, "the loss of Converts makes a number of num_items_in_batch"),
        (WithoutAccelerator, "training_step of WithoutAccelerator computes a gradient without"),
        (Updates, r"training_step of Updates calls optimizer.step\(\)"),
    ],
)
def test_a_loss_or_step_that_cannot_be_kept_is_refused_in_the_first_step(tmp_path, kind, words):
    model = Tokens()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=words):
        train(adopted(kind), tmp_path, model, sentences(48), replicas=REPLICAS, max_steps=3)
    for left, right in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(left, right)


class StopsAt(TrainerCallback):
    def __init__(self, step, event="on_step_end"):
        self.events = []
        self._at = step
        setattr(self, event, self._stop)

    def _stop(self, args, state, control, **_):
        if state.global_step >= self._at:
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **_):
        self.events.append(("epoch", state.global_step))

    def on_train_end(self, args, state, control, **_):
        self.events.append(("end", state.global_step, state.epoch))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_log"])
@pytest.mark.parametrize("step", [5, 7])
def test_a_callback_ends_the_training_after_the_same_step(tmp_path, event, step):
    callbacks = [StopsAt(step, event), StopsAt(step, event)]
    plain = train(Trainer, tmp_path / "a", Net(), samples(60), more={"callbacks": [callbacks[0]]})
    ours = train(
        adopted(Trainer),
        tmp_path / "b",
        Net(),
        samples(60),
        replicas=REPLICAS,
        more={"callbacks": [callbacks[1]]},
    )
    assert_same(plain, ours)
    assert callbacks[0].events == callbacks[1].events and ours.state.global_step < 15


class EndsEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = True


def test_a_callback_that_cuts_an_epoch_short_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="should_epoch_stop"):
        train(
            adopted(Trainer),
            tmp_path,
            Net(),
            samples(60),
            replicas=REPLICAS,
            more={"callbacks": [EndsEpoch()]},
        )


def test_early_stopping_loads_the_best_model(tmp_path):
    def run(kind, folder, replicas=1):
        return train(
            kind,
            folder,
            Net(),
            samples(60),
            replicas=replicas,
            learning_rate=3.0,
            num_train_epochs=9,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            more={"eval_dataset": samples(9), "callbacks": [EarlyStoppingCallback(2)]},
        )

    plain, ours = run(Trainer, tmp_path / "a"), run(adopted(Trainer), tmp_path / "b", REPLICAS)
    assert_same(plain, ours)
    assert ours.state.global_step == plain.state.global_step < 45
    assert ours.state.best_global_step == plain.state.best_global_step


class Smoothed(Tokens):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(problem_type=None)


EVERY_FOUR = {"eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adamw_torch", "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9},
        {"optim": "adamw_torch", "adam_epsilon": 1e-3, "warmup_steps": 3},
        {"optim": "adafactor"},
        {"optim": "adagrad"},
        {"optim": "rmsprop"},
        {"optim": "adamw_torch", "optim_args": "amsgrad=True"},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVERY_FOUR},
        {"max_grad_norm": 0.05},
        {"logging_strategy": "epoch"},
        {"logging_steps": 3, "logging_first_step": True},
        {"eval_delay": 5, "eval_on_start": True, **EVERY_FOUR},
        {"eval_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": True},
        {"bf16": True},
        {"logging_nan_inf_filter": False},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"label_smoothing_factor": 0.2},
        {"remove_unused_columns": False, "label_names": ["labels"]},
    ],
    ids=lambda x: ",".join(f"{k}={v}" for k, v in x.items()),
)
def test_an_argument_is_kept(tmp_path, arguments):
    more = {"eval_dataset": sentences(7)}
    assert_same(*both(tmp_path, Trainer, Smoothed, sentences(50), num_train_epochs=2, more=more, **arguments))


def doubled(samples):
    return {name: torch.stack([x[name] for x in samples]) * (1 + (name == "x")) for name in samples[0]}


def loss_by_hand(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return 2 * loss / num_items_in_batch


def largest(prediction):
    return {"largest": float(prediction.predictions.max())}


@pytest.mark.parametrize(
    "given",
    [
        {"data_collator": doubled},
        {"compute_loss_func": loss_by_hand},
        {"compute_metrics": largest},
        {"compute_metrics": largest, "preprocess_logits_for_metrics": lambda logits, labels: logits * 2},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.05})},
    ],
    ids=",".join,
)
def test_an_argument_of_the_trainer_is_kept(tmp_path, given):
    more = {"eval_dataset": sentences(7), **given}
    assert_same(*both(tmp_path, Trainer, Tokens, sentences(50), max_steps=6, more=more, **EVERY_FOUR))


@pytest.mark.parametrize("argument", ["model_init", "optimizers"])
def test_a_model_or_an_optimizer_that_the_user_makes_is_kept(tmp_path, argument):
    def made():
        model = Net()
        own = torch.optim.AdamW(model.parameters(), lr=0.05)
        given = {"model_init": Net, "optimizers": (own, None)}[argument]
        return None if argument == "model_init" else model, {argument: given}

    runs = []
    for kind, replicas in ((Trainer, 1), (adopted(Trainer), REPLICAS)):
        model, more = made()
        folder = tmp_path / str(replicas)
        runs.append(train(kind, folder, model, samples(60), replicas=replicas, max_steps=5, more=more))
    assert_same(*runs)


def test_a_replica_without_the_folder_of_the_best_model_says_that_it_must_be_shared(tmp_path):
    arguments = types.SimpleNamespace(
        output_dir=str(tmp_path), load_best_model_at_end=True, save_total_limit=2
    )
    state = types.SimpleNamespace(best_global_step=30, best_model_checkpoint=None)
    files = CheckpointFiles(types.SimpleNamespace(args=arguments, state=state))
    with (
        pytest.raises(FabricError, match="checkpoint-30, which another replica wrote: give all replicas one"),
        files.at_the_end(is_writer=False),
    ):
        pass
    (tmp_path / "checkpoint-30").mkdir()
    with files.at_the_end(is_writer=False):
        assert arguments.save_total_limit is None  # one replica alone deletes
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-30")
    assert arguments.save_total_limit == 2
