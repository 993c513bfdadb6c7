"""Adjoints of operations, one screen per family. Importing this fills `registry.RULES`."""

from kernel_agent.compiler.reverse.rules import (
    arithmetic,
    choice,
    gathered,
    library,
    products,
    reductions,
    scans,
    shape,
    transcendental,
)
from kernel_agent.compiler.reverse.rules.registry import CONSTANT, RULES, Primal, Rule

__all__ = [
    "CONSTANT",
    "RULES",
    "Primal",
    "Rule",
    "arithmetic",
    "choice",
    "gathered",
    "library",
    "products",
    "reductions",
    "scans",
    "shape",
    "transcendental",
]
