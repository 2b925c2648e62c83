"""`package.module:factory`: found, or refused with what is wrong and what there is instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.train.factory import factory_faults, find_factory, is_factory

MODULE = """
def make():
    return "made"

class Nets:
    @staticmethod
    def small():
        return "small"

number = 7
_hidden = 8
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, which they are in; afterwards nothing of it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "users_own.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def fault(name: str) -> str:
    (found,) = factory_faults("--model", name)
    assert found.startswith(f"--model {name}: ")
    return found


def test_a_colon_makes_a_factory() -> None:
    assert is_factory("package.module:factory")
    assert not is_factory("mnist-cnn")


def test_a_module_in_the_folder_one_is_in_is_found() -> None:
    assert find_factory("users_own:make")() == "made"
    assert factory_faults("--model", "users_own:make") == []


def test_attributes_of_attributes_and_modules_in_packages(here: Path) -> None:
    assert find_factory("users_own:Nets.small")() == "small"
    (here / "users_package").mkdir()
    (here / "users_package" / "nets.py").write_text(MODULE)
    assert find_factory("users_package.nets:make")() == "made"


def test_a_module_that_is_not_there() -> None:
    assert "No module named 'no_such_module'" in fault("no_such_module:make")


def test_an_attribute_that_is_not_there_shows_those_that_are() -> None:
    text = fault("users_own:mkae")
    assert "users_own has no 'mkae'" in text
    assert "it has: Nets, make, number" in text
    assert "_hidden" not in text
    assert "Nets.smal" in fault("users_own:Nets.smal")


def test_something_that_cannot_be_called() -> None:
    assert "users_own:number is a int, not something to call" in fault("users_own:number")


@pytest.mark.parametrize("name", [":make", "users_own:", ":"])
def test_half_a_name(name: str) -> None:
    assert "expected package.module:factory" in fault(name)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("raise ImportError", "ImportError"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no-such'])", "SystemExit"),
        ("import sys; sys.exit()", "SystemExit"),
    ],
)
def test_a_module_that_raises_when_it_is_imported(here: Path, source: str, expected: str) -> None:
    """Also one that means to end the program: it is a script, not a module."""
    (here / "users_broken.py").write_text(source + "\n")
    assert expected in fault("users_broken:make")


def test_ctrl_c_during_the_import_is_not_a_fault(here: Path) -> None:
    (here / "users_broken.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        factory_faults("--model", "users_broken:make")
