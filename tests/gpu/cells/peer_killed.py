"""Kills the process that shares GPU memory while a kernel of this process reads it. Prints a line of JSON."""

import ctypes
import json
import os
import sys
import time
from ctypes import byref, c_uint, c_uint64
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import libcuda  # noqa: E402
from cells import blocking, control, exporter  # noqa: E402

WORDS = exporter.MIB // 8
EXPECTED = int.from_bytes(bytes([exporter.FILL]) * 8, "little")


def main():
    driver = libcuda.Driver()
    words = control.Control(driver)
    module, own = driver.module(), driver.stream()
    read, nothing = driver.function(module, "read"), driver.function(module, "nothing")
    peer = blocking.Exporter()
    at = c_uint64()
    driver.call("cuIpcOpenMemHandle_v2", byref(at), peer.handle, c_uint(1))
    # The first launches load the kernels.
    words.set(control.GO, 1)
    driver.launch(read, own, words.device, control.LIMIT, at.value, WORDS, EXPECTED)
    driver.launch(nothing, own)
    driver.synchronize(own)
    ctypes.memset(words.host, 0, 4096)

    driver.launch(read, own, words.device, control.LIMIT, at.value, WORDS, EXPECTED)
    result = {"started_ms": words.wait(control.STARTED, 1, 2.0)}
    time.sleep(0.1)
    result["reads_before"] = words.get(control.ROUNDS)
    peer.end()
    time.sleep(0.3)
    result["reads_after"] = words.get(control.ROUNDS)
    time.sleep(0.2)
    result["reads_later"] = words.get(control.ROUNDS)
    result["still_reading"] = result["reads_later"] > result["reads_after"]
    words.set(control.GO, 1)
    result["kernel_saw_word_ms"] = words.wait(control.SAW, 1, 1.0)
    result["wrong_values"] = words.get(control.WRONG)
    # 0 as long as the context is usable.
    result["synchronize_code"] = driver.code("cuCtxSynchronize")
    try:
        driver.launch(nothing, own)
        driver.synchronize(own)
        driver.free(driver.allocate(exporter.MIB))
        result["context"] = "usable"
    except libcuda.CudaError as error:
        result["context"] = str(error)
    result["close_code"] = driver.code("cuIpcCloseMemHandle", at)
    again = c_uint64()
    result["open_after_death_code"] = driver.code("cuIpcOpenMemHandle_v2", byref(again), peer.handle, c_uint(1))
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
