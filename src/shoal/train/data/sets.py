"""Images as a data set: one sample at a time, or a whole batch in one go."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.train.data.idx import Bytes

MNIST_MEAN_STD = (0.1307, 0.3081)
FASHION_MEAN_STD = (0.2860, 0.3530)


class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Grey images, kept as bytes (a quarter of float32) and normalised when they are taken."""

    def __init__(self, images: Bytes, labels: Bytes, mean_std: tuple[float, float]) -> None:
        # (n, 1, 28, 28) here, so that nothing needs reshaping in the loop.
        self.images = torch.from_numpy(images).unsqueeze(1).contiguous()
        self.labels = torch.from_numpy(labels).to(torch.int64)
        self.mean, self.std = mean_std

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalised(self.images[index]), self.labels[index]

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The batch x (b, 1, 28, 28) and y (b,) of these samples: the loop's way, bit for bit as
        stacking `self[i]`, and some forty times faster."""
        pixels = self.images.index_select(0, indices)
        return self._normalised(pixels), self.labels.index_select(0, indices)

    def _normalised(self, pixels: Tensor) -> Tensor:
        # In place, each step rounded by itself, as torchvision's ToTensor and Normalize do: a fused
        # scale-and-shift would be 15 us faster a batch, and would no longer be their bits.
        return pixels.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)
