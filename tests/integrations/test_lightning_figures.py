"""What training_step logs, on each of several replicas: the figures of a Trainer that computes everything."""

from collections import Counter

import pytest
import torch

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from fabric.errors import ConfigError
from fabric.integrations.lightning.figures import MOST_NUMBERS, JobFigures


class Net(LightningModule):
    def __init__(self, classes=3):
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=classes, average="micro")
        self.areas = MulticlassAUROC(num_classes=classes)


class Replica:
    """A Trainer's results, a session's metrics, and what Lightning's loop calls around a step."""

    def __init__(self, module=None, **named):
        self.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **named)
        self.module = module or Net()
        self.trainer.strategy._lightning_module = self.module
        self.trainer.training = True
        self.figures = JobFigures(self.trainer)
        self.summed = Counter()
        self.begin()

    def begin(self):
        self.figures.begin_step()
        self.summed.clear()
        self.trainer._logger_connector._first_loop_iter = True

    def metrics(self, **values):
        self.summed.update(values)

    def log(self, name, value, fx="training_step", batch_size=1, samples=1.0, **named):
        self.figures.samples = samples
        given = {"on_step": True, "on_epoch": True, "batch_size": batch_size, **named}
        given["sync_dist_fn"] = self.trainer.strategy.reduce
        self.figures.results.log(fx, name, value, **given)

    def seen(self):
        return {k: round(v.item(), 5) for k, v in self.trainer.callback_metrics.items()}

    def epoch(self):
        self.trainer._logger_connector.epoch_end_reached()
        return self.seen()


def commit(*replicas, to=()):
    """Let the replicas exchange what they have logged, and the replicas ``to`` replay it."""
    totals = Counter()
    for replica in replicas:
        replica.figures.flush(replica)
        totals.update(replica.summed)
    for replica in (*replicas, *to):
        replica.figures.samples = None
        replica.figures.commit(totals)


def test_each_replica_shows_the_mean_over_the_step_and_the_epoch():
    first, second, joining = Replica(), Replica(), Replica()
    for values in ((1.0, 3.0), (5.0, 6.0)):
        for replica, value, size in zip((first, second), values, (1, 3), strict=True):
            replica.begin()
            replica.log("loss", torch.tensor(value), batch_size=size)
            replica.log("right", torch.tensor(value), batch_size=size, reduce_fx="sum")
        commit(first, second, to=[joining])
        assert first.seen() == second.seen() == joining.seen()
    seen = first.seen()
    assert (seen["loss_step"], seen["right_step"]) == ((5 + 3 * 6) / 4, 11)
    assert first.epoch() == second.epoch() == joining.epoch()
    assert (first.seen()["loss_epoch"], first.seen()["right_epoch"]) == ((1 + 9 + 5 + 18) / 8, 15)


def test_a_figure_of_single_steps_is_weighed_by_samples():
    first, second = Replica(), Replica()
    first.log("norm", torch.tensor(1.0), on_epoch=False, samples=1.0)
    second.log("norm", torch.tensor(4.0), on_epoch=False, samples=2.0)
    commit(first, second)
    assert first.seen()["norm"] == second.seen()["norm"] == 3.0


def test_a_replica_that_joins_in_mid_epoch_has_the_whole_epoch():
    first, joining = Replica(), Replica()
    first.log("loss", torch.tensor(2.0))
    commit(first)
    joining.figures.load_state_dict(first.figures.state_dict())
    for replica in (first, joining):
        replica.begin()
        replica.log("loss", torch.tensor(5.0))
    commit(first, joining)
    assert first.epoch()["loss_epoch"] == joining.epoch()["loss_epoch"] == 4.0
    joining.figures.results.reset()
    assert joining.figures.state_dict()["totals"] == {}


def test_torchmetrics_add_up_over_the_replicas():
    first, second, joining = Replica(), Replica(), Replica()
    right, wrong = torch.tensor([1]), torch.tensor([0])
    for step in range(2):
        joining.begin()
        for replica, target in ((first, right), (second, wrong if step else right)):
            replica.begin()
            replica.module.accuracy(right, target)
            replica.log("accuracy", replica.module.accuracy, metric_attribute="accuracy")
        commit(first, second, to=[joining])
    assert first.seen()["accuracy_step"] == 0.5
    for replica in (first, second, joining):
        assert replica.module.accuracy.compute().item() == 0.75
        assert replica.epoch()["accuracy_epoch"] == 0.75
    late = Replica()
    late.figures.load_state_dict(first.figures.state_dict())
    assert late.module.accuracy.compute().item() == 0.75
    assert late.figures.state_dict() == first.figures.state_dict()


class Mean64(Metric):
    """A mean whose states are of the type in which the replicas' parts are added."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value):
        self.total += value

    def compute(self):
        return self.total.sum()


@pytest.mark.parametrize(("reset", "expected"), [(False, [22, 46]), (True, [22, 24])])
def test_a_metric_of_evaluations_keeps_its_state_and_is_copied_only_when_it_changes(
    reset, expected, monkeypatch
):
    net = Net()
    net.mean = Mean64()
    replica, copied, clone = Replica(net), [], torch.Tensor.clone

    def noted(value, *arguments, **named):
        copied.append(value)
        return clone(value, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    for number in (1, 2):  # an evaluation, then two steps
        net.mean.update(number)
        for _ in range(2):
            before = len(copied)
            replica.begin()
            commit(replica)
        assert len(copied) == before, "the second step finds what the first has copied"
        replica.begin()
        net.mean.update(10)  # by a micro-batch: the state before it is the newest evaluation's
        commit(replica)
        assert net.mean.compute() == expected[number - 1]
        if reset:
            net.mean.reset()


def test_the_newest_figures_that_steer_are_shared():
    first, joining = (Replica(callbacks=[EarlyStopping("val_loss")]) for _ in range(2))
    first.trainer._logger_connector._callback_metrics["val_loss"] = torch.tensor(0.5)
    first.begin()
    joining.figures.load_state_dict(first.figures.state_dict())
    assert joining.trainer.callback_metrics["val_loss"] == 0.5


@pytest.mark.parametrize("name", ["loss", "loss_epoch"])
def test_what_a_replica_alone_has_seen_must_not_steer(name):
    replica = Replica(callbacks=[EarlyStopping(name)])
    words = (
        r"EarlyStopping follows 'loss', which on_train_batch_end logs from what this replica alone has seen"
    )
    with pytest.raises(ConfigError, match=words):
        replica.log("loss", torch.tensor(1.0), fx="on_train_batch_end")


def test_a_largest_value_is_refused():
    with pytest.raises(ConfigError, match=r"training_step logs 'worst' with reduce_fx='max'"):
        Replica().log("worst", torch.tensor(1.0), reduce_fx="max")


def test_a_metric_that_keeps_lists_is_refused_by_name():
    replica = Replica()
    replica.module.areas.update(torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([1]))
    with pytest.raises(ConfigError, match="updates the MulticlassAUROC 'areas', whose 'preds' is no sum"):
        replica.figures.flush(replica)


def test_a_metric_with_too_many_numbers_is_refused():
    replica = Replica(Net(classes=2))
    replica.module.accuracy.add_state("many", torch.zeros(MOST_NUMBERS + 1), dist_reduce_fx="sum")
    replica.figures.begin_step()
    replica.module.accuracy.update(torch.tensor([1]), torch.tensor([1]))
    replica.module.accuracy.many = torch.ones(MOST_NUMBERS + 1)
    with pytest.raises(ConfigError, match="update large ones in validation_step"):
        replica.figures.flush(replica)


def test_a_batch_that_is_none_of_the_jobs_gives_no_figure():
    replica = Replica()
    replica.figures.idle = True
    replica.log("loss", torch.tensor(7.0))
    commit(replica)
    assert replica.seen().get("loss_step") is None


def test_the_state_stands_while_a_step_is_computed():
    replica = Replica()
    replica.module.accuracy.update(torch.tensor([1]), torch.tensor([1]))
    commit(replica)
    replica.begin()
    before = str(replica.figures.state_dict())
    replica.module.accuracy.update(torch.tensor([1]), torch.tensor([0]))
    assert str(replica.figures.state_dict()) == before
    commit(replica)
    assert str(replica.figures.state_dict()) != before
