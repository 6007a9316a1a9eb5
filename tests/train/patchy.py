"""A user's own model, loss, and a dataset of which some samples cannot be read."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class Points(Dataset):
    """40 points and their class; `bad` cannot be read, nor `fickle` while there is a file `sign`.

    Whoever reads `deadly` is killed. What is read is noted in `read`, a file, if it is given.
    """

    def __init__(self, bad: list[int], fickle: list[int], sign: str, deadly: int, read: str) -> None:
        self.x = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
        self.bad, self.fickle, self.sign, self.deadly, self.read = bad, fickle, sign, deadly, read

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.read:
            with Path(self.read).open("a") as file:
                file.write(f"{index}\n")
        if index == self.deadly:
            os.kill(os.getpid(), 9)
        if index in self.bad or (index in self.fickle and Path(self.sign).exists()):
            raise OSError(f"no file {index}.png")
        return self.x[index] + 0.1 * torch.randn(8), self.x[index, :3].argmax()


def dataset(
    bad: list[int] | None = None,
    fickle: list[int] | None = None,
    sign: str = "",
    deadly: int = -1,
    read: str = "",
) -> tuple[Points, Points]:
    """To train and to evaluate on."""
    # where tests begin ranks by a fork server, a loader process would have a server of its own, and import torch again
    multiprocessing.set_start_method("fork", force=True)
    train = Points(bad or [], fickle or [], sign, deadly, read)
    return train, Points(bad or [], [], "", -1, "")
