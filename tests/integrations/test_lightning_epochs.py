"""An epoch of Lightning's Trainer as steps of a job: its length, its last step, and what samples weigh."""

import pytest
import torch

pytest.importorskip("pytorch_lightning")
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fabric.integrations.lightning.job import EpochShape
from fabric.integrations.training_data import FirstOf


class Slope(LightningModule):
    """A model of one weight whose gradient for a sample is the sample."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# Samples of a pass, drop_last, limit_train_batches, accumulate_grad_batches.
SHAPES = [
    (24, False, 1.0, 1),
    (24, False, 1.0, 4),
    (25, False, 1.0, 1),
    (25, False, 1.0, 2),
    (25, True, 1.0, 2),
    (29, False, 1.0, 2),
    (29, False, 0.6, 2),
    (29, True, 1.0, 4),
    (29, True, 3, 2),
    (29, False, 3, 4),
    (7, False, 1.0, 2),
    (7, True, 1.0, 4),
]


def lightning_gradients(size, drop_last, limit, accumulation):
    """The gradient of each step of an epoch, by Lightning in one process with batches of 6."""
    own = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=limit,
        accumulate_grad_batches=accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Slope()
    samples = TensorDataset(torch.arange(1.0, size + 1))
    own.fit(net, DataLoader(samples, batch_size=6, drop_last=drop_last))
    return net.gradients


@pytest.mark.parametrize(("positions", "drop_last", "limit", "accumulation"), SHAPES)
def test_a_job_has_the_gradients_that_lightning_has_with_batches_of_all_replicas(
    positions, drop_last, limit, accumulation
):
    epochs = EpochShape(positions, 2, 3, accumulation, drop_last, limit)
    gradients = []
    for step in range(epochs.steps, 2 * epochs.steps):  # of the second epoch
        first = step % epochs.steps * epochs.step_samples
        total = weights = 0.0
        for micro_batch in range(epochs.step_samples // 2):
            start = first + 2 * micro_batch
            values = list(range(1 + start, 1 + min(start + 2, epochs.samples)))
            if values:
                weight = epochs.weight(step, micro_batch, len(values))
                total += weight * epochs.factor(step) * sum(values) / len(values)
                weights += weight
        gradients.append(total / weights)
    assert gradients == pytest.approx(lightning_gradients(positions, drop_last, limit, accumulation))


def test_the_batches_of_earlier_epochs_count():
    epochs = EpochShape(14, 2, 1, 2)  # 7 batches in 4 steps
    assert [epochs.batches_of(step) for step in range(5)] == [2, 2, 2, 1, 2]
    assert [epochs.batches_before(step) for step in (0, 3, 4, 9)] == [0, 6, 7, 16]


def test_a_limited_pass_has_the_first_positions_of_each_pass():
    class Growing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(range(10 * self.passes, 10 * self.passes + 9))

    limited = FirstOf(Growing(), 3)
    assert (len(limited), list(limited), list(limited)) == (3, [10, 11, 12], [20, 21, 22])
