"""Whether a kernel can use pages of memory that another process also maps and pins, as ranks of a node share their pools.

    shared_pages.py kernel|wait_value

Two processes map a file in /dev/shm and register its pages. A kernel of this one waits for a word that the other one writes
with its CPU. Also registers a read-only mapping of the pages, if the GPU's attribute says that this works. Prints a line of JSON.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import libcuda  # noqa: E402
from cells import control  # noqa: E402

BYTES = 4 << 20
READ_ONLY, READ_ONLY_SUPPORTED = 8, 113


def address_of(mapping):
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def register(driver, address, flags=libcuda.HOST_PORTABLE_MAPPED):
    """Pins pages. Returns their address on the GPU, and the code."""
    code = driver.code("cuMemHostRegister_v2", c_void_p(address), c_size_t(BYTES), c_uint(flags))
    device = c_uint64()
    if code == 0:
        driver.call("cuMemHostGetDevicePointer_v2", byref(device), c_void_p(address), c_uint(0))
    return device.value, code


def neighbour(path):
    """The other process: says that it has registered the pages, and writes the word when a line comes."""
    driver = libcuda.Driver()
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), BYTES)
    address = address_of(mapping)
    print(register(driver, address)[1], flush=True)
    sys.stdin.readline()
    ctypes.c_uint64.from_address(address + control.GO).value = 1
    sys.stdin.read()
    os._exit(0)


def read_only(driver, file):
    """The code of registering a read-only mapping, or why that was not tried."""
    if not driver.attribute(READ_ONLY_SUPPORTED):
        return "the GPU's attribute says that it cannot"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = c_void_p
    address = libc.mmap(None, c_size_t(BYTES), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
    return register(driver, address, libcuda.HOST_PORTABLE_MAPPED | READ_ONLY)[1]


def measure(driver, gate, file):
    file.truncate(BYTES)
    mapping = mmap.mmap(file.fileno(), BYTES)
    address = address_of(mapping)
    other = subprocess.Popen(
        [sys.executable, __file__, "neighbour", file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    result = {"neighbour_code": int(other.stdout.readline() or -1)}
    device, result["code"] = register(driver, address)
    if result["code"] == 0:
        result["same_address"] = device == address
        words, stream = control.Control(driver, address, device), driver.stream()
        words.spin(stream, driver.function(driver.module(), "spin") if gate == "kernel" else None)
        result["started_ms"] = words.wait(control.STARTED, 1, 2.0)
        other.stdin.write("\n")
        other.stdin.flush()
        result["kernel_saw_neighbours_word_ms"] = words.wait(control.SAW, 1, 1.0)
        words.set(control.GO, 1)
        result["synchronize_code"] = driver.code("cuStreamSynchronize", stream)
    result["read_only"] = read_only(driver, file)
    other.kill()
    return result


def main():
    if sys.argv[1] == "neighbour":
        return neighbour(sys.argv[2])
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        result = measure(libcuda.Driver(), sys.argv[1], file)
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
