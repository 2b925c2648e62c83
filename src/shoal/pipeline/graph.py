"""A model as a row of units: what can be cut where, and which values cross the cuts.

A unit is one step of the computation: a call of a module, a function, a method. The row is in the
order in which the model itself computes. A stage is a stretch of the row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import fx, nn

from shoal.errors import ModelError
from shoal.pipeline.fixed import FixedValues
from shoal.pipeline.nodes import changes_in_place, inside, is_unit, line_of
from shoal.pipeline.staged import Stubborn
from shoal.pipeline.trace import keep_whole, trace
from shoal.pipeline.unseen import memory_of
from shoal.pipeline.views import VIEWS, memory_roots
from shoal.settings import counted
from shoal.wire.tree import Tree


@dataclass(frozen=True)
class Graph:
    """A model that has been read, in both of its modes."""

    model: nn.Module
    training: fx.Graph
    evaluating: fx.Graph
    inputs: list[str]
    """The model's inputs, as values."""
    input_names: list[str]
    """What `forward` calls them."""
    units: list[str]
    """Names of the steps, in order; the same in both modes."""
    stubborn: Stubborn = field(default_factory=dict)
    """Modules that train() or eval() of the model does not put into its own mode."""
    values: FixedValues = field(default_factory=FixedValues)
    """Plain values that the steps were read with."""

    def given(self, inputs: dict[str, Tree]) -> dict[str, Tree]:
        """The inputs of a batch, which are known by value, by the names that forward() has."""
        return {
            name: inputs[value] for value, name in zip(self.inputs, self.input_names, strict=True)
        }

    def nodes(self) -> list[fx.Node]:
        """Of the units."""
        return [node for node in self.training.nodes if is_unit(node)]

    def names(self) -> list[str]:
        """Of the units, as the user knows them: by the module that begins there, if one does."""
        begins = beginnings(self)
        return [
            next(
                (path for path in reversed(paths_of(node)) if begins.get(path) == number),
                str(node.name),
            )
            for number, node in enumerate(self.nodes())
        ]

    def users(self) -> dict[str, list[int]]:
        """By value: the units that use it; `len(units)` stands for the model's output."""
        number = {name: i for i, name in enumerate(self.units)}
        found: dict[str, set[int]] = {}
        for node in [*self.training.nodes, *self.evaluating.nodes]:
            if node.op == "placeholder" or is_unit(node):
                uses = {number.get(user.name, len(self.units)) for user in node.users}
                found.setdefault(node.name, set()).update(uses)
        return {value: sorted(uses) for value, uses in found.items()}


def read(model: nn.Module, inputs: Sequence[str] | None = None) -> Graph:
    """Raises ModelError if the model cannot be read."""
    was_training = {module: module.training for module in model.modules()}
    try:
        training, evaluating, values = _both_modes(model, inputs, was_training)
        stubborn = _stubborn(model)
    finally:
        for module, mode in was_training.items():
            module.training = mode
    return Graph(
        model,
        training,
        evaluating,
        [str(node.name) for node in training.nodes if node.op == "placeholder"],
        [str(node.target) for node in training.nodes if node.op == "placeholder"],
        [node.name for node in training.nodes if is_unit(node)],
        stubborn,
        values,
    )


def _stubborn(model: nn.Module) -> Stubborn:
    """A train() of the user's may leave out a part, as a batch norm that is to stay as it is."""
    modes = [
        {name: each.training for name, each in model.train(mode).named_modules()}
        for mode in (True, False)
    ]
    found = {name: (modes[0][name], modes[1][name]) for name in modes[0] if name}
    return {name: pair for name, pair in found.items() if pair != (True, False)}


def _both_modes(
    model: nn.Module,
    inputs: Sequence[str] | None,
    was_training: Mapping[nn.Module, bool],
) -> tuple[fx.Graph, fx.Graph, FixedValues]:
    whole: set[str] = set()
    # A whole module asks its own mode, whatever the model's is.
    others = {n for n, each in model.named_modules() if was_training[each] != was_training[model]}
    while True:
        values = FixedValues()
        training = trace(model.train(), inputs, whole, values)
        known = set(whole)
        evaluating = trace(model.eval(), inputs, whole, values)
        if whole != known:  # what is whole in one mode is so in the other
            continue
        different = _different_steps(training, evaluating)
        if not different:
            asking = [n for n in _asking_the_mode(training, evaluating) if inside(n) in others]
            if any(keep_whole(node, whole) for node in asking):
                continue
            return training, evaluating, values
        if not any(keep_whole(node, whole) for node in different):
            raise ModelError(
                f"{type(model).__name__}.forward takes other steps in eval() than in train(); a "
                "model can be cut only where they are the same. Ways out: put the part that "
                "depends on self.training into an nn.Module of its own, which is kept whole; or "
                "use nn.Dropout and its like instead of asking self.training."
                + line_of(different[0])
            )


def _different_steps(training: fx.Graph, evaluating: fx.Graph) -> list[fx.Node]:
    """The first ones that the two modes do not have in common."""
    # Constants are numbered through both modes, and are no steps.
    rows = [[n for n in graph.nodes if n.op != "get_attr"] for graph in (training, evaluating)]
    for pair in zip_longest(*rows):
        if len({(n.name, n.op, n.target) if n else None for n in pair}) > 1:
            return [node for node in pair if node]
    return []


def _asking_the_mode(training: fx.Graph, evaluating: fx.Graph) -> list[fx.Node]:
    """Steps of both modes whose arguments are not the same, as F.dropout(x, 0.1, self.training)."""
    of_eval = {node.name: node for node in evaluating.nodes}
    return [
        node
        for node in training.nodes
        if is_unit(node) and _arguments(node) != _arguments(of_eval[node.name])
    ]


def _arguments(node: fx.Node) -> str:
    named = fx.map_arg((node.args, node.kwargs), lambda n: "" if n.op == "get_attr" else n.name)
    return repr(named)


def paths_of(node: fx.Node) -> list[str]:
    """Of the modules that a step is computed in, the outermost first."""
    paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module":
        paths.append(str(node.target))
    return list(dict.fromkeys(path for path in paths if path))


def modules_in(graph: Graph, units: range) -> list[str]:
    """The model's own modules that are computed in these units; steps where there are none."""
    found = [
        name
        for node in graph.nodes()[units.start : units.stop]
        for name in _modules_of(node, graph.model)
    ]
    return list(dict.fromkeys(found)) or graph.names()[units.start : units.stop]


def _modules_of(node: fx.Node, model: nn.Module) -> list[str]:
    """What a step is of: innermost modules, and parameters that a module with others inside has."""
    if node.op == "call_module":
        return [str(node.target)]
    found = [path for path in paths_of(node)[-1:] if not _has_children(model, path)]
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            path = str(source.target)
            owner = path.rpartition(".")[0]
            if isinstance(attribute(model, path), nn.Parameter):
                found.append(path if _has_children(model, owner) else owner or path)
    return found


def _has_children(model: nn.Module, path: str) -> bool:
    return any(True for _ in model.get_submodule(path).children())


# -- cuts by name ----------------------------------------------------------------------------------


def beginnings(graph: Graph) -> dict[str, int]:
    """By module: the unit that it begins with."""
    found: dict[str, int] = {}
    for number, node in enumerate(graph.nodes()):
        for path in paths_of(node):
            words = path.split(".")
            for end in range(1, len(words) + 1):
                found.setdefault(".".join(words[:end]), number)
    return found


def unit_of(graph: Graph, name: str) -> int | None:
    """The unit that module `name` begins with, or the step of that name."""
    begins = beginnings(graph)
    if name in begins:
        return begins[name]
    return graph.units.index(name) if name in graph.units else None


def cuts_at(graph: Graph, names: Sequence[str], num_stages: int) -> list[int]:
    """The units that stages 1, 2, ... begin with, of the names that the user gave."""
    known = [name for name, _ in graph.model.named_modules() if name]
    faults = []
    cuts: list[int] = []
    for name in names:
        number = unit_of(graph, name)
        if number is None and name in known:
            faults.append(f"cut {name}: the model has this module, but never calls it.")
        elif number is None:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            has = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
            faults.append(f"cut {name}: the model has no module of that name.{hint} It has: {has}.")
        elif number == 0:
            faults.append(f"cut {name}: is where the model begins; a cut comes before a module.")
        elif cuts and number <= cuts[-1]:
            faults.append(f"cut {name}: comes no later than the cut before it.")
        else:
            cuts.append(number)
    if len(names) != num_stages - 1:
        faults.append(
            f"it takes {counted(num_stages - 1, 'cut')} to make {counted(num_stages, 'stage')}; "
            f"{len(names)} given: "
            f"{', '.join(names) or 'none'}."
        )
    if faults:
        raise ModelError(faults)
    return cuts


# -- what must stay together -----------------------------------------------------------------------


Place = tuple[int, int]


def place_of(tensor: torch.Tensor) -> Place:
    """The same for tensors that begin in the same memory: `a.data = b.data` makes two of one."""
    memory = memory_of(tensor)
    return memory, 0 if memory == id(tensor) else int(tensor.storage_offset())


def tensors_used(graph: Graph) -> list[set[Place]]:
    """Of each unit: the parameters and buffers that it uses, but those only read."""
    only_read = _only_read(graph)
    return [used - only_read for used in tensors_held(graph)]


def tensors_held(graph: Graph) -> list[set[Place]]:
    """Of each unit: the parameters and buffers that its stage must have, in either mode."""
    modes = (_held(graph, nodes) for nodes in (graph.training.nodes, graph.evaluating.nodes))
    return [one | other for one, other in zip(*modes, strict=True)]


def _held(graph: Graph, nodes: fx.graph._node_list) -> list[set[Place]]:
    found = []
    kept = {node.name: node for node in nodes if node.op == "get_attr"}
    roots = memory_roots(graph.model, nodes)
    for node in filter(is_unit, nodes):
        used: set[Place] = set()
        if node.op == "call_module":
            module = graph.model.get_submodule(str(node.target))
            used |= {place_of(t) for t in [*module.parameters(), *module.buffers()]}
        sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
        if changes_in_place(node, graph.model):
            sources += [kept[root] for root in roots[node.name] & kept.keys()]
        used |= {place_of(attribute(graph.model, str(source.target))) for source in sources}
        found.append(used)
    output = next(node for node in nodes if node.op == "output")
    for source in output.all_input_nodes:  # what the model returns is put together by its last unit
        if source.op == "get_attr" and found:
            found[-1].add(place_of(attribute(graph.model, str(source.target))))
    return found


def _only_read(graph: Graph) -> set[Place]:
    """Buffers of which steps take pieces or compute with them: each stage may have its own.

    Others may be changed by the step that is given them (F.batch_norm does so).
    """
    found: set[Place] = set()
    changed: set[Place] = set()
    for nodes in (graph.training.nodes, graph.evaluating.nodes):
        roots = memory_roots(graph.model, nodes)
        writers = [node for node in nodes if changes_in_place(node, graph.model)]
        written = {root for node in writers for root in roots[node.name]}
        for node in nodes:
            if node.op == "call_module":
                changed |= set(map(place_of, graph.model.get_submodule(str(node.target)).buffers()))
            elif node.op == "get_attr":
                tensor = attribute(graph.model, str(node.target))
                is_read = node.name not in written and all(map(_reads, node.users))
                is_buffer = not isinstance(tensor, nn.Parameter)
                (found if is_read and is_buffer else changed).add(place_of(tensor))
    return found - changed


def _reads(user: fx.Node) -> bool:
    if getattr(user.target, "__module__", "") == "_operator":
        return True
    return user.op == "call_method" and user.target in VIEWS


def attribute(model: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer at `path`."""
    where, _, name = path.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(where), name)
    return found


def shared(graph: Graph) -> list[tuple[int, int]]:
    """Pairs of units that use the same parameters or buffers, and so must be in one stage."""
    last: dict[Place, int] = {}
    pairs = []
    for number, used in enumerate(tensors_used(graph)):
        for each in used:
            if each in last:
                pairs.append((last[each], number))
            last[each] = number
    return sorted(set(pairs))


def check_shared(graph: Graph, cuts: Sequence[int]) -> None:
    """Raises ModelError if a cut parts what shares parameters or buffers."""
    names, used, nodes = graph.names(), tensors_used(graph), graph.nodes()
    faults = []
    for a, b in shared(graph):
        between = [cut for cut in cuts if a < cut <= b]
        if between:
            faults.append(
                f"{names[a]} and {names[b]} share {_called(graph, used[a] & used[b])}, and "
                f"the cut at {names[between[0]]} would part them. Cut elsewhere: before the first "
                f"or after the last of them{_or_at_once(nodes[a], nodes[b])}."
            )
    if faults:
        raise ModelError(faults)


def _or_at_once(one: fx.Node, other: fx.Node) -> str:
    is_same = one.op == other.op == "call_module" and one.target == other.target
    if not is_same or one in _before(other):
        return ""
    return f"; or call {one.target} once, with both inputs in one batch (torch.cat)"


def _before(node: fx.Node) -> set[fx.Node]:
    """All that it is computed from."""
    found, left = set(), list(node.all_input_nodes)
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += each.all_input_nodes
    return found


def _called(graph: Graph, tensors: set[Place]) -> str:
    """As a user knows them; buffers only where they are all that there is."""
    for kind, known in (
        ("parameters", graph.model.named_parameters()),
        ("buffers", graph.model.named_buffers()),
    ):
        if names := [name for name, tensor in known if place_of(tensor) in tensors]:
            return f"{kind} ({', '.join(names)})"
    return "tensors of the model"
