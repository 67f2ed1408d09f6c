"""The exception that ends this process, for the other ranks.

A process that fails takes a while to end, and others that lose their peer could end first, so that a launcher blames them. So at the
exit the library passes the exception on: the errors of the other ranks name it, and those on this machine come after this process.

Owns the list of this process's communicators, and how an exception is described. Must not know calls.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  Registers the wait for its threads, before which _before_threads must run.
import contextlib
import os
import sys
import sysconfig
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

from ._library import library

# The handles of this process's communicators. Not a WeakSet, of which no list can be made while another thread adds to it.
_handles: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
# Milliseconds for which the interpreter waits at its exit for calls that are not over, unless an exception ends it.
_PATIENCE = 1000

# Whether this process is a child of multiprocessing that reports its exception.
_reports = False


def watch(handle: Any) -> None:
    """Lets the other ranks of this communicator know the exception that ends this process."""
    _handles[handle] = None
    _report_from_child()


def _report_from_child() -> None:
    """A child of multiprocessing ends without the functions of atexit, or after the exception was dropped. While it is there the
    child runs finalizers of its own."""
    global _reports
    process, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if process and util and not _reports and process.parent_process() is not None:
        util.Finalize(None, report, exitpriority=100)
        _reports = True


def _forget() -> None:
    """The communicators of a forked child's parent are not the child's."""
    global _reports
    _handles.clear()
    _reports = False


os.register_at_fork(after_in_child=_forget)


def report() -> None:
    """Passes on the exception that ends this process, if one does. Has no effect on communicators that have failed."""
    cause = _cause()
    if cause is None:
        return
    for reference in _handles.keyrefs():
        handle = reference()
        if handle is not None:
            library.flexring_comm_abort_on_exit(handle.pointer, cause.encode(errors="replace"))


def _cause() -> str | None:
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        # An interactive interpreter keeps the exception of any earlier line.
        error = getattr(sys, "last_value", None)
    return None if error is None else cause(error)


def cause(error: BaseException) -> str | None:
    """Why this exception ends a rank: a verb phrase, or None if it is no failure."""
    if isinstance(error, SystemExit):
        if not error.code:
            return None
        if error.__context__ is None:
            return f"exited with {error.code!r}"
        error = error.__context__
    return _described(error)


def _described(error: BaseException) -> str:
    """What a rank did that raised this exception: a verb phrase on one line, with the place in the program."""
    # Notes come after the message; before that of a SyntaxError comes the place, indented.
    texts = (text for text in traceback.format_exception_only(type(error), error) if not text.startswith(" "))
    summary = f"raised {' '.join(next(texts, '').split())}"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (os.path.dirname(__file__), sysconfig.get_path("stdlib") + os.sep, "<frozen ")
    packages = "site-packages", "dist-packages"
    # That of the program, which called a library that failed.
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(libraries) and not any(name in frame.filename for name in packages)
    ]
    for frame in (own or frames)[-1:]:
        summary += f" ({Path(frame.filename).name}:{frame.lineno})"
    return summary


def _at_exit() -> None:
    """Passes on the exception, and ends calls that are not over: the end of their communicator would wait for them."""
    failed = True
    with contextlib.suppress(Exception):
        failed = _cause() is not None
        report()
    library.flexring_abort_unfinished(0 if failed else _PATIENCE)


def _before_threads() -> None:
    """The interpreter joins threads before the functions of atexit run, and a thread in a call would wait for the other ranks."""
    with contextlib.suppress(Exception):
        if _cause() is not None:
            _at_exit()


# At exit functions run in the reverse order of their registration. The first finalizer of a process registers the function that
# runs all finalizers, among them those that free communicators, so one has to be there before.
weakref.finalize(_handles, int)
atexit.register(_at_exit)
# As concurrent.futures does. At the interpreter's exit no function can be registered.
_register: Any = getattr(threading, "_register_atexit", None)
if _register is not None:
    with contextlib.suppress(RuntimeError):
        _register(_before_threads)
