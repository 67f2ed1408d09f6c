"""The pinned words between a cell and a kernel of probe.ptx."""

import ctypes
import time
from ctypes import c_uint, c_uint64

GO, STARTED, SAW, ENDED, ROUNDS, WRONG = 0, 128, 136, 144, 152, 160

# Nanoseconds after which a kernel that waits gives up.
LIMIT = 4_000_000_000


class Control:
    """A block of pinned memory of zeros, this one or a new one. `device` is its address for kernels."""

    def __init__(self, driver, host=None, device=None):
        self.driver = driver
        self.host, self.device = driver.pinned(4096) if host is None else (host, device)
        self.words = {}

    def spin(self, stream, function):
        """Starts a kernel that waits for the word go; without `function` a wait in the stream, which stands in for it."""
        if function:
            self.driver.launch(function, stream, self.device, LIMIT)
            return
        write, wait = "cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2"
        for name, word in ((write, STARTED), (wait, GO), (write, SAW), (write, ENDED)):
            self.driver.call(name, stream, c_uint64(self.device + word), c_uint64(1), c_uint(0))

    def word(self, offset):
        if offset not in self.words:
            self.words[offset] = ctypes.c_uint64.from_address(self.host + offset)
        return self.words[offset]

    def get(self, offset):
        return self.word(offset).value

    def set(self, offset, value):
        self.word(offset).value = value

    def wait(self, offset, value, seconds):
        """Waits until a word is at least `value`. Returns the milliseconds that it took, or None after `seconds`."""
        begun = time.perf_counter()
        word = self.word(offset)
        while word.value < value:
            if time.perf_counter() - begun > seconds:
                return None
            time.sleep(0)
        return round(1e3 * (time.perf_counter() - begun), 3)
