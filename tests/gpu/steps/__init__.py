"""The steps of first contact, in the order in which they run: what matters most comes first.

A step is a module with SECONDS (its part of the half hour), QUESTION (what it answers), `cells` (the list of its cells for a
session) and `words` (the lines of text that report the results of cells, given as pairs of name and result).
"""

from . import all_reduce, ddp, latency, machine, nccl, probe, relays, sanitizer, tests

ORDER = {
    "machine": machine,
    "probe": probe,
    "all_reduce": all_reduce,
    "latency": latency,
    "tests": tests,
    "ddp": ddp,
    "relays": relays,
    "sanitizer": sanitizer,
    "nccl": nccl,
}
