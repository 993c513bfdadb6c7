"""Reads the BENCH of a pair file: one or two entries of real workloads' sizes, literal, so that nothing is executed."""

from __future__ import annotations

import ast
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import read_sweep
from kernel_agent.pairs.syntax import assigned_values

_REMEDY = 'Write a literal tuple of one or two entries, such as BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},).'


def read_bench(tree: ast.Module, path: Path) -> tuple[ShapeEntry, ...]:
    """The entries of BENCH; none where a file has no BENCH, as delivered pairs and users' files.

    Raises `InputError` with the line when BENCH is not literal or no tuple of dicts of dims.
    """
    values = assigned_values(tree, "BENCH")
    if not values:
        return ()
    node = values[-1]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise InputError("BENCH is not literal", remedy=_REMEDY, path=path, line=node.lineno) from None
    return read_sweep(value, path, node, name="BENCH")
