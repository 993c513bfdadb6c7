"""The truth for one forward: exact gradients out of its own kernels."""

from kernel_agent.oracle.analyse import analyse, analyse_spec
from kernel_agent.oracle.cache import user_cache_folder
from kernel_agent.oracle.checks import CrossCheck, DerivativeCheck, Outcome, ReferenceCheck
from kernel_agent.oracle.cotangents import CotangentKind, Cotangents, make_cotangents
from kernel_agent.oracle.cross_check import cross_check
from kernel_agent.oracle.describe import describe
from kernel_agent.oracle.fit import Fit
from kernel_agent.oracle.provenance import Provenance, Source, Versions
from kernel_agent.oracle.records import (
    ForwardTruth,
    GradientTruth,
    OutputForm,
    Point,
    Refusal,
    RefusalKind,
    TruthError,
)
from kernel_agent.oracle.rounding_error import (
    RoundingError,
    rounding_at,
    rounding_error,
    rounding_of_gradients,
    rounding_of_outputs,
)
from kernel_agent.oracle.sampled import FullSize, at_full_size
from kernel_agent.oracle.truth import Truths
from kernel_agent.pairs.forward_facts import ForwardFacts

__all__ = [
    "CotangentKind",
    "Cotangents",
    "CrossCheck",
    "DerivativeCheck",
    "Fit",
    "ForwardFacts",
    "ForwardTruth",
    "FullSize",
    "GradientTruth",
    "Outcome",
    "OutputForm",
    "Point",
    "Provenance",
    "ReferenceCheck",
    "Refusal",
    "RefusalKind",
    "RoundingError",
    "Source",
    "TruthError",
    "Truths",
    "Versions",
    "analyse",
    "analyse_spec",
    "at_full_size",
    "cross_check",
    "describe",
    "make_cotangents",
    "rounding_at",
    "rounding_error",
    "rounding_of_gradients",
    "rounding_of_outputs",
    "user_cache_folder",
]
