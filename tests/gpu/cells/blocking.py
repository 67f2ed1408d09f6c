"""What other calls of the driver do while a kernel waits for the host, and whether the kernel sees the host's word meanwhile.

    blocking.py ACTION legacy|non_blocking kernel|wait_value

A kernel polls a word in pinned memory, in the legacy default stream or in a non-blocking one. One thread then makes the calls of
ACTION, and another makes calls that never wait for the GPU, as a host thread of a design without a resident kernel would. Then
the word is written. The other streams are non-blocking ones, like PyTorch's: that blocking streams wait for the legacy stream is
documented.

With `wait_value` a wait in the stream stands in for the kernel: the simulated driver has no kernel of ours. Prints a line of
JSON. A blocked thread is a result; the process ends without waiting for it.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import libcuda  # noqa: E402
from cells import control  # noqa: E402

MIB = 1 << 20
# Seconds that an action has while the kernel waits, that the kernel has to see the word, and that an action has after it.
WHILE, SEE, AFTER = 0.5, 1.0, 5.0
LAUNCHES = 5000


class Work(threading.Thread):
    """A thread that makes calls, and the time of each since its start in milliseconds."""

    def __init__(self, driver, act):
        super().__init__(daemon=True)
        self.driver, self.act = driver, act
        self.marks, self.error, self.ended = {}, None, None
        self.begun = time.perf_counter()
        self.start()

    def now(self):
        return round(1e3 * (time.perf_counter() - self.begun), 3)

    def mark(self, name):
        self.marks[name] = self.now()

    def run(self):
        try:
            self.driver.enter()
            self.begun = time.perf_counter()
            self.act(self.mark)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = self.now()

    def wait(self, seconds):
        self.join(seconds)
        return self.ended


class Probe:
    """The driver, its streams, and the kernel that waits."""

    def __init__(self, stream, gate):
        self.driver = driver = libcuda.Driver()
        self.control = control.Control(driver)
        self.gate = gate
        self.own = c_void_p() if stream == "legacy" else driver.stream()
        self.other, self.third, self.capturing = (driver.stream() for _ in range(3))
        self.device = driver.allocate(4 * MIB)
        self.pinned = [driver.pinned(4 * MIB)[0] for _ in range(2)]
        self.pageable = ctypes.create_string_buffer(4 * MIB)
        self.event = driver.event()
        self.spin = None
        if gate == "kernel":
            self.module = driver.module()
            self.spin, self.empty = (driver.function(self.module, name) for name in ("spin", "nothing"))
            # Launch everything once, so that nothing is loaded later, except where that is the action.
            self.control.set(control.GO, 1)
            driver.launch(self.spin, self.own, self.control.device, 0)
            self.nothing(self.own)
            driver.call("cuCtxSynchronize")
            ctypes.memset(self.control.host, 0, 4096)
        else:
            self.nothing(self.own)
            driver.call("cuCtxSynchronize")
        driver.call("cuEventRecord", self.event, self.other)
        driver.synchronize(self.other)

    def nothing(self, stream):
        """The shortest work for a stream."""
        if self.gate == "kernel":
            self.driver.launch(self.empty, stream)
        else:
            self.driver.call("cuMemsetD8Async", c_uint64(self.device), c_int(0), c_size_t(16), stream)

    def start(self):
        """Starts what waits for the host."""
        self.control.spin(self.own, self.spin)

    def copy(self, name, stream, *pair):
        host, device = pair
        order = (host, device) if name.startswith("cuMemcpyDtoH") else (device, host)
        self.driver.call(name, *order, c_size_t(4 * MIB), stream)

    def bystander(self, mark):
        """Calls that never wait for the GPU by themselves."""
        code = self.driver.code("cuEventQuery", self.event)
        mark(f"event query ({code})")
        self.nothing(self.third)
        mark("launch in another stream")
        self.copy("cuMemcpyDtoHAsync_v2", self.third, c_void_p(self.pinned[1]), c_uint64(self.device))
        mark("pinned copy in another stream")

    # The actions. Each is set up before the kernel starts and returns the calls to make while it waits.

    def pageable_copy_same_stream(self):
        """The copy of `tensor.cpu()` right behind a collective call: it must wait for the kernel."""

        def act(mark):
            self.copy("cuMemcpyDtoHAsync_v2", self.own, self.pageable, c_uint64(self.device))
            mark("copy")
            self.driver.synchronize(self.own)

        return act

    def pageable_copy_other_stream(self):
        def act(mark):
            self.copy("cuMemcpyHtoDAsync_v2", self.other, self.pageable, c_uint64(self.device))
            mark("copy to the GPU")
            self.copy("cuMemcpyDtoHAsync_v2", self.other, self.pageable, c_uint64(self.device))
            mark("copy from the GPU")
            self.driver.synchronize(self.other)

        return act

    def pinned_copies(self):
        def act(mark):
            self.copy("cuMemcpyHtoDAsync_v2", self.other, c_void_p(self.pinned[0]), c_uint64(self.device))
            self.copy("cuMemcpyDtoHAsync_v2", self.other, c_void_p(self.pinned[0]), c_uint64(self.device))
            mark("enqueued")
            self.driver.synchronize(self.other)

        return act

    def alloc(self):
        return lambda mark: self.driver.allocate(256 * MIB)

    def free(self):
        block = self.driver.allocate(256 * MIB)
        return lambda mark: self.driver.free(block)

    def host_alloc(self):
        return lambda mark: self.driver.pinned(64 * MIB)

    def host_free(self):
        block = self.driver.pinned(64 * MIB)[0]
        return lambda mark: self.driver.call("cuMemFreeHost", c_void_p(block))

    def host_register(self):
        self.mapping = mmap.mmap(-1, 64 * MIB)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

        def act(mark):
            self.driver.call(
                "cuMemHostRegister_v2", c_void_p(address), c_size_t(64 * MIB), c_uint(libcuda.HOST_PORTABLE_MAPPED)
            )
            mark("register")
            self.driver.call("cuMemHostUnregister", c_void_p(address))

        return act

    def create_stream(self):
        """A new stream, and its first work: yaksa's pull request 228 says that it is blocked."""

        def act(mark):
            stream = self.driver.stream()
            mark("stream")
            self.nothing(stream)
            mark("launch")
            self.driver.synchronize(stream)

        return act

    def lazy_load(self):
        """A second module, and the first launch of its kernel."""

        def act(mark):
            module = self.driver.module()
            mark("module")
            function = self.driver.function(module, "nothing")
            mark("function")
            self.driver.launch(function, self.other)
            mark("launch")
            self.driver.synchronize(self.other)

        return act

    def synchronize_context(self):
        return lambda mark: self.driver.call("cuCtxSynchronize")

    def synchronize_other_stream(self):
        def act(mark):
            self.nothing(self.other)
            mark("launch")
            self.driver.synchronize(self.other)

        return act

    def launches_same_stream(self):
        return lambda mark: self.launches(self.own, mark)

    def launches_other_stream(self):
        return lambda mark: (self.launches(self.other, mark), self.driver.synchronize(self.other))

    def launches(self, stream, mark):
        for number in range(LAUNCHES):
            self.nothing(stream)
            if (number + 1) % 500 == 0:
                mark(f"{number + 1} launches")

    def global_capture(self):
        """An event query by a thread in the default mode, while another thread captures in global mode."""
        return lambda mark: self.capture(mark, None)

    def global_capture_relaxed(self):
        """The same by a thread that has changed its own mode to relaxed."""
        return lambda mark: self.capture(mark, libcuda.CAPTURE_RELAXED)

    def capture(self, mark, mode):
        driver, graph = self.driver, c_void_p()
        driver.call("cuStreamBeginCapture_v2", self.capturing, c_int(libcuda.CAPTURE_GLOBAL))

        def query(mark):
            if mode is not None:
                exchanged = c_int(mode)
                driver.call("cuThreadExchangeStreamCaptureMode", byref(exchanged))
            mark(f"event query ({driver.code('cuEventQuery', self.event)})")

        asking = Work(driver, query)
        if asking.wait(WHILE) is None:
            mark("event query: blocked")
        for name in asking.marks:
            mark(name)
        if asking.error:
            mark(asking.error)
        mark(f"end of the capture ({driver.code('cuStreamEndCapture', self.capturing, byref(graph))})")

    def ipc_open(self):
        exporter = Exporter()
        handle = exporter.handle

        def act(mark):
            at = c_uint64()
            self.driver.call("cuIpcOpenMemHandle_v2", byref(at), handle, c_uint(1))
            mark("open")
            self.driver.call("cuIpcCloseMemHandle", at)
            mark("close")
            exporter.end()

        return act


ACTIONS = [
    "pageable_copy_same_stream",
    "pageable_copy_other_stream",
    "pinned_copies",
    "alloc",
    "free",
    "lazy_load",
    "launches_same_stream",
    "launches_other_stream",
    "synchronize_context",
    "synchronize_other_stream",
    "global_capture",
    "global_capture_relaxed",
    "ipc_open",
    "host_alloc",
    "host_free",
    "host_register",
    "create_stream",
]


class Exporter:
    """A process that shares GPU memory: `exporter.py`."""

    def __init__(self):
        command = [sys.executable, str(HERE / "exporter.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the exporter ended")
        self.handle = libcuda.IpcHandle.from_buffer_copy(bytes.fromhex(line))

    def end(self):
        self.process.kill()
        self.process.wait()


def main():
    action, stream, gate = sys.argv[1:]
    probe = Probe(stream, gate)
    act = getattr(probe, action)()
    probe.start()
    result = {"gate": gate}
    result["started_ms"] = probe.control.wait(control.STARTED, 1, 2.0)
    if result["started_ms"] is None:
        # Some systems hand work to the GPU only at the next call.
        probe.driver.code("cuStreamQuery", probe.own)
        result["started_after_a_query_ms"] = probe.control.wait(control.STARTED, 1, 2.0)
    calls = Work(probe.driver, act)
    result["returned_while_spinning_ms"] = calls.wait(WHILE)
    result["steps_while_spinning_ms"] = dict(calls.marks)
    bystander = Work(probe.driver, probe.bystander)
    result["bystander_ms"] = bystander.wait(WHILE / 2)
    result["bystander_steps_ms"] = dict(bystander.marks)
    result["ended_early"] = bool(probe.control.get(control.ENDED))
    probe.control.set(control.GO, 1)
    result["kernel_saw_word_ms"] = probe.control.wait(control.SAW, 1, SEE)
    if result["kernel_saw_word_ms"] is None:
        probe.control.wait(control.ENDED, 1, control.LIMIT / 1e9 + 1)
    if result["returned_while_spinning_ms"] is None:
        result["returned_ms"] = calls.wait(AFTER)
    bystander.wait(AFTER)
    result["blocked_until_the_end"] = [
        name
        for name, before, work in (
            ("calls", result["returned_while_spinning_ms"], calls),
            ("bystander", result["bystander_ms"], bystander),
        )
        if before is None and work.ended is not None
    ]
    result["never_returned"] = [
        name for name, work in (("calls", calls), ("bystander", bystander)) if work.ended is None
    ]
    result["steps_ms"] = dict(calls.marks)
    errors = [work.error for work in (calls, bystander) if work.error]
    if errors:
        result["errors"] = errors
    print(json.dumps(result), flush=True)
    # Blocked threads and exit handlers of the driver must not hold the process.
    os._exit(0)


if __name__ == "__main__":
    main()
