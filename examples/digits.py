"""Your own model, dataset, loss and loop: handwritten digits (8 x 8 pixels, in scikit-learn) by a small network.

    pip install scikit-learn
    python examples/digits.py                                      # one process
    torchrun --nproc_per_node=2 examples/digits.py                 # more, with the same losses

`shoal train examples/digits.toml` trains the same model on the same data with no loop of your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.job import Train

EVERY_NTH_IS_HELD_OUT = 5
LEARNING_RATE = 1e-2


class Net(nn.Module):
    """Two convolutions and two linear layers, initialised as torch does."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.hidden = nn.Linear(2 * width * 2 * 2, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 8, 8) pixels to (B, 10) logits."""
        return self.output(F.relu(self.hidden(self.features(images).flatten(1))))


def build(width: int = 16) -> nn.Module:
    """What `model.family` names in digits.toml; `model.options` are its arguments."""
    return Net(width)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """(train, held out) pairs of an image, 0 to 1, and its digit; what `data.source` names in digits.toml."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, dtype=torch.long)
    held_out = torch.arange(len(labels)) % EVERY_NTH_IS_HELD_OUT == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """How many are right, of how many: a (sum, weight) pair, whose mean is the accuracy."""
    return (logits.argmax(-1) == labels).sum(), len(labels)


def losses(world: shoal.World, steps: int) -> Iterator[float]:
    """Train, giving the loss of each step; then print the accuracy."""
    train, held_out = datasets()
    job = shoal.Job(train=Train(steps=steps, global_batch=64))
    plan = shoal.Plan(replicate=world.size)

    model = shoal.parallelize(Net, plan, world, seed=job.train.seed)
    optimizer = shoal.AdamW(lr=LEARNING_RATE, schedule="cosine")
    step = shoal.Step(model, shoal.Supervised(F.cross_entropy), optimizer, plan, world, total_steps=steps)
    for batch in shoal.batches(train, job, plan, world):
        yield step(batch).loss

    samples = shoal.eval_batches(held_out, job, plan, world)
    accuracy = shoal.evaluate(model, shoal.Supervised(hits), samples, world)
    if world.is_main:
        print(f"accuracy {accuracy.loss:.3f} on {accuracy.weight} held-out digits")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with shoal.join_world() as world:
        for number, loss in enumerate(losses(world, steps), start=1):
            if world.is_main and (number % 50 == 0 or number == steps):
                print(f"step {number:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
