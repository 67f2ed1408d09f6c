"""Prints what the driver says about itself and the first GPU, as a line of JSON."""

import json
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import libcuda  # noqa: E402

# Numbers of CUdevice_attribute.
ATTRIBUTES = {
    "multiprocessors": 16,
    "kernel_time_limit": 17,
    "integrated": 18,
    "can_map_host_memory": 19,
    "compute_mode": 20,
    "concurrent_kernels": 31,
    "tcc": 35,
    "l2_bytes": 38,
    "copy_engines": 40,
    "unified_addressing": 41,
    "major": 75,
    "minor": 76,
    "priorities": 78,
    "host_native_atomics": 86,
    "pageable_memory_access": 88,
    "preemption": 90,
    "host_pointer_for_registered_memory": 91,
    "host_register": 99,
    "read_only_host_register": 113,
    "gpu_direct_rdma": 116,
    "dma_buf": 124,
    "ipc_events": 125,
    "mem_sync_domains": 126,
}


def kernel_driver():
    """The version of NVIDIA's kernel module."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.\d+\S*)", path.read_text()) if path.exists() else None
    return found[1] if found else "unknown"


def main():
    begun = time.perf_counter()
    driver = libcuda.Driver()
    result = {"context_s": round(time.perf_counter() - begun, 3), "name": driver.name()}
    for name, number in ATTRIBUTES.items():
        try:
            result[name] = driver.attribute(number)
        except libcuda.CudaError as error:
            result[name] = f"code {error.code}"
    result["capability"] = f"{result['major']}.{result['minor']}"
    version = driver.version()
    result["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
    result["driver"] = kernel_driver()
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
