"""Finds, verifies and adopts kernels for the products of Newton-Schulz on one device.

At start-up, per device kind: one rank calls :func:`prepare`, which tunes what the store lacks
within a budget; its result and :func:`pack`'s bytes go to the others, which :func:`unpack` them
once per node; every rank then calls :func:`adopt`, which verifies each kernel on its own device;
with the faults of all ranks each calls :func:`settle`. Nothing is compiled after that.
"""

from dmuon_megatron.tuning.adopt import Adopted, TileLangBackend, adopt, settle
from dmuon_megatron.tuning.binaries import pack, unpack
from dmuon_megatron.tuning.problems import Problem, ns_problems
from dmuon_megatron.tuning.tuner import Prepared, Tuner, prepare

__all__ = [
    "Adopted",
    "Prepared",
    "Problem",
    "TileLangBackend",
    "Tuner",
    "adopt",
    "ns_problems",
    "pack",
    "prepare",
    "settle",
    "unpack",
]
