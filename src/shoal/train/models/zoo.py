"""The nets themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MnistCnn(nn.Module):
    """Three convolutions, two linear layers: 820 k parameters, most of them in fc1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.pool1 = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.pool2 = nn.MaxPool2d(2, 2)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.pool3 = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(128 * 3 * 3, 625)
        self.fc2 = nn.Linear(625, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool1(F.relu(self.conv1(x)))
        x = self.pool2(F.relu(self.conv2(x)))
        x = self.pool3(F.relu(self.conv3(x)))
        x = x.view(-1, 128 * 3 * 3)
        x = F.relu(self.fc1(x))
        out: torch.Tensor = self.fc2(x)
        return out


class ConvNet(nn.Module):
    """Two blocks of convolution, batch norm, ReLU and pooling, and a linear layer."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = self._block(1, 16)
        self.layer2 = self._block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(x))
        out: torch.Tensor = self.fc(x.flatten(1))
        return out


class TutorialCnn(nn.Module):
    """The net of the classic distributed tutorial: 10 and 20 channels, dropout, 50 units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc_drop = nn.Dropout()
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = self.fc_drop(F.relu(self.fc1(x.flatten(1))))
        out: torch.Tensor = self.fc2(x)
        return out


class ResidualMlp(nn.Module):
    """Five linear layers of 512; what the second gives is added to what the fourth takes."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.fc1 = nn.Linear(1, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, width)
        self.fc4 = nn.Linear(width, width)
        self.fc5 = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(x))
        skip = self.fc2(x)
        x = F.relu(self.fc3(F.relu(skip)))
        x = F.relu(self.fc4(x + skip))
        return torch.sigmoid(self.fc5(x))
