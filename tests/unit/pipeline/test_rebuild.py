"""What a worker takes from a boss that wants to harm it: nothing but what computes."""

from __future__ import annotations

import builtins
import hashlib
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.pipeline import known
from shoal.pipeline.graph import read
from shoal.pipeline.known import Allowed
from shoal.pipeline.portable import Data, ModuleData, TensorData, pack, to_data, unpack
from shoal.pipeline.rebuild import fill, from_data
from shoal.pipeline.routes import route
from shoal.pipeline.split import stage_module
from shoal.pipeline.steps import Step, StepByStep

WIDTH = 4


# -- stages by hand --------------------------------------------------------------------------------


def stage(*steps: Step, modules: list[ModuleData] | None = None, **further: Any) -> Data:
    """Takes x, and gives what the last of the steps makes."""
    row = [Step("placeholder", "x"), *steps]
    row.append(Step("output", "output", "", [["l", [["n", len(steps)]]]]))
    modules = modules or []
    children: dict[str, int | None] = {str(number): number for number in range(len(modules))}
    tensors = [TensorData("float32", [WIDTH], True, True)]
    parts = {"tensors": tensors, "sources": {}, "training": row, **further}
    return Data(modules=[*modules, module("", children=children)], **parts)


def module(kind: str, **parts: Any) -> ModuleData:
    empty: dict[str, Any] = {"attributes": {}, "parameters": {}, "buffers": {}, "children": {}}
    return ModuleData(kind=kind, training=True, transient=[], **{**empty, **parts})


def function(target: str, *args: Any, **kwargs: Any) -> Step:
    return Step("call_function", "step", target, list(args or [["n", 0]]), kwargs)


def method(target: str, *args: Any, **kwargs: Any) -> Step:
    return Step("call_method", "step", target, list(args or [["n", 0]]), kwargs)


def received(data: Data, allowed: Allowed | None = None) -> StepByStep:
    """As it comes from a wire."""
    return from_data(unpack(pack(data)), allowed or Allowed())


def refusal(data: Data, allowed: Allowed | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        received(data, allowed)
    return str(caught.value)


X = ["n", 0]
LINEAR = "torch.nn.modules.linear:Linear"
IDENTITY = "torch.nn.modules.linear:Identity"


def test_what_computes_is_taken() -> None:
    made = received(
        stage(
            function("torch.nn.functional.relu"),
            Step("call_module", "a", "0", [["n", 1]]),
            method("view", ["n", 2], -1, 2),
            function("builtins.getattr", ["n", 3], "shape"),
            function("operator.getitem", ["n", 4], 0),
            modules=[module(IDENTITY)],
        )
    )
    assert made(torch.ones(3, 4)) == [6]


# -- a trap ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def tripwire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that could be imported, and must not be; and nothing is executed."""
    (tmp_path / "tripwire.py").write_text("import sys\nsys.sprung = True\nfrom torch import nn\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sprung: list[str] = []

    def spring(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: sprung.append(name)

    monkeypatch.setattr(os, "system", spring("system"))
    monkeypatch.setattr(torch, "load", spring("load"))
    monkeypatch.setattr(torch.hub, "load", spring("hub"))
    monkeypatch.setattr(torch.ops, "load_library", spring("load_library"))
    before = set(sys.modules)
    yield
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert "tripwire" not in new
    assert not hasattr(sys, "sprung")
    assert sprung == []


FUNCTIONS = [
    "os.system", "posix.system", "subprocess.run", "builtins.eval", "builtins.exec",
    "builtins.__import__", "builtins.open", "builtins.compile", "builtins.setattr",
    "builtins.delattr", "builtins.vars", "builtins.type", "builtins.globals", "builtins.print",
    "builtins.map", "builtins.filter", "eval", "getattr", "__builtins__.eval",
    "importlib.import_module", "operator.methodcaller", "operator.attrgetter",
    "operator.itemgetter", "operator.call", "operator.setitem", "operator.delitem",
    "_operator.methodcaller", "torch.load", "torch.save", "torch.hub.load",
    "torch.ops.load_library", "torch.classes.load_library", "torch.from_file", "torch.jit.load",
    "torch.compile", "torch.vmap", "torch.set_default_device", "torch.manual_seed",
    "torch.utils.cpp_extension.load", "torch.nn.modules.module.Module",
    "torch.nn.functional.has_torch_function", "torch.nn.functional.handle_torch_function",
    "torch.Tensor.numpy", "torch.Tensor.__reduce_ex__", "torch.Tensor.add",
    "torch._C._set_grad_enabled", "torch.autocast", "torch.nn.functional.torch",
    "torch.nn.functional.importlib.import_module", "torch.nn.functional.math",
    "torch.relu.__globals__", "torch.relu.__class__", "torch.frombuffer",
    "math.__loader__.load_module", "math.__spec__", "tripwire.run", "tripwire:run",
    "shoal.launch.local.start", "shoal.pipeline.rebuild.from_data", "", "torch", "torch.",
    ".relu", "torch.relu\n", "torch. relu", "torch.relu(x) or __import__('os').system('true')",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_other_function(name: str) -> None:
    assert "is no operation that a stage may use" in refusal(stage(function(name)))


METHODS = [
    "numpy", "tofile", "storage", "untyped_storage", "_storage", "data_ptr", "const_data_ptr",
    "apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "backward",
    "__reduce_ex__", "__reduce__", "__setstate__", "__deepcopy__", "__array__", "__dlpack__",
    "__class__", "__init__", "__getattribute__", "__setattr__", "__dir__", "__format__",
    "__repr__", "share_memory_", "resize_", "resize_as_", "sparse_resize_", "set_", "module_load",
    "as_subclass", "new", "record_stream", "retain_grad", "_make_subclass", "_reduce_ex_internal",
    "__torch_function__", "to_dlpack", "format", "join", "encode", "pop", "append", "update",
    "__subclasses__", "mro", "", "load_state_dict", "register_forward_hook", "forward",
    "relu; import os", "add\n",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_no_other_method(name: str) -> None:
    assert "is no method that a stage may call" in refusal(stage(method(name)))


ATTRIBUTES = [
    "__class__", "__dict__", "__globals__", "__init__", "__reduce_ex__", "grad_fn", "grad",
    "_grad", "_backward_hooks", "_base", "_cdata", "storage", "numpy", "register_hook",
    "data_ptr", "__module__", "f_globals", "gi_frame", "func_globals", "", "shape.__class__",
    "_modules",
]  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_no_other_attribute(name: str) -> None:
    refused = refusal(stage(function("builtins.getattr", X, name)))
    assert "a stage may not read the attribute" in refused


@pytest.mark.parametrize(
    "args",
    [
        [],
        [X],
        ["x", "shape"],
        [X, X],
        [X, ["t", ["shape"]]],
        [X, "shape", None],
        [X, ["n", 0], "shape"],
    ],
)
def test_an_attribute_is_a_fixed_one(args: list[Any]) -> None:
    """Not one that comes with the batch."""
    step = Step("call_function", "step", "builtins.getattr", args)
    assert "a stage may not read the attribute" in refusal(stage(step))
    assert refusal(stage(function("builtins.getattr", X, "shape", default=None)))


def test_a_chain_of_attributes_ends_at_once() -> None:
    """Names are checked before, and again against what they are asked of."""
    made = received(stage(function("builtins.getattr", X, "values")))
    with pytest.raises(ModelError, match="no attribute 'values' of a Tensor"):
        made(torch.ones(2))
    with pytest.raises(ModelError, match="no attribute 'values' of a dict"):
        made({})
    for value in (made, nn.Linear, torch, "text", open, 3):
        for step in (function("builtins.getattr", X, "shape"), method("index"), method("to")):
            with pytest.raises(ModelError, match="a stage may"):
                received(stage(step))(value)


def test_methods_are_of_what_they_are_called_on() -> None:
    assert received(stage(method("get", X, "a")))({"a": 5}) == [5]
    assert received(stage(method("numel")))(torch.Size([2, 3])) == [6]
    assert received(stage(method("numel")))(torch.ones(2, 3)) == [6]
    with pytest.raises(ModelError, match="no method 'get' of a Tensor"):
        received(stage(method("get", X, "a")))(torch.ones(2))


def test_a_function_is_no_argument() -> None:
    """Where it could be called: max(..., key=), or a loss with a distance of its own."""
    for literal in (
        ["function", "torch.relu"],
        ["function", "builtins.getattr"],
        ["n", 1],
        ["n", -1],
        ["n", True],
        ["n", 0.0],
        ["n", "x"],
        ["g", "relu"],
        ["device", "cpu:0; import os"],
        ["dtype", "__class__"],
        ["dtype", "Tensor"],
        ["layout", "_mkldnn"],
        [],
        [[]],
        ["t", [], []],
        ["t"],
        ["z", 3],
        ["d", ["a"], []],
        ["d", [["l", []]], [1]],
        ["i", "0x"],
        ["i", "1__0"],
        ["f", "1e400"],
        ["c", 1.0],
        ["s", None],
        {"a": 1},
        b"bytes",
    ):
        refused = refusal(stage(function("builtins.max", X, key=literal)))
        assert "step 1 (step):" in refused
        assert "is no plain value" in refused


def test_nothing_is_nested_without_end() -> None:
    literal: Any = X
    for _ in range(40):
        literal = ["t", [literal]]
    assert "is no plain value" in refusal(stage(function("torch.relu", literal)))
    content = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(ModelError, match="what came is no stage"):
        unpack(content)


# -- source that nobody makes ----------------------------------------------------------------------

CODE = "x):\n  __import__('os').system('true')  #"


@pytest.mark.parametrize(
    "name", [CODE, "", "0", "a b", "a.b", "a" * 300, "é", "a\n", "__import__('os')", "a=1"]
)
def test_names_of_steps_are_names(name: str) -> None:
    """torch.fx would write them into source, and execute that."""
    for step in (Step("call_function", name, "torch.relu", [X]), Step("get_attr", name, "w")):
        assert "is no name" in refusal(stage(step))
    row = [Step("placeholder", name), Step("output", "output", "", [X])]
    assert "is no name" in refusal(stage(training=row))


@pytest.mark.parametrize(
    "path",
    [
        *(CODE, "", ".", "0.", ".0", "training", "forward", "programs", "_modules", "_modules.0"),
        *("1", "__class__", "0.forward", "0.__class__", "0.__init__.__globals__", "0.none"),
        "0.in_features",
    ],
)
def test_paths_lead_to_children_and_tensors_only(path: str) -> None:
    modules = [module(IDENTITY, attributes={"in_features": 3}, parameters={"none": None})]
    step = Step("call_module", "step", path, [X])
    assert "there is no module" in refusal(stage(step, modules=modules))
    step = Step("get_attr", "step", path)
    assert "there is no tensor" in refusal(stage(step, modules=modules))


def test_a_module_is_no_value() -> None:
    step = Step("get_attr", "step", "0")
    assert "there is no tensor '0'" in refusal(stage(step, modules=[module(IDENTITY)]))


def test_text_is_text() -> None:
    """Also where torch.fx would write it into source."""
    made = received(stage(function("builtins.tuple", ["l", [CODE, "'\"\\", "\x00"]])))
    assert made(0) == [(CODE, "'\"\\", "\x00")]


@pytest.mark.parametrize(
    "row",
    [
        [],
        [Step("placeholder", "x")],
        [Step("output", "output", "", [1]), Step("placeholder", "x")],
        [Step("output", "output", "", [1]), Step("output", "output", "", [1])],
        [function("torch.relu", 1), Step("placeholder", "x"), Step("output", "output", "", [1])],
        [Step("output", "output")],
        [Step("output", "output", "", [1, 2])],
        [Step("output", "output", "", [1], {"a": 1})],
        [Step("placeholder", "x", "", [1]), Step("output", "output", "", [1])],
        [Step("placeholder", "x"), Step("output", "output", "", [["n", 1]])],
        [method("relu")] * 100_001,
    ],
    ids=range(11),
)
def test_rows_that_make_no_sense(row: list[Step]) -> None:
    assert refusal(stage(training=row))
    assert refusal(stage(evaluating=row))


# -- modules ---------------------------------------------------------------------------------------

CLASSES = [
    "torch.nn.modules.linear:_ConvNd", "torch.nn.modules.conv:_ConvNd", "torch.nn:Linear",
    "torch.nn.modules.linear:LazyLinear", "torch.nn.modules.linear:torch",
    "torch.nn.modules.linear:math", "torch.nn.parallel.data_parallel:DataParallel",
    "torch.fx.graph_module:GraphModule", "torch.jit:ScriptModule", "torch.ao.nn.quantized:Linear",
    "torch.hub:load", "builtins:eval", "os:system", "posix:system", "subprocess:Popen",
    "shoal.pipeline.steps:StepByStep", "shoal.pipeline.layers:_Listed", "__main__:Net",
    "__mp_main__:Net", "Linear", ":", "a:", ":b", "a:b:c", "a.b", "a..b:c", ".a:b", "a:b.c",
    "a:b()", "a/b:c", "../a:b", "a b:c", "é:b", "a:b\n", "torch.nn.modules.linear:Linear.forward",
    "torch.nn.modules.linear:Linear ",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_no_other_class(name: str) -> None:
    """Whatever is allowed."""
    for packages in ([], ["os", "torch", "shoal", "__main__", "builtins", "a", "é", ""]):
        refused = refusal(stage(modules=[module(name)]), Allowed(frozenset(packages)))
        assert "is none of the classes of torch.nn that stages may use" in refused


@pytest.mark.parametrize(
    "name",
    [
        *("", "training", "_parameters", "_modules", "_forward_hooks", "_backward_hooks"),
        *("__class__", "__dict__", "__call__", "__init__", "_non_persistent_buffers_set"),
        "a" * 2000,
    ],
)
def test_attributes_that_a_module_keeps_for_itself(name: str) -> None:
    bad = module(IDENTITY, attributes={name: 1})
    assert "is no attribute that a stage may set" in refusal(stage(modules=[bad]))


def test_attributes_are_plain_values_and_operations() -> None:
    fine = {"a": ["function", "torch.relu"], "b": ["t", [1, ["f", "inf"]]]}
    made = received(stage(modules=[module(IDENTITY, attributes=fine)])).get_submodule("0")
    assert (made.a, made.b) == (torch.relu, (1, float("inf")))
    for literal in (
        ["function", "os.system"],
        ["function", "builtins.getattr"],
        ["function", "builtins.eval"],
        ["n", 0],
        ["function", ["torch.relu"]],
    ):
        bad = module(IDENTITY, attributes={"a": literal})
        assert "is no plain value" in refusal(stage(modules=[bad]))


def test_names_in_modules() -> None:
    for name in ("", "a.b", "a" * 2000):
        for part in ("parameters", "buffers", "children"):
            bad = module(IDENTITY, **{part: {name: None}})
            assert "is no name" in refusal(stage(modules=[bad]))


def test_modules_that_are_not_there() -> None:
    for child in (-1, 0, 1, 7):
        bad = module(IDENTITY, children={"a": child})
        assert "its children come after it" in refusal(stage(modules=[bad]))
    for number in (-1, 1):
        for part in ("parameters", "buffers"):
            bad = module(IDENTITY, **{part: {"a": number}})
            assert f"there is no tensor {number}" in refusal(stage(modules=[bad]))
    buffer = [TensorData("float32", [1], False, False)]
    bad = module(IDENTITY, parameters={"a": 0})
    assert "a is no parameter" in refusal(stage(modules=[bad], tensors=buffer))


def test_modules_nested_without_end() -> None:
    """64 modules of which each has the one before twice: 2**64 names."""
    rows = [module(IDENTITY)]
    for number in range(63):
        rows.append(module(IDENTITY, children={"a": number, "b": number}))
    assert "are too many" in refusal(stage(modules=rows))
    rows = [module(IDENTITY)]
    for number in range(100):
        rows.append(module(IDENTITY, children={"a": number}))
    assert "nested 65 deep are too many" in refusal(stage(modules=rows))
    assert "more than 100000" in refusal(stage(modules=[module(IDENTITY)] * 100_001))
    data = stage()
    assert "0 modules" in refusal(msgspec.structs.replace(data, modules=[]))
    assert "only the last one" in refusal(stage(modules=[module("")]))
    bad = module("", attributes={"programs": 1})
    assert "no attributes" in refusal(msgspec.structs.replace(data, modules=[bad]))


@pytest.mark.parametrize(
    "tensor",
    [
        TensorData("float32", [-1], True, True),
        TensorData("float32", [2**40, 2**40], True, True),
        TensorData("float32", [0, 2**40, 2**40], True, True),
        TensorData("float32", [1] * 65, True, True),
        TensorData("float32", [10] * 100_000, True, True),
        TensorData("qint8", [1], True, True),
        TensorData("__class__", [1], True, True),
        TensorData("int64", [1], True, True),
    ],
    ids=range(8),
)
def test_tensors_that_cannot_be(tensor: TensorData) -> None:
    assert refusal(stage(tensors=[tensor]))


def test_recurrent_layers_without_their_names() -> None:
    assert "LSTM" in refusal(stage(modules=[module("torch.nn.modules.rnn:LSTM")]))


def test_tensors_that_do_not_fit() -> None:
    made = received(stage(modules=[module(LINEAR, parameters={"weight": 0})]))
    with pytest.raises(ModelError) as caught:
        fill(
            made,
            {
                "0.weight": torch.ones(WIDTH, dtype=torch.float64),
                "bias": torch.ones(1),
            },
        )
    assert caught.value.faults == [
        "this stage has no tensor 'bias'.",
        "0.weight is float32 (4,) in this stage, and came as float64 (4,).",
    ]
    for bad in (torch.ones(WIDTH + 1), 3, None, torch.ones(WIDTH).to_sparse()):
        with pytest.raises(ModelError, match=r"0\.weight is float32 \(4,\) in this stage"):
            fill(made, {"0.weight": bad})
    assert fill(made, {}) == ["0.weight"]
    assert fill(made, {"0.weight": torch.ones(WIDTH)}) == []


# -- bytes -----------------------------------------------------------------------------------------


def small_stage() -> bytes:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0), nn.BatchNorm1d(1), nn.GRU(1, 1))
    graph = read(model)
    routes = route(graph, [])
    return pack(to_data(stage_module(graph, routes, 0))[0])


SMALL = small_stage()


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=8))
def test_bytes_that_were_changed_on_the_way(changes: list[tuple[int, int]]) -> None:
    content = bytearray(SMALL)
    for place, byte in changes:
        content[place] = byte
    try:
        made = from_data(unpack(bytes(content)), Allowed())
    except ModelError:
        return
    assert isinstance(made, StepByStep)


@given(st.binary(max_size=200))
def test_bytes_that_are_none_of_ours(content: bytes) -> None:
    with pytest.raises(ModelError, match="what came is no stage"):
        unpack(content)


def test_fields_that_nobody_knows() -> None:
    raw = msgspec.msgpack.decode(SMALL)
    with pytest.raises(ModelError, match="what came is no stage"):
        unpack(msgspec.msgpack.encode({**raw, "code": "import os"}))
    raw["training"][0].append("more")
    with pytest.raises(ModelError, match="what came is no stage"):
        unpack(msgspec.msgpack.encode(raw))


# -- classes of the user's -------------------------------------------------------------------------

GATES = """
from os import system
from torch.nn import Linear, Module
from torch import nn

class Gate(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if x.sum() > self.limit else x

class NoModule:
    pass

class Outer:
    class Inner(nn.Module):
        pass

class Stubborn(nn.Module):
    def __new__(cls, size):
        return super().__new__(cls)

def run(command):
    raise AssertionError(command)
"""


class Reef:
    """A package of the user's, that a boss has and a worker may have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "reef_net"
        self.folder.mkdir()
        (self.folder / "__init__.py").write_text("")
        self.file = self.folder / "gates.py"
        self.file.write_text(GATES)

    def model(self) -> nn.Module:
        gates: Any = importlib.import_module("reef_net.gates")
        return nn.Sequential(nn.Linear(4, 4), gates.Gate(0.5))

    def sent(self) -> tuple[Data, dict[str, Tensor], nn.Module]:
        """As a boss sends it; then what it has imported is forgotten."""
        model = self.model()
        graph = read(model)
        data, tensors = to_data(stage_module(graph, route(graph, []), 0))
        self.forget()
        return data, tensors, model

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith("reef_")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    @property
    def is_imported(self) -> bool:
        return "reef_net.gates" in sys.modules


@pytest.fixture
def reef(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reef]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Reef(tmp_path)
    yield made
    made.forget()


REEF = Allowed(frozenset({"reef_net"}))


def test_a_class_of_the_users_that_is_allowed(reef: Reef) -> None:
    data, tensors, model = reef.sent()
    assert data.sources == {
        "reef_net": hashlib.sha256(b"").hexdigest(),
        "reef_net.gates": hashlib.sha256(GATES.encode()).hexdigest(),
    }
    made = received(data, REEF)
    assert fill(made, tensors) == []
    assert type(made.get_submodule("1")).__name__ == "Gate"
    assert made.get_submodule("1").limit == 0.5
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        assert torch.equal(made(x)[0], model(x))


def test_a_class_of_the_users_that_is_not_allowed(reef: Reef) -> None:
    data, _, _ = reef.sent()
    for allowed in (Allowed(), Allowed(frozenset({"reef", "reef_net.gates", "tripwire"}))):
        refused = refusal(data, allowed)
        assert "reef_net.gates:Gate" in refused
        assert "start the worker with --allow reef_net" in refused
    assert not reef.is_imported
    assert "reef_net" not in sys.modules


def test_a_class_of_the_users_that_is_another_one_here(reef: Reef) -> None:
    data, _, _ = reef.sent()
    reef.file.write_text(f"{GATES}\nraise AssertionError\n")
    refused = refusal(data, REEF)
    assert f"{reef.file} is not the same as the boss's reef_net.gates" in refused
    assert not reef.is_imported
    reef.file.write_text(GATES)
    refused = refusal(msgspec.structs.replace(data, sources={}), REEF)
    assert "is not the same as the boss's" in refused
    assert not reef.is_imported


FILES = {
    "reef_net/gates.py": """
import os.path
import reef_net.inner.shapes
from . import helpers as h
from .bases import *

class Gate(Base):
    def forward(self, x):
        from .later import late
        return h.twice(super().forward(x)) if x.sum() > 0 else late(x)
""",
    "reef_net/bases.py": "from reef_base import Root\nclass Base(Root): pass",
    "reef_net/helpers.py": "from .inner.numbers import TWO\ndef twice(x): return TWO * x",
    "reef_net/inner/__init__.py": "",
    "reef_net/inner/numbers.py": "TWO = 2",
    "reef_net/inner/shapes.py": "",
    "reef_net/later.py": "def late(x): return x",
    "reef_net/script.py": "import reef_net.gates",
    "reef_base.py": "from torch import nn\nimport reef_other\nclass Root(nn.Identity): pass",
    "reef_other.py": "",
}
"""A class, its bases, and what they are made of; and what they are not made of."""
OTHERS = {"reef_net.script", "reef_other"}


@pytest.fixture
def files(reef: Reef) -> dict[str, Path]:
    """By module."""
    made = {}
    for name, content in FILES.items():
        path = reef.folder.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        made[name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = path
    return made


def sent_gate(reef: Reef) -> Data:
    script: Any = importlib.import_module("reef_net.script")
    graph = read(nn.Sequential(script.reef_net.gates.Gate()))
    data, _ = to_data(stage_module(graph, route(graph, []), 0))
    reef.forget()
    return data


def test_all_files_that_make_a_class_are_compared(reef: Reef, files: dict[str, Path]) -> None:
    """One whose base or helper was another computed something else without a word."""
    data = sent_gate(reef)
    assert set(data.sources) == {"reef_net", *files} - OTHERS
    received(data, REEF)
    for module, path in files.items():
        before = path.read_text()
        path.write_text(f"{before}\n# of another version\n")
        reef.forget()
        if module in OTHERS:
            received(data, REEF)
        else:
            assert f"{path} is not the same as the boss's {module}." in refusal(data, REEF)
            assert reef.is_imported == (module == "reef_base")  # which nobody has allowed
        path.write_text(before)
    for module in ("reef_net.helpers", "reef_net.inner"):
        files[module].write_text("raise AssertionError")
    reef.forget()
    refused = refusal(data, REEF)
    assert str(files["reef_net.helpers"]) in refused
    assert str(files["reef_net.inner"]) in refused


def test_a_file_that_has_changed_on_both_sides_since_it_was_imported(
    reef: Reef, files: dict[str, Path]
) -> None:
    """The worker would compute with what it has in memory."""
    received(sent_gate(reef), REEF)
    path, data = files["reef_net.inner.numbers"], sent_gate(reef)
    received(data, REEF)
    path.write_text("TWO = 3")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sources = {**data.sources, "reef_net.inner.numbers": digest}
    newer = msgspec.structs.replace(data, sources=sources)
    assert f"{path} has changed since this worker imported it" in refusal(newer, REEF)
    reef.forget()
    received(newer, REEF)


def test_a_class_of_the_users_that_is_not_here(reef: Reef) -> None:
    data, _, _ = reef.sent()
    reef.file.unlink()
    assert "there is no module reef_net.gates here" in refusal(data, REEF)
    (reef.folder / "__init__.py").unlink()
    reef.folder.rmdir()
    reef.forget()
    assert "there is no module reef_net here" in refusal(data, REEF)
    only = {"reef_net.gates": data.sources["reef_net.gates"]}
    refused = refusal(msgspec.structs.replace(data, sources=only), REEF)
    assert "the module reef_net.gates cannot be found" in refused


def test_a_module_that_cannot_be_imported(reef: Reef) -> None:
    data, _, _ = reef.sent()
    content = "raise ValueError('too old')"
    reef.file.write_text(content)
    sources = {"reef_net.gates": hashlib.sha256(content.encode()).hexdigest()}
    refused = refusal(msgspec.structs.replace(data, sources=sources), REEF)
    assert "importing reef_net.gates failed: ValueError('too old')" in refused


@pytest.mark.parametrize(
    "name", ["system", "Linear", "Module", "nn", "NoModule", "Outer", "run", "Nothing", "__file__"]
)
def test_what_else_is_in_a_module_that_is_allowed(reef: Reef, name: str) -> None:
    """Only classes of nn.Module, and of its own: not what it has imported."""
    data, _, _ = reef.sent()
    bad = stage(modules=[module(f"reef_net.gates:{name}")], sources=data.sources)
    assert "defines no such class of nn.Module" in refusal(bad, REEF)


def test_a_class_that_cannot_be_made(reef: Reef) -> None:
    data, _, _ = reef.sent()
    bad = stage(modules=[module("reef_net.gates:Stubborn")], sources=data.sources)
    assert "cannot be made without its __init__" in refusal(bad, REEF)


def test_a_namespace_has_no_source(reef: Reef) -> None:
    (reef.folder / "bare").mkdir()
    bad = stage(modules=[module("reef_net.bare:A")])
    assert "reef_net.bare has no source file to compare" in refusal(bad, REEF)


def test_functions_of_packages_that_are_allowed_are_no_operations(reef: Reef) -> None:
    for name in ("reef_net.gates.run", "reef_net.gates:run", "reef_net.gates:Gate"):
        assert "is no operation" in refusal(stage(function(name)), REEF)


# -- the tables ------------------------------------------------------------------------------------


def test_operations_have_one_function_and_find_back_to_it() -> None:
    table = known.operations()
    assert len(table) > 900
    for name, operation in table.items():
        found = known.name_of(operation)
        assert found is not None
        assert table[found] is operation or table[found] == operation, name
    assert known.name_of(os.system) is None
    assert known.name_of([]) is None


def test_no_operation_takes_code_or_reaches_beyond_tensors() -> None:
    """If torch adds some, somebody should look."""
    forbidden = [
        eval, exec, open, setattr, delattr, vars, type, compile, builtins.__import__, print,
        operator.methodcaller, operator.attrgetter, operator.call, torch.vmap, torch.compile,
    ]  # fmt: skip
    values = list(known.operations().values())
    assert not [each for each in forbidden if each in values]
    words = ("load", "save", "file", "hook", "storage", "pickle", "numpy", "ptr", "dlpack", "jit")
    names = [*known.operations(), *known._methods()[Tensor]]
    assert [name for name in names if any(word in name for word in words)] == []
    assert not [name for name in known._methods()[Tensor] if name[0] == "_" and name[-2:] != "__"]


def test_all_layers_of_torch_are_known() -> None:
    public = {kind for kind in vars(nn).values() if isinstance(kind, type)}
    layers = {kind for kind in public if issubclass(kind, nn.Module)}
    missing = {kind.__name__ for kind in layers - set(known.classes().values())}
    assert {name for name in missing if not name.startswith("Lazy")} == {"DataParallel"}
