"""libflexring.so: where it is, what it exports, and how its errors become exceptions.

Must not know how vectors are represented.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from . import _interrupt

UNIQUE_ID_BYTES = 128
NO_COLOR = -1

_NAME = "libflexring.so"
# The name with the major version of the ABI, under which the library is installed.
_SONAME = "libflexring.so.0"


class UniqueId(ctypes.Structure):
    """``flexring_unique_id`` of the C API."""

    _fields_ = [("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES)]


class CRailStatistics(ctypes.Structure):
    """``flexring_rail_statistics`` of the C API."""

    _fields_ = [
        ("device", ctypes.c_char * 64),
        ("port", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("bytes_sent", c_uint64),
        ("bytes_received", c_uint64),
        ("messages_sent", c_uint64),
        ("messages_received", c_uint64),
        ("retransmissions", ctypes.c_int64),
        ("reconnections", c_uint64),
    ]


class FlexringError(RuntimeError):
    """A call failed. ``code`` is one of the numbers below, ``message`` says why."""

    INVALID_ARGUMENT = 1
    INVALID_SETTING = 2
    SYSTEM_ERROR = 3
    RENDEZVOUS_FAILED = 4
    DISAGREEMENT = 5
    PEER_LOST = 6
    TIMEOUT = 7
    ABORTED = 8
    UNSUPPORTED = 9
    INTERNAL_ERROR = 10

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


# The argument types of each function. All of these functions return a flexring_result.
_SIGNATURES: dict[str, list[Any]] = {
    "flexring_get_unique_id": [POINTER(UniqueId)],
    "flexring_comm_init_from_env": [POINTER(c_void_p)],
    "flexring_comm_init_rank": [POINTER(c_void_p), c_int, UniqueId, c_int],
    "flexring_comm_init_rank_timeout": [POINTER(c_void_p), c_int, UniqueId, c_int, c_int],
    "flexring_comm_shrink": [c_void_p, POINTER(c_int), c_size_t, POINTER(c_void_p)],
    "flexring_comm_split": [c_void_p, c_int, c_int, POINTER(c_void_p)],
    "flexring_comm_rank": [c_void_p, POINTER(c_int)],
    "flexring_comm_size": [c_void_p, POINTER(c_int)],
    "flexring_comm_synchronize": [c_void_p],
    "flexring_comm_status": [c_void_p],
    "flexring_comm_abort": [c_void_p],
    "flexring_comm_abort_on_exit": [c_void_p, c_char_p],
    "flexring_comm_free": [c_void_p],
    "flexring_abort_unfinished": [c_int],
    "flexring_comm_rail_statistics": [
        c_void_p, c_size_t, POINTER(CRailStatistics), c_size_t, POINTER(c_size_t)
    ],
    "flexring_alloc": [c_void_p, c_size_t, POINTER(c_void_p)],
    "flexring_free": [c_void_p, c_void_p],
    "flexring_register": [c_void_p, c_void_p, c_size_t],
    "flexring_deregister": [c_void_p, c_void_p, c_size_t],
    "flexring_op_create_premul_sum": [c_float, POINTER(c_uint64)],
    "flexring_all_reduce": [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_void_p, c_void_p],
    "flexring_reduce_scatter": [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_void_p, c_void_p],
    "flexring_all_gather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "flexring_broadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flexring_reduce": [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, c_void_p, c_void_p],
    "flexring_all_reduce_async": [
        c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_void_p, POINTER(c_void_p),
    ],
    "flexring_reduce_scatter_async": [
        c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_void_p, POINTER(c_void_p),
    ],
    "flexring_all_gather_async": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_broadcast_async": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_reduce_async": [
        c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, c_void_p, POINTER(c_void_p),
    ],
    "flexring_gather": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flexring_scatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flexring_all_to_all": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "flexring_all_to_all_v": [
        c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int, c_void_p, c_void_p,
    ],
    "flexring_barrier": [c_void_p],
    "flexring_gather_async": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_scatter_async": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_all_to_all_async": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_all_to_all_v_async": [
        c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int, c_void_p, POINTER(c_void_p),
    ],
    "flexring_barrier_async": [c_void_p, POINTER(c_void_p)],
    "flexring_group_start": [],
    "flexring_group_end": [],
    "flexring_send": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flexring_recv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "flexring_send_async": [c_void_p, c_size_t, c_int, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_recv_async": [c_void_p, c_size_t, c_int, c_int, c_void_p, POINTER(c_void_p)],
    "flexring_wait": [c_void_p],
    "flexring_test": [c_void_p, POINTER(c_int)],
    "flexring_set_interrupt_check": [_interrupt.CheckFunction],
}  # fmt: skip


def _candidates() -> list[str]:
    """Paths at which to look for the library, the preferred one first."""
    chosen = os.environ.get("FLEXRING_LIBRARY")
    if chosen:
        # If the user names a library, no other one is loaded.
        return [chosen]
    package = Path(__file__).resolve().parent
    places = [package / _NAME, package.parents[1] / "target" / "release" / _NAME]
    found = [str(place) for place in places if place.is_file()]
    return found + [name for name in (ctypes.util.find_library("flexring"), _SONAME, _NAME) if name]


def _load() -> tuple[ctypes.CDLL, str]:
    failures = []
    for path in _candidates():
        if os.path.exists(path) and not os.path.isfile(path):
            # The loader would wait for the writer of a pipe.
            failures.append(f"{path}: it is no regular file")
            continue
        try:
            # ctypes releases the interpreter's lock while a function of a CDLL runs.
            return ctypes.CDLL(path), path
        except OSError as error:
            failures.append(f"{path}: {error}")
    raise ImportError(
        f"cannot load {_NAME} ({'; '.join(failures)}): build it with `cargo build --release`, or set "
        "FLEXRING_LIBRARY to its path"
    )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    library.flexring_last_error.argtypes = []
    library.flexring_last_error.restype = c_char_p
    library.flexring_version.argtypes = []
    library.flexring_version.restype = c_int32
    return library


_loaded, _path = _load()
library = _declare(_loaded)
_interrupt.install(library)


def library_path() -> str:
    """The path of the libflexring.so in use."""
    return _path


def version() -> tuple[int, int, int]:
    """The version of the libflexring.so in use, as (major, minor, patch)."""
    number: int = library.flexring_version()
    return (number // 10000, number // 100 % 100, number % 100)


# What the library calls types otherwise than Python.
_TYPES = {
    "half": "float16", "float": "float32", "double": "float64", "float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2",
}  # fmt: skip
_TYPE = re.compile(rf"((?<=\d x )|(?<=type )|(?<=of a ))({'|'.join(_TYPES)})\b")


def _last_error() -> str:
    """The library's message, with the types of Python."""
    message = library.flexring_last_error().decode("utf-8", "replace")
    return _TYPE.sub(lambda found: _TYPES[found[2]], message)


def check(result: int) -> None:
    """Raises the exception of a signal handler that ended a call, or the error of the call, unless it succeeded."""
    if _interrupt.raised is not None:
        _interrupt.raise_pending()
    if result != 0:
        raise FlexringError(result, _last_error())
