"""Signal handlers while a call waits, so that Ctrl-C acts at once.

Python runs signal handlers between two instructions of the main thread, which is not while a function of the library waits
for other ranks. So the library calls back every 50 milliseconds. If a handler raises an exception then, the library aborts
the communicator, and the exception is raised when the call has returned.

Must not know communicators.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import os
import threading
from collections.abc import Callable, Generator

CheckFunction = ctypes.CFUNCTYPE(ctypes.c_int)

# The exception of a handler, from its callback to the end of the call.
raised: BaseException | None = None
# The thread that has a callback: the main thread, which is the only one that runs handlers.
_thread: int | None = None


# The generators that do not run. Each check takes one: a handler may make a call of its own, whose checks need another one,
# because a generator cannot continue while it runs.
_idle: collections.deque[Generator[int, None, None]] = collections.deque()
# How many handlers may be in calls at a time, each in one that interrupted another. Later ones run after these calls.
_DEPTH = 8


def _run_handlers(number: int) -> Generator[int, None, None]:
    """Runs the handlers that are due whenever it continues. Yields 1 if one of them has raised an exception, else 0.

    A generator, because Python may also run handlers when a function begins, which is outside of its ``try``.
    """
    global raised
    ended = 0
    while True:
        try:
            # An exception may come between these lines, too.
            if _generators[number] not in _idle:
                _idle.appendleft(_generators[number])
            yield ended
            ctypes.pythonapi.PyErr_CheckSignals()
            ended = 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised, ended = error, 1


_generators = [_run_handlers(number) for number in range(_DEPTH)]
for _generator in _generators:
    next(_generator)
# No Python code runs until an idle generator continues.
_continue: Callable[[Generator[int, None, None]], int] = next
_check = CheckFunction(map(_continue, iter(_idle.popleft, None)).__next__)


def install(library: ctypes.CDLL) -> None:
    """Lets handlers run while calls of the main thread wait. Has no effect in other threads."""
    global _thread
    if _thread is None and threading.current_thread() is threading.main_thread():
        library.flexring_set_interrupt_check(_check)
        # The callback does not outlive the module.
        atexit.register(library.flexring_set_interrupt_check, CheckFunction(0))
        _thread = threading.get_ident()


def _forget_thread() -> None:
    global _thread
    _thread = None


# In a forked child another thread may be the main thread.
os.register_at_fork(after_in_child=_forget_thread)


def raise_pending() -> None:
    """Raises the exception of a handler that ended a call of this thread, if there is one."""
    global raised
    if raised is not None and threading.get_ident() == _thread:
        error, raised = raised, None
        raise error
