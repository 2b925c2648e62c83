"""What is started: a script that meets by env:// and takes one step, as torchrun's users write it.

Rank 0 prints the time of day when the step is done, and the sum of the weights.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
net(x).square().mean().backward()
for parameter in net.parameters():
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
if dist.get_rank() == 0:
    total = sum(float(parameter.sum()) for parameter in net.parameters())
    print(f"first step at {time.time():.4f} with {total:.6f}", flush=True)
dist.destroy_process_group()
