"""Shares a block of GPU memory: prints its IPC handle as hexadecimal digits, and lives until its standard input ends."""

import sys
from ctypes import byref, c_size_t, c_uint64
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import libcuda  # noqa: E402

MIB = 1 << 20
# Each byte of the block.
FILL = 0x5A


def main():
    driver = libcuda.Driver()
    block = driver.allocate(4 * MIB)
    driver.call("cuMemsetD8_v2", c_uint64(block), libcuda.c_int(FILL), c_size_t(4 * MIB))
    driver.call("cuCtxSynchronize")
    handle = libcuda.IpcHandle()
    driver.call("cuIpcGetMemHandle", byref(handle), c_uint64(block))
    print(bytes(handle.bytes).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
