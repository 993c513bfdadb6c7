"""Shapes, dtypes and sizes in words: names of dims and ranges, never the user's own list of shapes.

A model that sees `M=4096 N=1024` writes code for these numbers; one that sees ranges writes code for any.
"""

from __future__ import annotations

import re

from kernel_agent.pairs.axes import UNKNOWN, Seen, axis_names
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Dim, KernelSpec
from kernel_agent.pairs.sweep import smallest


def tensor_words(facts: ArgumentFacts) -> str:
    """`(M, N), float32 or bfloat16, not contiguous`."""
    dtypes = either(facts.dtypes or (facts.dtype,))
    return f"{shape_words(facts)}, {dtypes}" + ("" if facts.dense else ", not contiguous: use its strides")


def shape_words(facts: ArgumentFacts) -> str:
    """`(M, N)`; a question mark stands for a size that could not be told."""
    axes = facts.axes or (UNKNOWN,) * len(facts.shape)
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def argument_words(facts: ArgumentFacts) -> str:
    """What an argument or output is."""
    if facts.kind is ArgumentKind.TENSOR:
        return tensor_words(facts)
    return "None" if facts.kind is ArgumentKind.NONE else f"a plain value, such as {facts.text}"


def told(spec: KernelSpec) -> KernelSpec:
    """The spec with axes named from its smallest entry alone, where it was described without."""
    dims = {name: value for name, value in smallest(spec.sweep).dims.items() if type(value) is int}

    def named(facts: ArgumentFacts) -> ArgumentFacts:
        if facts.axes or facts.kind is not ArgumentKind.TENSOR:
            return facts
        return facts.model_copy(update={"axes": axis_names([Seen(dims, facts.shape)])})

    return spec.model_copy(
        update={"inputs": tuple(map(named, spec.inputs)), "outputs": tuple(map(named, spec.outputs))}
    )


def dim_lines(spec: KernelSpec) -> tuple[str, ...]:
    """One line for all sizes, and one per flag: `M from 31 to 4096, N from 100 to 8192`."""
    dtyped = any(facts.dtypes for facts in spec.inputs)
    values: dict[str, list[Dim]] = {}
    for entry in spec.sweep:
        for name, value in entry.dims.items():
            values.setdefault(name, []).append(value)
    sizes, flags = [], []
    for name, seen in values.items():
        whole = [value for value in seen if type(value) is int]
        if len(whole) == len(seen):
            low, high = min(whole), max(whole)
            sizes.append(f"`{name}` = {low}" if low == high else f"`{name}` from {low} to {high}")
        elif not (dtyped and all(_is_dtype(value) for value in seen)):  # the arguments tell their dtypes
            absent = len(seen) < len(spec.sweep)
            flags.append(f"`{name}`: {either([_value(v) for v in seen], default=absent)}")
    return (*([", ".join(sizes)] if sizes else []), *flags)


def either(words: tuple[str, ...] | list[str], *, default: bool = False) -> str:
    """`float32, float16 or bfloat16`."""
    unique = [*dict.fromkeys(words), *(["left out"] if default else [])]
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


_DTYPE = re.compile(
    r"(torch\.)?(b?float16|float(32|64|8_\w+)?|u?int(8|16|32|64)|int|long|short|half|double|complex(64|128)|bool)"
)
"""Names of torch's dtypes; torch itself is not loaded for them."""


def _value(value: Dim) -> str:
    return value.removeprefix("torch.") if isinstance(value, str) else repr(value)


def _is_dtype(value: Dim) -> bool:
    return isinstance(value, str) and _DTYPE.fullmatch(value) is not None
