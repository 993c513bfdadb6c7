"""Rules of operations, one module per family. Importing this package fills the registry."""

from kernel_agent.ir.operations import (
    access,
    assembly,
    atomics,
    bits,
    control,
    descriptors,
    flags,
    floats,
    integers,
    libdevice,
    pointers,
    reduction,
    safe,
    scaled,
    shape,
)

__all__ = [
    "access",
    "assembly",
    "atomics",
    "bits",
    "control",
    "descriptors",
    "flags",
    "floats",
    "integers",
    "libdevice",
    "pointers",
    "reduction",
    "safe",
    "scaled",
    "shape",
]
