"""A residual network of 50 layers for 224x224 images, 25.5 M weights, with random weights, as TorchScript.

Its size is that of ResNet-50, so its time on a GPU is too; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

from bench.lib.child import Handler

BLOCKS = (3, 4, 6, 3)
CLASSES = 1000


def network(width: int = 64, blocks: tuple[int, ...] = BLOCKS) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)

    def unit(inner: int, outer: int, kernel: int, stride: int = 1) -> list[Any]:
        convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outer)]

    class ResidualBlock(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: int, width: int, stride: int) -> None:
            super().__init__()
            first, second = unit(inner, width, 1), unit(width, width, 3, stride)
            self.body = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *unit(width, 4 * width, 1))
            same = stride == 1 and inner == 4 * width
            self.beside = nn.Identity() if same else nn.Sequential(*unit(inner, 4 * width, 1, stride))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.beside(x))

    layers = [*unit(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(ResidualBlock(inner, width << stage, 2 if stage and not number else 1))
            inner = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, CLASSES)).eval()


def save_network(path: str, side: int, width: int, blocks: list[int]) -> Handler:
    """In a process of its own, so that the memory of PyTorch is returned."""
    import torch

    with torch.inference_mode():
        torch.jit.trace(network(width, tuple(blocks)), torch.zeros(2, 3, side, side)).save(path)
    return dict


def save_adder(path: str, width: int) -> Handler:
    """y = x + 1."""
    import torch

    class AddOne(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x + 1

    torch.jit.trace(AddOne(), torch.zeros(1, width)).save(path)
    return dict


def save_reader(path: str) -> Handler:
    """The last element of each row: the whole input is sent to the device, and hardly anything computed."""
    import torch

    class Last(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x[:, -1:] + 0

    torch.jit.trace(Last(), torch.zeros(1, 16)).save(path)
    return dict
