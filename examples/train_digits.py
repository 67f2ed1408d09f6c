"""Trains a small network on handwritten digits with DistributedDataParallel over flexring, over gloo, or over
both with the same initial weights, and compares the loss curves.

    cargo build --release
    torchrun --nproc_per_node 4 examples/train_digits.py --backend both

(PyTorch 1.13 with Python 3.11 needs ``--redirects 1 --tee 1`` before the file's name; without them it does not start ranks.)

The exit code is 1 if the two loss curves differ by more than rounding, or if ranks end with different weights.
"""

import argparse
import csv
import gzip
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
import flexring.torch  # noqa: E402

SEED = 1998
TEST_IMAGES = 357
BATCH = 16
# The two backends add the gradients of the ranks in different orders. Each step changes the last bits of a float, and
# hundreds of steps amplify that. A gradient that is wrong or missing changes the third digit.
TOLERANCE = 1e-5


def load():
    """Returns training images, training digits, test images and test digits."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", newline="") as file:
        rows = torch.tensor([[float(text) for text in row] for row in csv.reader(file)])
    images, digits = rows[:, :-1] / 16, rows[:, -1].long()
    return images[:-TEST_IMAGES], digits[:-TEST_IMAGES], images[-TEST_IMAGES:], digits[-TEST_IMAGES:]


def mean_over_ranks(value):
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def ranks_agree(model):
    """Whether all ranks have bitwise equal weights."""
    mine = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def train(backend, data, epochs):
    """Trains with the same initial weights each time. Returns the loss of each epoch, and whether all ranks have equal
    weights at the end."""
    images, digits, test_images, test_digits = data
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # Small buckets, so that several are reduced at a time.
    model = DistributedDataParallel(network, bucket_cap_mb=0.01)
    comm = flexring.torch.register(model) if backend == "flexring" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(SEED)

    losses = []
    start = time.monotonic()
    for _ in range(epochs):
        # All ranks draw the same order, and each takes its own part of it.
        mine = torch.randperm(len(images), generator=order)[rank::world]
        total, steps = 0.0, 0
        for batch in mine[: len(images) // world].split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), digits[batch])
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        losses.append(mean_over_ranks(total / steps))
    seconds = time.monotonic() - start

    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_digits).float().mean().item()
    same = ranks_agree(model)
    if rank == 0:
        print(f"{backend}: {world} ranks, {epochs} epochs in {seconds:.1f} s")
        print(f"  loss      {' '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"  accuracy  {100 * right:.1f} % of {len(test_digits)} test images")
        print(f"  weights   {'the same on all ranks' if same else 'DIFFERENT between ranks'}")
    if comm is not None:
        comm.close()
    return losses, same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["flexring", "gloo", "both"], default="flexring")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = load()
    backends = ["gloo", "flexring"] if options.backend == "both" else [options.backend]
    runs = [train(backend, data, options.epochs) for backend in backends]

    passed = all(same for _, same in runs)
    if len(runs) == 2:
        (gloo, _), (ours, _) = runs
        difference = max(abs(one - other) / one for one, other in zip(gloo, ours))
        passed = passed and difference <= TOLERANCE
        if dist.get_rank() == 0:
            verdict = "agree" if difference <= TOLERANCE else "DIFFER"
            print(f"the loss curves {verdict}: the largest relative difference is {difference:.1e}, {TOLERANCE:.0e} is allowed")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
