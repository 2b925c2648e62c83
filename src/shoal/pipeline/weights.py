"""What each stage begins with: rank 0's weights or, where every rank makes its own, of a seed."""

from __future__ import annotations

import torch

from shoal.crew import Crew
from shoal.layout import Layout
from shoal.pipeline.graph import Graph
from shoal.pipeline.meta import is_on_meta, materialise
from shoal.pipeline.names import Names, State
from shoal.pipeline.routes import Routes
from shoal.pipeline.stage import Stage
from shoal.wire.link import Link


def weighted_stage(
    crew: Crew, link: Link, layout: Layout, graph: Graph, routes: Routes, seed: int | None
) -> tuple[Stage, Names, State]:
    """This rank's stage; the names of the model's state; and what no step uses of it, in stage 0.

    seed: of weights that every rank makes for itself; None: all get rank 0's.
    """
    number = layout.stage_of(crew.rank)
    stages = [Stage.of(graph, routes, each) for each in range(layout.stages)]
    owned = [list(stage.module.state_dict()) for stage in stages]
    names = Names.of(graph.model, {name for each in owned for name in each})
    stray = names.strays if number == 0 else []
    if seed is not None and is_on_meta(graph.model):
        materialise(graph.model, seed, crew.device, {*owned[number], *stray})
    state = graph.model.state_dict()
    stage = Stage.of(graph, routes, number)
    stage.module.to(crew.device)
    if seed is None and crew.rank == 0:
        for rank in range(1, crew.size):
            link.send(stages[layout.stage_of(rank)].tensors(), rank, "weights")
    elif seed is None:
        weights = link.recv(0, "weights")
        for name, tensor in stage.tensors().items():
            if not torch.equal(tensor, weights[name]):  # one that was expanded takes no values
                tensor.copy_(weights[name])
    return stage, names, {name: state[name] for name in stray}
