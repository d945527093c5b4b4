"""Models: a small residual network of this file, and those of torchvision."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features of the images, at ``1 / stride`` of their size."""
        return torch.relu(self.main(images) + self.shortcut(images))


def tiny_resnet(num_classes: int, width: int = 16) -> nn.Module:
    """Return a residual network for small images and short tests, with 78,000 weights besides those of the classes."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Block(width, width, stride=1),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


def build_model(arch: str, num_classes: int, *, pretrained: bool = False) -> nn.Module:
    """Return a model by its name: ``"tiny"``, or the name of a classification model of torchvision.

    Raises:
        SystemExit: there is no such model, or torchvision is missing or does not match this release of torch.
    """
    if arch == "tiny":
        if pretrained:
            raise SystemExit("--pretrained needs the weights of torchvision, which has none for --arch tiny")
        return tiny_resnet(num_classes)
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # a RuntimeError if it was built for another release of torch
        raise SystemExit(
            f"--arch {arch} needs torchvision, which cannot be imported ({error}). Install the release that belongs to "
            f"torch {torch.__version__}, or use --arch tiny"
        ) from error
    if arch not in models.list_models(models):
        raise SystemExit(f"torchvision has no model {arch!r}. It has: {', '.join(models.list_models(models))}")
    if not pretrained:
        return models.get_model(arch, num_classes=num_classes)  # type: ignore[no-any-return]
    if num_classes != 1000:
        raise SystemExit(f"Pretrained models have 1000 classes: --pretrained excludes --num-classes {num_classes}")
    return models.get_model(arch, weights="DEFAULT")  # type: ignore[no-any-return]
