"""Handles of calls, and the order in which the calls of a process group run.

Must not know communicators: a call is a function.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import datetime
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import _exit
from ._library import FlexringError

if TYPE_CHECKING:
    # The end of a call that runs in another thread.
    Future = concurrent.futures.Future[Any]
    # Ends the calls of a communicator on all ranks.
    Abort = Callable[[], object]

# Threads that wait for the next call. Others end.
_MOST_IDLE = 4

# Seconds for which the interpreter waits at its exit for calls that it has aborted.
_EXIT_LIMIT = 2


class _Threads:
    """Threads that run functions, as many at a time as there are functions, so that any number of them may wait. They are
    daemons: the interpreter does not wait for them at its exit, but aborts their calls first (``_abort_calls``)."""

    def __init__(self) -> None:
        self._idle: collections.deque[queue.SimpleQueue[Callable[[], object]]] = collections.deque()

    def run(self, function: Callable[[], object]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._run_each, args=(inbox,), name="flexring-call", daemon=True).start()
        inbox.put(function)

    def _run_each(self, inbox: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            inbox.get()()
            if len(self._idle) >= _MOST_IDLE:
                return
            self._idle.append(inbox)

    def forget(self) -> None:
        """In a forked child there are no threads."""
        self._idle.clear()


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


def _end_by(abort: Abort) -> None:
    with contextlib.suppress(FlexringError):
        abort()


def _wait_for(future: Future, timeout: datetime.timedelta | None, abort: Abort | None) -> Any:
    """Waits for a call of another thread, for at most ``timeout``, and returns its result or raises its error. An exception of a
    signal handler, such as Ctrl-C, aborts it. A handler may raise any exception, also a TimeoutError."""
    seconds = timeout.total_seconds() if timeout else 0
    try:
        if not future.done():
            concurrent.futures.wait([future], seconds or None)
    except BaseException:
        if abort is not None and not future.done():
            _end_by(abort)
        raise
    if not future.done():
        raise RuntimeError(f"the call did not end within {seconds} s; it is still running")
    return future.result()


class CallLine:
    """Runs calls one at a time in the order in which they were made: blocking ones in the caller's thread, each other one in a
    thread of its own. That thread runs the callbacks of its call after the next call may run, so that a callback may wait for
    other calls.

    An asynchronous call never begins in the caller's thread, however small it is: it would wait there for the other ranks, which
    may begin a call in another group first, whose calls this rank makes afterwards."""

    def __init__(self) -> None:
        # A signal handler may run in the thread that runs a call, and make another one.
        self._turn = threading.RLock()
        # How to abort the blocking call that runs, and its thread.
        self._running: Abort | None = None
        self._thread: int | None = None
        # The other calls that are not over, with their arguments and how to abort them. The first one may run.
        self._calls: collections.deque[tuple[Abort, Callable[..., Any], tuple[Any, ...], Future]] = collections.deque()
        _lines[self] = None

    def run(self, abort: Abort, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a call after all earlier ones and returns its result. ``abort`` ends the calls of this line on all ranks."""
        waits = True
        try:
            with self._turn:
                waits = False
                self._refuse_handler()
                # A call that was submitted is in this queue until it is over, under the same lock.
                if not self._calls:
                    self._running, self._thread = abort, threading.get_ident()
                    try:
                        return function(*arguments)
                    finally:
                        self._running = self._thread = None
        except BaseException:
            # A signal handler raised it while a call of another thread ran.
            if waits:
                _end_by(abort)
            raise
        return _wait_for(self.submit(abort, function, *arguments), None, abort)

    def _refuse_handler(self) -> None:
        """Raises an error in a signal handler that has interrupted a blocking call of this line."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                "a signal handler cannot make a call in the process group whose call it interrupted: fix: set a flag in the "
                "handler, and make the call after the other one"
            )

    def submit(self, abort: Abort, function: Callable[..., Any], *arguments: Any) -> Future:
        """Adds a call. Returns a future of ``concurrent.futures``. ``abort`` is as for :meth:`run`."""
        # The call would wait for the one that the handler keeps from going on.
        self._refuse_handler()
        future: Future = concurrent.futures.Future()
        self._calls.append((abort, function, arguments, future))
        _threads.run(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._turn:
            _, function, arguments, future = self._calls[0]
            try:
                result, error = function(*arguments), None
            except BaseException as raised:
                result, error = None, raised
            self._calls.popleft()
        # Runs the callbacks.
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def drain(self, seconds: float) -> bool:
        """Waits until the calls that were submitted are over, for at most this time. Returns whether they are. Does not wait in a
        signal handler that has interrupted a blocking call, behind which they wait."""
        try:
            last = self._calls[-1][-1]
        except IndexError:
            return True
        if self._thread == threading.get_ident():
            return True
        return not concurrent.futures.wait([last], max(seconds, 0)).not_done

    def abort(self) -> bool:
        """Aborts the call that runs, and with it those that wait. Returns whether there is one."""
        abort = self._running
        if abort is None:
            try:
                abort = self._calls[0][0]
            except IndexError:
                return False
        _end_by(abort)
        return True

    def is_idle(self) -> bool:
        return self._running is None and not self._calls


# Not a WeakSet, of which no list can be made while another thread adds to it.
_lines: weakref.WeakKeyDictionary[CallLine, None] = weakref.WeakKeyDictionary()
# The calls of a forked child's parent are not the child's.
os.register_at_fork(after_in_child=_lines.clear)


def _abort_calls() -> None:
    """Aborts all calls that are not over. Threads that run them use communicators, which are freed next."""
    _exit.report()
    lines = [reference() for reference in _lines.keyrefs()]
    aborted = [line for line in lines if line is not None and line.abort()]
    limit = time.monotonic() + _EXIT_LIMIT
    while not all(line.is_idle() for line in aborted) and time.monotonic() < limit:
        time.sleep(0.001)


# At exit functions run in the reverse order of their registration. The first finalizer of a process registers the function that
# runs all finalizers, among them those that free communicators, so one has to be there before.
weakref.finalize(_threads, int)
atexit.register(_abort_calls)


class Work(dist.Work):
    """A call on host memory: over, or running as a future of ``concurrent.futures``. ``abort`` ends it on all ranks."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], future: Future | None = None, abort: Abort | None = None
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._future = future
        self._abort = abort

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the call is over, for at most ``timeout`` (a timedelta; without one, for the group's timeout). Raises
        the error of the call."""
        if self._future is not None:
            _wait_for(self._future, timeout, self._abort)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._future is None or self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the call, if it is over and failed."""
        return self._future.exception() if self._future is not None and self._future.done() else None

    def result(self) -> Sequence[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """A future of torch whose value is the list of tensors with the result."""
        promise = torch.futures.Future()
        if self._future is None:
            promise.set_result(self._tensors)
            return promise

        # Not this object, which refers to the future, which refers to its callbacks.
        tensors = self._tensors

        def complete(future: Future) -> None:
            error = future.exception()
            if error is None:
                promise.set_result(tensors)
            else:
                promise.set_exception(error)

        self._future.add_done_callback(complete)
        # C++ reads the value of a future, but not an exception that Python has set. A future made by then() raises it.
        return promise.then(lambda promise: promise.value())


class WorkOnGpu(dist.Work):
    """A call on GPU memory, which takes effect in a stream; ``event`` is recorded after it. ``future`` and ``abort`` are there if
    the call is made in another thread."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        stream: Any,
        event: Any,
        future: Future | None = None,
        abort: Abort | None = None,
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._stream = stream
        self._event = event
        self._future = future
        self._abort = abort

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Lets the current stream wait for the call. Waits itself only until the call is made."""
        if self._future is not None:
            _wait_for(self._future, timeout, self._abort)
        self._event.wait(torch.cuda.current_stream(self._stream.device))
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return (self._future is None or self._future.done()) and self._event.query()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._future.exception() if self._future is not None and self._future.done() else None

    def result(self) -> Sequence[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """A future of torch whose readers' streams wait for the call."""
        if self._future is not None:
            _wait_for(self._future, None, self._abort)
        future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future


class CoalescedWork(dist.Work):
    """The handle of a group of calls."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self._works])

    synchronize = wait

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def result(self) -> Sequence[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for future in done.value() for tensor in future.value()])
