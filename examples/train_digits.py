"""Trains a small network on handwritten digits with DistributedDataParallel or FSDP2 over flexring.

    pip install .
    torchrun --nproc_per_node 4 examples/train_digits.py --backend flexring

At the end it trains a second time over Gloo and compares the losses (--alone leaves that out). (PyTorch 1.13 with Python 3.11
needs ``--redirects 1 --tee 1`` before the file's name; without them torchrun does not start ranks.)
"""

import csv
import gzip
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import training

TEST_IMAGES = 357
BATCH = 16
# The two backends add the gradients of the ranks in different orders. Each step changes the last bits of a float, and
# hundreds of steps amplify that. A gradient that is wrong or missing changes the third digit.
TOLERANCE = 1e-4


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images):
        return self.layers(images)


def load():
    """Returns training images, training digits, test images and test digits."""
    path = Path(__file__).resolve().parent / "data" / "digits.csv.gz"
    with gzip.open(path, "rt", newline="") as file:
        rows = torch.tensor([[float(text) for text in row] for row in csv.reader(file)])
    images, digits = rows[:, :-1] / 16, rows[:, -1].long()
    return images[:-TEST_IMAGES], digits[:-TEST_IMAGES], images[-TEST_IMAGES:], digits[-TEST_IMAGES:]


def main():
    options = training.arguments(__doc__, steps=200).parse_args()
    images, digits, test_images, test_digits = load()

    def loss_of(model, step):
        # All ranks draw the same order in each epoch, and each takes its own part of it.
        rank, world = dist.get_rank(), dist.get_world_size()
        steps = len(images) // world // BATCH
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step // steps))
        chosen = order[rank::world][step % steps * BATCH :][:BATCH]
        return functional.cross_entropy(model(images[chosen]), digits[chosen])

    def accuracy(model):
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_digits).float().mean().item()
        return f", {100 * right:.1f} % of {len(test_digits)} test images right"

    def optimizer(weights):
        return torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    return training.run(options, TOLERANCE, Network, optimizer, loss_of, report=accuracy)


if __name__ == "__main__":
    sys.exit(main())
