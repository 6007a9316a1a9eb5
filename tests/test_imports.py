"""A user's object is found by module or file, and a mistake is told apart from an error inside it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from shoal.imports import call_object, load_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """An empty working directory; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_installed_module_gives_its_object() -> None:
    assert load_object("math:pi") == 3.141592653589793
    assert load_object("collections:OrderedDict.fromkeys")("a") == {"a": None}


def test_a_module_in_the_working_directory_is_found(here: Path) -> None:
    Path("mine").mkdir()
    Path("mine", "nets.py").write_text("answer = 42")
    assert load_object("mine.nets:answer") == 42


def test_a_file_is_found_by_its_path_and_loaded_once(here: Path) -> None:
    Path("deep").mkdir()
    Path("deep", "net.py").write_text("class Net: pass")
    assert load_object("deep/net.py:Net") is load_object(f"{here}/deep/net.py:Net")


def test_files_of_one_name_in_two_folders_are_two(here: Path) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "net.py").write_text(f"name = {folder!r}")
    assert [load_object(f"{folder}/net.py:name") for folder in "aba"] == ["a", "b", "a"]


def test_objects_of_a_file_can_be_pickled(here: Path) -> None:
    import pickle

    Path("net.py").write_text("class Net: pass")
    net = load_object("net.py:Net")
    assert pickle.loads(pickle.dumps(net)) is net


@pytest.mark.parametrize("spec", ["llama", "", ":x", "x:", "net.py", ".mine:x", "mine:x.", "mine:.x"])
def test_what_is_no_import_path_is_named_with_the_forms(spec: str) -> None:
    with pytest.raises(ValueError, match=r"is no import path; expected \"package\.module:name\""):
        load_object(spec)


def test_a_missing_module_is_named_with_the_folder_that_was_searched(here: Path) -> None:
    with pytest.raises(ValueError, match=rf"no module 'nosuch'.*{here}"):
        load_object("nosuch.nets:Net")


def test_a_missing_file_is_named(here: Path) -> None:
    with pytest.raises(ValueError, match=r"'net\.py': no such file in"):
        load_object("net.py:Net")


def test_a_missing_name_is_told_with_those_there_are(here: Path) -> None:
    Path("net.py").write_text("class Net: pass\ndef build(): pass\n_hidden = 1")
    with pytest.raises(ValueError, match=r"has no 'nett'; it has Net, build$"):
        load_object("net.py:nett")


@pytest.mark.parametrize("spec", ["broken:x", "broken.py:x"])
@pytest.mark.parametrize("source", ["import nosuch_dependency", "1 / 0"])
def test_an_error_inside_a_module_passes_through_every_time(here: Path, spec: str, source: str) -> None:
    Path("broken.py").write_text(f"{source}\nx = 1")
    for _ in range(2):
        with pytest.raises((ModuleNotFoundError, ZeroDivisionError)):
            load_object(spec)


def test_options_are_passed_and_wrong_ones_are_named_with_their_key(here: Path) -> None:
    Path("net.py").write_text("def build(width, depth=2): return width * depth")
    assert call_object("net.py:build", {"width": 3}, "model.options") == 6
    with pytest.raises(ValueError, match=r"does not take model\.options = \{'wdith': 3\}: .*'width'"):
        call_object("net.py:build", {"wdith": 3}, "model.options")


def test_an_error_inside_a_call_passes_through(here: Path) -> None:
    Path("net.py").write_text("def build(): raise TypeError('mine')")
    with pytest.raises(TypeError, match="mine"):
        call_object("net.py:build", {}, "model.options")


def test_what_cannot_be_called_is_named(here: Path) -> None:
    with pytest.raises(ValueError, match=r"'math:pi' is float, which cannot be called"):
        call_object("math:pi", {}, "model.options")
