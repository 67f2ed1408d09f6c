"""Times copies between a GPU and pinned host memory, and prints a line of JSON: copies.py BYTES [REPEATS]."""

import ctypes
import json
import sys
import time
from ctypes import c_size_t, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libcuda import Driver  # noqa: E402


def main():
    size, repeats = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 9
    driver = Driver()
    streams = driver.stream(), driver.stream()
    on_gpu = driver.allocate(size), driver.allocate(size)
    pinned = [c_void_p(driver.pinned(size)[0]) for _ in range(2)]

    def out():
        driver.call("cuMemcpyDtoHAsync_v2", pinned[0], c_uint64(on_gpu[0]), c_size_t(size), streams[0])

    def into():
        driver.call("cuMemcpyHtoDAsync_v2", c_uint64(on_gpu[1]), pinned[1], c_size_t(size), streams[1])

    def timed(*acts):
        seconds = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            for act in acts:
                act()
            for stream in streams:
                driver.call("cuStreamSynchronize", stream)
            seconds.append(time.perf_counter() - begun)
        return round(1e6 * sorted(seconds[1:])[repeats // 2], 1)

    result = {"bytes": size, "out_us": timed(out), "in_us": timed(into), "both_us": timed(out, into)}
    print(json.dumps(result))


if __name__ == "__main__":
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    main()
