"""Trains a small GPT (13.8 million parameters) on text with DistributedDataParallel or FSDP2 over flexring.

    pip install .
    torchrun --nproc_per_node 4 examples/train_gpt.py --backend flexring
    torchrun --nproc_per_node 4 examples/train_gpt.py --backend flexring --strategy fsdp2

It predicts the next byte of a text: of the source of Python's standard library, if --text names no other file. At the end it
trains a second time over Gloo and compares the losses (--alone leaves that out). With several nodes, start torchrun on each
one; examples/two_nodes.sh does so for two network namespaces of this machine. (PyTorch 1.13 with Python 3.11 needs
``--redirects 1 --tee 1`` before the file's name; without them torchrun does not start ranks.)
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import training

LAYERS, WIDTH, HEADS, CONTEXT, BYTES = 6, 432, 6, 256, 256
# Adam amplifies the last bits of gradients, whose terms the two backends add in different orders.
TOLERANCE = 1e-3


class Block(nn.Module):
    """Attention to earlier positions, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, states):
        states = states + self.attend(self.norms[0](states))
        return states + self.perceptron(self.norms[1](states))

    def attend(self, states):
        batch, length, _ = states.shape
        heads = self.query_key_value(states).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        # torch 1.13 has no scaled_dot_product_attention.
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.project((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, text):
        states = self.bytes(text) + self.positions(torch.arange(text.shape[1]))
        for layer in self.layers:
            states = layer(states)
        return self.head(self.norm(states))


def load(path):
    """The bytes of a text."""
    files = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)[: 1 << 20]), dtype=torch.uint8)


def batch_of(text, step, sequences, length):
    """Random pieces of the text, other ones on each rank and in each step, and the bytes that follow."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - length - 1, (sequences,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]


def main():
    parser = training.arguments(__doc__, steps=20)
    parser.add_argument("--text", help="a file to learn")
    parser.add_argument("--sequences", type=int, default=2, help="pieces of text in a batch of one rank")
    parser.add_argument("--length", type=int, default=64, help=f"bytes in a piece, at most {CONTEXT}")
    options = parser.parse_args()
    text = load(options.text)

    def loss_of(model, step):
        inputs, targets = batch_of(text, step, options.sequences, options.length)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return training.run(options, TOLERANCE, Gpt, lambda weights: torch.optim.AdamW(weights, lr=3e-4), loss_of)


if __name__ == "__main__":
    sys.exit(main())
