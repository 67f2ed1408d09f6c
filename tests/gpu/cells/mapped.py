"""What access to mapped host memory costs a kernel, without and with copies on the bus: mapped.py round_trip|fetch|bandwidth.

Prints a line of JSON. The host polls in Python, which adds about 0.2 us to a round trip; `poll_us` is the measured time of one
poll.
"""

import ctypes
import json
import os
import statistics
import sys
import time
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import libcuda  # noqa: E402
from cells import control  # noqa: E402

MIB = 1 << 20
ROUNDS = 20_000
FETCHES = 20_000
# Bytes of a copy whose bandwidth is measured.
BYTES = 64 * MIB
THREADS = 512
MULTIPROCESSOR_COUNT = 16


class Traffic:
    """Copies that keep the bus busy in both directions."""

    def __init__(self, driver):
        self.driver = driver
        self.streams = driver.stream(), driver.stream()
        self.host = [driver.pinned(BYTES)[0] for _ in range(2)]
        self.device = [driver.allocate(BYTES) for _ in range(2)]

    def start(self, copies):
        for _ in range(copies):
            for number, name in enumerate(("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")):
                pair = c_uint64(self.device[number]), c_void_p(self.host[number])
                pair = pair if number == 0 else pair[::-1]
                self.driver.call(name, *pair, c_size_t(BYTES), self.streams[number])

    def wait(self):
        for stream in self.streams:
            self.driver.synchronize(stream)


def percentiles(values):
    values = sorted(values)
    return {
        "median_us": round(1e-3 * values[len(values) // 2], 3),
        "p99_us": round(1e-3 * values[len(values) * 99 // 100], 3),
        "worst_us": round(1e-3 * values[-1], 3),
    }


def echoes(driver, words, function, stream):
    """Nanoseconds of each round trip: the host writes a word, the kernel answers with another one."""
    ctypes.memset(words.host, 0, 4096)
    driver.launch(function, stream, words.device, control.LIMIT, ROUNDS)
    if words.wait(control.STARTED, 1, 2.0) is None:
        raise RuntimeError("the kernel did not start in 2 s")
    go, answer = words.word(control.GO), words.word(control.ROUNDS)
    clock, times = time.perf_counter_ns, []
    deadline = clock() + control.LIMIT // 2
    for number in range(1, ROUNDS + 1):
        begun = clock()
        go.value = number
        while answer.value < number:
            pass
        ended = clock()
        times.append(ended - begun)
        if ended > deadline:
            break
    go.value = ROUNDS
    driver.synchronize(stream)
    return times


def round_trip(driver):
    words, stream, module = control.Control(driver), driver.stream(), driver.module()
    echo, spin = driver.function(module, "echo"), driver.function(module, "spin")
    echoes(driver, words, echo, stream)
    result = {"idle": percentiles(echoes(driver, words, echo, stream))}
    traffic = Traffic(driver)
    traffic.start(40)
    result["with_copies"] = percentiles(echoes(driver, words, echo, stream))
    traffic.wait()

    word = words.word(control.GO)
    begun = time.perf_counter_ns()
    for _ in range(10_000):
        word.value  # noqa: B018
    result["poll_us"] = round((time.perf_counter_ns() - begun) / 1e7, 3)

    launched, started = [], []
    for number in range(201):
        ctypes.memset(words.host, 0, 4096)
        flag = words.word(control.STARTED)
        begun = time.perf_counter_ns()
        driver.launch(spin, stream, words.device, control.LIMIT)
        launched.append(time.perf_counter_ns() - begun)
        while not flag.value:
            if time.perf_counter_ns() - begun > 2e9:
                raise RuntimeError("the kernel did not start in 2 s")
        started.append(time.perf_counter_ns() - begun)
        word.value = 1
        driver.synchronize(stream)
    result["launch_call"] = percentiles(launched[1:])
    result["launch_to_started"] = percentiles(started[1:])
    return result


def fetch(driver):
    """Nanoseconds of a load of a line of host memory by one warp, with 1 to 16 threads of 8 bytes, and from GPU memory."""
    words, stream = control.Control(driver), driver.stream()
    function = driver.function(driver.module(), "fetch")
    line = control.Control(driver)
    own = driver.allocate(4096)
    driver.call("cuMemsetD8_v2", c_uint64(own), libcuda.c_int(0), c_size_t(4096))

    def measured(at, threads):
        times = []
        for _ in range(4):
            driver.launch(function, stream, words.device, at, FETCHES, block=threads)
            driver.synchronize(stream)
            times.append(words.get(control.ROUNDS) / FETCHES)
        return round(min(times[1:]), 1)

    result = {"gpu_memory_ns": measured(own, 16)}
    threads = (1, 5, 16)
    result["host_memory_ns"] = {f"{8 * count} B": measured(line.device, count) for count in threads}
    traffic = Traffic(driver)
    traffic.start(100)
    result["host_memory_with_copies_ns"] = {f"{8 * count} B": measured(line.device, count) for count in threads}
    traffic.wait()
    return result


def bandwidth(driver):
    stream, begin, end = driver.stream(), driver.event(), driver.event()
    function = driver.function(driver.module(), "copy_tiles")
    hosts = [driver.pinned(BYTES) for _ in range(2)]
    gpu = [driver.allocate(BYTES) for _ in range(2)]
    directions = {
        "out": (hosts[0][1], gpu[0]),
        "in": (gpu[1], hosts[1][1]),
        "within": (gpu[1], gpu[0]),
    }

    def rate(act):
        """GB/s of the median of three."""
        times = []
        for _ in range(4):
            driver.call("cuEventRecord", begin, stream)
            act()
            driver.call("cuEventRecord", end, stream)
            driver.synchronize(stream)
            times.append(driver.milliseconds(begin, end))
        return round(BYTES / statistics.median(times[1:]) / 1e6, 2)

    size = c_size_t(BYTES)
    copies = {
        "out": ("cuMemcpyDtoHAsync_v2", c_void_p(hosts[0][0]), c_uint64(gpu[0])),
        "in": ("cuMemcpyHtoDAsync_v2", c_uint64(gpu[1]), c_void_p(hosts[1][0])),
        "within": ("cuMemcpyDtoDAsync_v2", c_uint64(gpu[1]), c_uint64(gpu[0])),
    }
    result = {"bytes": BYTES, "copy_gb_s": {}, "rows": []}
    for name, call in copies.items():
        result["copy_gb_s"][name] = rate(lambda call=call: driver.call(*call, size, stream))
    full = driver.attribute(MULTIPROCESSOR_COUNT)
    for ctas in sorted({1, 2, 4, 8, 16, 32, full}):
        for tile in (16 << 10, 32 << 10, 64 << 10, 256 << 10):
            row = {"ctas": ctas, "tile": tile}
            for name, pair in directions.items():
                row[f"{name}_gb_s"] = rate(
                    lambda pair=pair: driver.launch(function, stream, *pair, BYTES, tile, grid=ctas, block=THREADS)
                )
            result["rows"].append(row)
    # A copy that leaves another byte behind would make all figures worthless.
    driver.call("cuMemsetD8_v2", c_uint64(gpu[0]), libcuda.c_int(0x3C), size)
    driver.launch(function, stream, *directions["out"], BYTES, 32 << 10, grid=16, block=THREADS)
    driver.synchronize(stream)
    data = ctypes.string_at(hosts[0][0], BYTES)
    result["right"] = data.count(0x3C) == BYTES
    return result


def main():
    driver = libcuda.Driver()
    what = {"round_trip": round_trip, "fetch": fetch, "bandwidth": bandwidth}[sys.argv[1]]
    print(json.dumps(what(driver)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    assert ctypes.sizeof(c_void_p) == 8 and ctypes.sizeof(c_uint) == 4
    main()
