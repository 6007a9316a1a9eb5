"""Text from a trained run: greedy where asked, otherwise a function of the seed; and errors that say what is missing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.store import model_state, save
from shoal.config import Settings, parse
from shoal.data.format import TOKENIZER_FILE
from shoal.data.prepare import prepare
from shoal.models.build import builder
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.run import Run
from shoal.train.sample import Trained, generate, open_run
from tests.ranks import run_ranks

TEXT = "a fish alone is a fish; many are a shoal. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text of single bytes."""
    root = tmp_path_factory.mktemp("text")
    for number in range(4):
        (root / f"{number}.txt").write_text(f"{number} {TEXT}")
    out = root.parent / "prepared"
    prepare(settings(root, out).data, 0, out, workers=1)
    return out


def settings(source: Path, prepared: Path) -> Settings:
    return parse(
        {
            "model": {"preset": "1m", "layers": 1},
            "data": {"source": str(source), "tokenizer": "bytes", "seq_len": 16, "eval_fraction": 0.25},
            "run": {"data": str(prepared)},
        },
        where="test",
    )


class Next(nn.Module):
    """Always finds the byte after the last one likeliest, then the one after that; remembers how much it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.longest = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 257)
        logits.scatter_(-1, ((tokens + 1) % 257)[..., None], float(self.scale))
        logits.scatter_(-1, ((tokens + 2) % 257)[..., None], float(self.scale) - 1)
        return logits


def trained(folder: Path, end: int = 256, seq_len: int = 16) -> Trained:
    return Trained(Next(), Tokenizer.from_file(str(folder / TOKENIZER_FILE)), end, 1, seq_len)


def test_temperature_0_takes_the_likeliest_each_time(folder: Path) -> None:
    assert generate(trained(folder), "a", 5, temperature=0) == "bcdef"


def test_one_candidate_is_the_likeliest_whatever_the_temperature(folder: Path) -> None:
    assert generate(trained(folder), "a", 5, temperature=9.0, top_k=1) == "bcdef"


def test_a_seed_gives_one_text_and_another_seed_another(folder: Path) -> None:
    texts = [generate(trained(folder), "a", 40, temperature=1.0, top_k=2, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_only_the_top_k_are_drawn(folder: Path) -> None:
    codes = [ord("0"), *map(ord, generate(trained(folder), "0", 30, temperature=100.0, top_k=2))]
    assert {after - before for before, after in itertools.pairwise(codes)} == {1, 2}


def test_an_end_of_text_ends_it(folder: Path) -> None:
    assert generate(trained(folder, end=ord("e")), "a", 50, temperature=0) == "bcd"


def test_the_model_sees_no_more_than_its_length(folder: Path) -> None:
    model = trained(folder, seq_len=4)
    generate(model, "abcdefgh", 5, temperature=0)
    assert isinstance(model.model, Next)
    assert model.model.longest == 4


def test_without_a_prompt_text_begins_after_an_end_of_text(folder: Path) -> None:
    assert generate(trained(folder, end=64), "", 3, temperature=0) == "ABC"  # 65, 66, 67


def _save(world: object, path: Path, words: Settings) -> Tensor:
    model = parallelize(builder(words.model, 257), Plan(replicate=2), world, seed=5)  # pyrefly: ignore
    save(Run(path).checkpoints, 3, model_state(model), {}, world, keep=1)  # pyrefly: ignore
    return next(model.parameters()).detach()


def test_a_run_of_two_ranks_is_opened_on_one_device(folder: Path, tmp_path: Path) -> None:
    run, words = Run(tmp_path), settings(folder.parent / "text0", folder)
    words = words.model_copy(update={"data": words.data.model_copy(update={"source": str(folder)})})
    run.create()
    run.job_file.write_text(words.to_toml())
    with pytest.raises(ValueError, match="no complete checkpoint yet"):
        open_run(tmp_path)
    saved = run_ranks(2, _save, tmp_path, words)[0]
    opened = open_run(tmp_path)
    assert torch.equal(next(opened.model.parameters()), saved)
    assert (opened.step, opened.seq_len) == (3, 16)
    assert len(list_checkpoints(run.checkpoints)[0]) == 1
    assert len(generate(opened, "a fish", 3, temperature=0).encode()) >= 1


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run directory: there is no job\.toml in it"):
        open_run(tmp_path)
