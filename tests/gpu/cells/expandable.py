"""All-reduces of registered tensors in PyTorch's expandable segments, which the allocator maps piece by piece.

Ranks are processes with the variables of torchrun and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Rank 0 prints a line of JSON;
a wrong result, or a registered tensor that goes through stages, ends with an error.
"""

import datetime
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist

import flexring.torch

DIRECT = "kernels access registered vectors directly"
CALLS = 50
# Elements: the longest needs several physical allocations of 20 MiB.
COUNTS = (1 << 20, (1 << 24) + 4)


def milliseconds(comm, tensor, wanted):
    """Sums `tensor` again and again, checks the first sum, and returns the time of the others."""
    comm.all_reduce(tensor)
    if not torch.equal(tensor, wanted):
        raise SystemExit(f"a wrong sum of {tensor.numel()} elements: {tensor[:8]} instead of {wanted[:8]}")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        comm.all_reduce(tensor)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / CALLS


def measured(comm, count, result):
    own = torch.arange(count, device="cuda").remainder(7).float()
    tensor = own + comm.rank
    wanted = own * comm.size + comm.size * (comm.size - 1) / 2
    result[f"staged_{count}_ms"] = milliseconds(comm, tensor, wanted)
    with comm.registered(tensor):
        # The other ranks map it in their next call.
        comm.all_reduce(torch.ones(1, device="cuda"))
        comm.barrier()
        tensor.copy_(own + comm.rank)
        result[f"direct_{count}_ms"] = milliseconds(comm, tensor, wanted)


def main():
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    torch.zeros(1, device="cuda")
    # What flexring logs says whether calls were direct.
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        comm = flexring.torch.from_process_group()
        result = {"torch": torch.__version__, "expandable_calls": CALLS}
        for count in COUNTS * 2:
            measured(comm, count, result)
            # Unmaps the memory; the next tensors get other memory at the same addresses.
            torch.cuda.empty_cache()
        comm.synchronize()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if DIRECT not in said:
        raise SystemExit(f"no call was direct:\n{said[-4000:]}")
    if comm.rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
