"""A plain PyTorch loop on one process or many.

python examples/plain_loop.py                         # alone
shoal run --workers 2 examples/plain_loop.py          # two ranks of this machine
torchrun --nproc-per-node 2 examples/plain_loop.py    # the same under torchrun

# two machines, one line on each
RANK=0 WORLD_SIZE=2 MASTER_ADDR=192.168.0.1 MASTER_PORT=23456 python examples/plain_loop.py
RANK=1 WORLD_SIZE=2 MASTER_ADDR=192.168.0.1 MASTER_PORT=23456 python examples/plain_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Points in the plane; the class is the quadrant."""
    points = torch.randn(num_samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long())


with shoal.join() as crew:
    train_set, test_set = make_data(20_000, seed=0), make_data(2_000, seed=1)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4))

    model = crew.replicate(net, sync="ring")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = crew.loader(train_set, batch_size=128)

    crew.print(f"{crew.size} rank(s), {len(loader)} steps an epoch")
    for epoch in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result = crew.evaluate(model, test_set)
        crew.print(f"epoch {epoch + 1}: test accuracy {result.accuracy:.3f} of {result.samples}")

    if crew.rank == 0:
        plain = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4))
        plain.load_state_dict(model.state_dict())  # no prefix to strip: it is the plain model's
