"""One door per outside thing: who may touch what, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent


@dataclass(frozen=True)
class Use:
    """Somewhere in the source, something is named or imported."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"src/shoal/{self.file}:{self.line} uses {self.name}"


class Uses(ast.NodeVisitor):
    """Every dotted name in a file, spelt out: `import torch.distributed as d; d.send` counts as
    `torch.distributed.send`."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.aliases: dict[str, str] = {}
        self.found: list[Use] = []

    def note(self, node: ast.AST, name: str) -> None:
        self.found.append(Use(self.file, getattr(node, "lineno", 0), name))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.note(node, alias.name)
            self.aliases[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.note(node, full)
            self.aliases[alias.asname or alias.name] = full

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            parts.append(self.aliases.get(inner.id, inner.id))
        else:
            parts.append("?")
            self.visit(inner)
        self.note(node, ".".join(reversed(parts)))

    def visit_Name(self, node: ast.Name) -> None:
        self.note(node, self.aliases.get(node.id, node.id))

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            safe = {"weights_only": True, "allow_pickle": False}.get(keyword.arg or "")
            given = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if safe is not None and given is not safe:
                self.note(node, f"{keyword.arg}={not safe}")
        self.generic_visit(node)


UNSAFE_ARGUMENTS = ("weights_only=False", "allow_pickle=True")


def uses_in(source: str, file: str) -> list[Use]:
    visitor = Uses(file)
    visitor.visit(ast.parse(source))
    return visitor.found


def all_uses() -> Iterator[Use]:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 30, f"is the source in {ROOT}?"
    for path in files:
        yield from uses_in(path.read_text(), path.relative_to(ROOT).as_posix())


EVERYTHING = list(all_uses())


def touches(name: str, thing: str) -> bool:
    return name == thing or name.startswith(f"{thing}.")


def strangers(things: tuple[str, ...], allowed: tuple[str, ...]) -> list[str]:
    """Uses of any of `things` outside the rooms (`launch/`) and files (`crew.py`) allowed."""
    return [
        str(use)
        for use in EVERYTHING
        if any(touches(use.name, thing) for thing in things) and not use.file.startswith(allowed)
    ]


DOORS = {
    "torch.distributed": (
        ("torch.distributed", "torch.nn.parallel"),
        ("rendezvous/", "board.py", "crew.py", "replicate/", "wire/"),
    ),
    "zmq": (
        ("zmq",),
        ("wire/zmq_", "wire/keys.py"),
    ),
    "subprocess": (
        ("subprocess", "multiprocessing", "os.fork", "os.system", "os.execv", "os.posix_spawn"),
        ("launch/",),
    ),
    "the environment": (
        ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"),
        ("rendezvous/", "settings.py"),
    ),
    "the terminal": (
        # joined.py: crew.print(); it and the boss: the line that says whom we wait for
        ("print", "builtins.print", "sys.stdout", "sys.stderr", "rich", "typer"),
        ("cli/", "report/", "joined.py", "boss/boss.py"),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_outside_thing_has_its_door(door: str) -> None:
    things, allowed = DOORS[door]
    assert strangers(things, allowed) == []
    assert strangers(things, ()) != [], "nobody uses it: is it spelt right?"


def test_in_joined_only_the_script_prints() -> None:
    names = [use.name for use in EVERYTHING if use.file == "joined.py"]
    assert [name for name in names if name.split(".")[-1] == "print"] == ["builtins.print"]
    assert not [name for name in names if touches(name, "sys.stdout")]


def test_for_keys_zmq_only_makes_them() -> None:
    names = {use.name for use in EVERYTHING if use.file == "wire/keys.py"}
    of_zmq = {name for name in names if touches(name, "zmq")}
    assert of_zmq == {"zmq", "zmq.curve_keypair", "zmq.curve_public"}


def test_the_pure_files_import_nothing_above_them() -> None:
    for file in ("layout.py", "errors.py", "version.py", "settings.py"):
        inner = [str(use) for use in EVERYTHING if use.file == file and touches(use.name, "shoal")]
        assert inner == []


def test_nothing_is_ever_unpickled() -> None:
    forbidden = (
        "pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib",
        "torch.load", "torch.save", "torch.distributed.rpc", "eval", "exec",
    )  # fmt: skip
    assert strangers(forbidden, ()) == []
    collectives = [
        str(use)
        for use in EVERYTHING
        if touches(use.name, "torch.distributed") and "_object" in use.name
    ]
    assert collectives == []
    assert [str(use) for use in EVERYTHING if use.name in UNSAFE_ARGUMENTS] == []


SMUGGLED = """
import torch.distributed as d
from torch import distributed as again, load
from os import environ
import sys, pickle
d.all_gather_object([], 1)
again.send(1)
load("x", weights_only=False)
environ["A"]
sys.stdout.write("x")
torch.hub.load(f(), weights_only=maybe).x
numpy.load("x", allow_pickle=True)
numpy.load("x", allow_pickle=False)
"""


def test_the_walk_sees_through_other_names() -> None:
    seen = {(use.line, use.name) for use in uses_in(SMUGGLED, "smuggled.py")}
    assert seen >= {
        (2, "torch.distributed"),
        (3, "torch.distributed"),
        (3, "torch.load"),
        (4, "os.environ"),
        (5, "pickle"),
        (6, "torch.distributed.all_gather_object"),
        (7, "torch.distributed.send"),
        (8, "torch.load"),
        (8, "weights_only=False"),
        (9, "os.environ"),
        (10, "sys.stdout.write"),
        (11, "weights_only=False"),
        (12, "allow_pickle=True"),
    }
    assert (13, "allow_pickle=True") not in seen
    assert str(Use("a/b.py", 3, "pickle")) == "src/shoal/a/b.py:3 uses pickle"
