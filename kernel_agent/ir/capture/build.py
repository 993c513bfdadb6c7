"""`Build`: what Triton would compile for one captured launch, so that it can be compiled for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.errors import LaunchError, UnsupportedOp
from kernel_agent.ir.lower import Path

_COMPILER = frozenset(["num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"])
"""Keywords of a launch that change the code."""

LAUNCH_OPTIONS = _COMPILER | frozenset(
    [
        "debug",
        "warmup",
        "stream",
        "device",
        "allow_flush_denorm",
        "launch_cooperative_grid",
        "launch_pdl",
        "instrumentation_mode",
        "sanitize_overflow",
        "max_num_imprecise_acc_default",
        "default_dot_input_precision",
        "waves_per_eu",
        "matrix_instr_nonkdim",
        "kpack",
    ]
)
"""Keywords of a launch that are no arguments of the kernel. None of them changes what it computes."""

CODE_FROM_FILES = ("extern_libs", "ir_override")
"""Keywords of a launch that put code of other files into the place of the kernel's."""

ALIGNMENT = 16
"""Bytes or, for integers, the divisor that Triton specialises arguments for."""


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel with the options it is launched with."""

    kernel: Any
    """The `triton.JITFunction`."""
    types: Mapping[str, Any]
    """Triton's type string of every parameter."""
    constants: Mapping[Path, Any]
    aligned: tuple[int, ...]
    """Positions of parameters whose values are multiples of 16, for pointers in bytes."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`num_warps` and what else of the launch the compiler reads; what is absent has Triton's default."""

    @classmethod
    def of(
        cls,
        kernel: Any,
        types: Mapping[str, Any],
        constants: Mapping[Path, Any],
        values: Mapping[str, Any],
        keywords: Mapping[str, Any],
    ) -> Build:
        """The build of a launch with argument `values` by name and all its `keywords`."""
        aligned = tuple(
            place
            for place, parameter in enumerate(kernel.params)
            if types[parameter.name] != "constexpr" and _is_aligned(values[parameter.name], parameter)
        )
        options = {name: value for name, value in keywords.items() if name in _COMPILER and value is not None}
        return cls(kernel, types, constants, aligned, options)

    @property
    def key(self) -> str:
        """Equal for builds that give the same code."""
        constants = sorted((path, getattr(value, "cache_key", repr(value))) for path, value in self.constants.items())
        types, options = sorted(self.types.items()), sorted(self.options.items())
        return f"{self.kernel.cache_key}|{types}|{constants}|{self.aligned}|{options}"


def _is_aligned(value: Any, parameter: Any) -> bool:
    if parameter.do_not_specialize:
        return False
    if isinstance(value, Tensor):  # torch's memory begins at multiples of 256 bytes
        fits = value.storage_offset() * declared_dtype(value).itemsize % ALIGNMENT == 0
        return fits and not getattr(parameter, "do_not_specialize_on_alignment", False)
    return type(value) is int and value % ALIGNMENT == 0


def refuse_keywords(kernel: Any, keywords: Mapping[str, Any]) -> None:
    """Raises `LaunchError` for what Triton does not know, `UnsupportedOp` for what brings other code."""
    name = kernel.fn.__name__
    for key in keywords.keys() - set(kernel.arg_names) - LAUNCH_OPTIONS:
        if key not in CODE_FROM_FILES:
            raise LaunchError(f"kernel {name} has no parameter {key}", kernel=name)
        if keywords[key]:
            raise UnsupportedOp(
                f"kernel {name} is launched with {key}: what runs then is not what its text says",
                remedy="Write in Triton what the other file holds.",
                kernel=name,
            )
