"""A world whose ranks are threads. That works because every call releases the interpreter's lock."""

import os
import threading
import unittest

# Use loopback only, and fail instead of hanging.
os.environ.setdefault("FLEXRING_SOCKET_IFNAME", "lo")
os.environ.setdefault("FLEXRING_TIMEOUT_MS", "30000")
os.environ.setdefault("FLEXRING_CONNECT_TIMEOUT_MS", "30000")

import flexring  # noqa: E402


class WorldTest(unittest.TestCase):
    def world(self, size, body, *, close=True):
        """Runs ``body(comm)`` on every rank and returns the results, by rank."""
        made = flexring.unique_id()
        results, errors = [None] * size, []

        def rank(number):
            try:
                comm = flexring.Communicator.from_unique_id(made, number, size)
                try:
                    results[number] = body(comm)
                finally:
                    if close:
                        comm.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
