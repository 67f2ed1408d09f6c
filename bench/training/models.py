"""What `make bench-training` trains: a ResNet, and the GPT of examples/train_gpt.py, each with its data.

The data depend on step and rank only, so that all libraries train with the same. A class has the model, the optimizer, the batch of one
rank in words, and how far the loss may be from Gloo's, as a part of it: libraries add gradients in different orders, so that their last bits
differ, and training amplifies that.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
import train_gpt  # noqa: E402

CLASSES, PIXELS = 10, 32


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, channels, stride):
        super().__init__()
        self.main = nn.Sequential(
            *convolution(before, channels, 3, stride), nn.ReLU(), *convolution(channels, channels, 3, 1)
        )
        same = before == channels and stride == 1
        # A block starts as its shortcut. Otherwise the first steps amplify the last bits of gradients a thousandfold.
        nn.init.zeros_(self.main[-1].weight)
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(before, channels, 1, stride))

    def forward(self, images):
        return functional.relu(self.main(images) + self.shortcut(images))


def convolution(before, channels, size, stride):
    """A convolution and the normalization of its channels."""
    return nn.Conv2d(before, channels, size, stride, size // 2, bias=False), nn.BatchNorm2d(channels)


def resnet():
    """ResNet-18 as it is used for CIFAR's images of 32 x 32 pixels: 11.2 million parameters."""
    layers, before = [*convolution(3, 64, 3, 1), nn.ReLU()], 64
    for channels in (64, 128, 256, 512):
        layers += [Block(before, channels, 1 if channels == 64 else 2), Block(channels, channels, 1)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class ImageTraining:
    """A ResNet learns classes of images. Each class is a pattern, and an image is the pattern of its class under noise."""

    name = "resnet"
    # Images in a batch of one rank, and the noise's standard deviation; that of patterns is 1.
    images, noise = 4, 0.5
    batch = f"{images} images of {PIXELS} x {PIXELS} pixels"
    # Normalization over so few images amplifies differences more than a GPT does.
    tolerance = 1e-2

    def __init__(self):
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = functional.interpolate(coarse, size=PIXELS)

    def model(self):
        return resnet()

    def optimizer(self, weights):
        return torch.optim.SGD(weights, lr=0.02, momentum=0.9)

    def loss(self, model, step):
        generator = torch.Generator().manual_seed(1 + step * dist.get_world_size() + dist.get_rank())
        classes = torch.randint(CLASSES, (self.images,), generator=generator)
        noise = torch.randn(self.images, 3, PIXELS, PIXELS, generator=generator)
        return functional.cross_entropy(model(self.patterns[classes] + self.noise * noise), classes)


class TextTraining:
    """A GPT learns the source of Python's standard library, byte by byte."""

    name = "gpt"
    # Pieces in a batch of one rank, and bytes in a piece.
    pieces, length = 2, 64
    batch = f"{pieces} x {length} bytes of text"
    tolerance = train_gpt.TOLERANCE

    def __init__(self):
        self.text = train_gpt.load(None)

    def model(self):
        return train_gpt.Gpt()

    def optimizer(self, weights):
        return torch.optim.AdamW(weights, lr=3e-4)

    def loss(self, model, step):
        inputs, targets = train_gpt.batch_of(self.text, step, self.pieces, self.length)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
