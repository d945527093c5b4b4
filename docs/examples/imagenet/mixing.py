"""Mixup and CutMix: mix each image of a batch with its neighbor, and their labels in the same proportion."""

from __future__ import annotations

import math
from random import Random

import torch
from torch.nn.functional import one_hot


def mix_batch(
    images: torch.Tensor, labels: torch.Tensor, num_classes: int, rng: Random, *, mixup: float, cutmix: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mixed images, and the probabilities of their classes.

    Args:
        images: floats (B, C, H, W), on any device.
        labels: the classes (B).
        num_classes: the number of classes.
        rng: draws the proportion and the box of the batch.
        mixup: the parameter alpha of Mixup, which adds whole images; 0 turns it off.
        cutmix: the parameter alpha of CutMix, which replaces a box; 0 turns it off. With both, each batch draws one.
    """
    targets = one_hot(labels, num_classes).float()
    if not mixup and not cutmix:
        return images, targets
    uses_cutmix = cutmix > 0 and (not mixup or rng.random() < 0.5)
    alpha = cutmix if uses_cutmix else mixup
    own = rng.betavariate(alpha, alpha)
    others = images.roll(1, 0)
    if uses_cutmix:
        height, width = images.shape[-2:]
        tall, wide = round(height * math.sqrt(1 - own)), round(width * math.sqrt(1 - own))
        top, left = rng.randint(0, height - tall), rng.randint(0, width - wide)
        images = images.clone()
        images[..., top : top + tall, left : left + wide] = others[..., top : top + tall, left : left + wide]
        own = 1 - tall * wide / (height * width)
    else:
        images = own * images + (1 - own) * others
    return images, own * targets + (1 - own) * targets.roll(1, 0)
