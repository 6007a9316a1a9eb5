"""Tokenizers: reversible, deterministic, and saved in the one form that everything reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal.data.tokenizer import (
    END_OF_TEXT,
    TokenizerInfo,
    bytes_tokenizer,
    hugging_face_tokenizer,
    load_encoder,
    train_bpe,
)

TEXTS = ["the cat sat on the mat\n" * 5, "Grüße, 世界! " * 7, "x = [1, 22, 333]"]


def encoded(folder: Path, info: TokenizerInfo, text: str) -> list[int]:
    file = folder / f"{abs(hash(info))}.json"
    file.write_text(info.json, encoding="utf-8")
    return load_encoder(str(file), info.description)([text])[0].tolist()


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_byte_tokens_are_bytes_and_the_saved_tokenizer_agrees(text: str) -> None:
    saved = Tokenizer.from_str(bytes_tokenizer().json)
    saved.encode_special_tokens = True
    assert saved.encode(text).ids == list(text.encode())
    assert saved.decode(list(text.encode())) == text


def test_bpe_gives_back_every_text(tmp_path: Path) -> None:
    info = train_bpe(TEXTS, 300)
    decode = Tokenizer.from_str(info.json).decode
    for text in [*TEXTS, "never seen: ♥\t\x00"]:
        assert decode(encoded(tmp_path, info, text)) == text


def test_bpe_training_is_deterministic_and_reports_its_true_size() -> None:
    assert train_bpe(TEXTS, 280) == train_bpe(iter(TEXTS), 280)
    small = train_bpe(["aaaa"], 4096)
    assert small.vocab == Tokenizer.from_str(small.json).get_vocab_size() < 270
    assert train_bpe(TEXTS, 280).vocab == 280


@pytest.mark.parametrize("info", [bytes_tokenizer(), train_bpe(TEXTS, 280)], ids=["bytes", "bpe"])
def test_end_of_text_in_a_text_is_plain_text(tmp_path: Path, info: TokenizerInfo) -> None:
    assert info.end_of_text not in encoded(tmp_path, info, f"before {END_OF_TEXT} after")


def test_a_tokenizer_json_is_used_as_it_is(tmp_path: Path) -> None:
    trained = train_bpe(TEXTS, 280)
    (tmp_path / "tokenizer.json").write_text(trained.json)
    for spec in (f"hf:{tmp_path}", f"hf:{tmp_path}/tokenizer.json"):
        found = hugging_face_tokenizer(spec)
        assert found[1:] == (280, 0, spec)
        assert encoded(tmp_path, found, TEXTS[1]) == encoded(tmp_path, trained, TEXTS[1])


def test_the_configured_end_of_text_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(TEXTS, 280).json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    assert hugging_face_tokenizer(f"hf:{tmp_path}").end_of_text == Tokenizer.from_file(
        str(tmp_path / "tokenizer.json")
    ).token_to_id("!")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<missing>"}))
    with pytest.raises(ValueError, match="has no end-of-text token: set eos_token"):
        hugging_face_tokenizer(f"hf:{tmp_path}")


def test_a_name_is_loaded_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(
        is_fast=True, backend_tokenizer=Tokenizer.from_str(train_bpe(TEXTS, 280).json), eos_token="!"
    )
    auto = SimpleNamespace(from_pretrained={"some/model": loaded, "slow": SimpleNamespace(is_fast=False)}.get)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    assert hugging_face_tokenizer("hf:some/model").vocab == 280
    with pytest.raises(ValueError, match="'hf:slow' has no fast form"):
        hugging_face_tokenizer("hf:slow")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"'hf:some/model'.* pip install 'shoal\[hf\]'"):
        hugging_face_tokenizer("hf:some/model")
