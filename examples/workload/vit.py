"""A small vision transformer that learns to tell ten kinds of stripes apart.

accelpact compare --workload examples/workload/vit.py:build --strategies accelpact,cold
"""

import math

import torch
from torch import nn

from harness.workload import Given, Training

SIZE, PATCH, WIDTH, DEPTH, KINDS = 32, 8, 64, 4, 10


class Stripes:
    """Images whose stripes' direction is the class; sample i is the same every time."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(index)
        kind = index % KINDS
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        angle = math.pi * kind / KINDS
        image = torch.sin(x * math.cos(angle) + y * math.sin(angle)).expand(3, -1, -1)
        image = image + 0.3 * torch.randn(3, SIZE, SIZE, generator=noise)
        return image.to(self.dtype), kind


class ViT(nn.Module):
    """Patches, places, layers, and one guess from the mean of all patches."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, images):
        found = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(found).mean(dim=1))


def build(given: Given) -> Training:
    return Training(
        model=ViT(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=Stripes(given.dtype),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        blocks=(nn.TransformerEncoderLayer,),
        microbatch=4,
    )
