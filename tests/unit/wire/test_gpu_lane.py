"""Tensors that stay on their GPU, with gloo in NCCL's place: which way each goes, and in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.wire.dist_link import DistLink
from shoal.wire.front import Packer
from shoal.wire.gpu_lane import GpuLane
from shoal.wire.header import DEFAULT_LIMIT_BYTES
from shoal.wire.zmq_link import ZmqLink

SOON_S = 30.0
CPU = torch.device("cpu")


def gloo_group(store: dist.Store, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, 2, options)


class CountingLane(GpuLane):
    """Takes tensors of double precision for those on a GPU."""

    num_sent = 0

    def stays(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float64

    def send(self, tensor: torch.Tensor) -> Any:
        CountingLane.num_sent += 1
        return super().send(tensor)


@pytest.fixture
def links() -> Iterator[list[DistLink]]:
    CountingLane.num_sent = 0
    made = [DistLink(rank, 2, timeout_s=SOON_S) for rank in range(2)]
    store = dist.HashStore()

    def lane(meeting: dist.Store, rank: int) -> GpuLane:
        return CountingLane(dist.PrefixStore("gpu", meeting), rank, CPU, gloo_group)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda link: link.join(store, "127.0.0.1", make_lane=lane), made))
    yield made
    for link in made:
        link.close()


def test_both_ways_in_one_message(links: list[DistLink]) -> None:
    tree = {
        "gpu": torch.randn(3, 4, dtype=torch.float64),
        "host": torch.randn(5),
        "more": [torch.arange(100_000), torch.randn(70_000, dtype=torch.float64).view(2, -1)],
    }
    links[0].send(tree, to=1)
    got = links[1].recv(0)
    assert torch.equal(got["gpu"], tree["gpu"])
    assert torch.equal(got["host"], tree["host"])
    assert all(map(torch.equal, got["more"], tree["more"]))
    assert CountingLane.num_sent == 2


def test_into_a_ready_place(links: list[DistLink]) -> None:
    place = {"x": torch.zeros(4, dtype=torch.float64), "n": torch.zeros(2)}
    links[0].send({"x": torch.ones(4, dtype=torch.float64), "n": torch.ones(2)}, to=1)
    assert links[1].recv(0, into=place)["x"] is place["x"]
    assert place["x"].tolist() == [1, 1, 1, 1]


def test_two_that_send_to_each_other_at_once(links: list[DistLink]) -> None:
    large = torch.randn(2_000_000, dtype=torch.float64)
    received: dict[int, torch.Tensor] = {}

    def exchange(rank: int) -> None:
        links[rank].send(large, to=1 - rank)
        received[rank] = links[rank].recv(1 - rank)

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert torch.equal(received[0], large)
    assert torch.equal(received[1], large)


def test_a_rank_that_has_none_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [ZmqLink(rank, 2, timeout_s=SOON_S) for rank in range(2)]
    for link in made:
        link.connect([each.card for each in made])
    for link in made:
        link.settle()
    content = torch.zeros(100_000)
    head, _ = Packer(DEFAULT_LIMIT_BYTES, stays=lambda t: True).pack(content, "", 0)
    packer = made[0]._peers[1].packer
    monkeypatch.setattr(packer, "pack", lambda *_: (head, [content.numpy()]))
    made[0].send(content, to=1)
    with pytest.raises(Exception, match="for a GPU"):
        made[1].recv(0)
    assert "dropped rank 0" in caplog.text
    for link in made:
        link.close()
