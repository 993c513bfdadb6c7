"""Makes a derived kernel serve every dtype: what was read with tensors in bfloat16 says `X.dtype.element_ty`."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.emit.source import KernelSource
from kernel_agent.compiler.ssa.value import Kernel

_NARROW = {"bf16": "tl.bfloat16", "f16": "tl.float16"}


def follows_tensors(element: str, forward: str) -> bool:
    """Whether values of an element type have it because tensors do: it is narrow, and no kernel of the file names it,
    whose text is `forward`."""
    return element in _NARROW and _NARROW[element].removeprefix("tl.") not in _code(forward)


def for_every_dtype(source: KernelSource, kernel: Kernel, forward: str) -> KernelSource:
    """The source with the dtype of a tensor in place of a narrow dtype's name.

    `forward`: the text of the user's file. Where that names the dtype itself, a conversion may be meant as it stands
    there, and the source is left alone.
    """
    text = source.text
    for element, name in _NARROW.items():
        pointers = [value.name for value in kernel.arguments if value.is_pointer and value.pointee == element]
        if name in text and pointers and follows_tensors(element, forward):
            text = text.replace(name, f"{pointers[0]}.dtype.element_ty")
    return replace(source, text=text)


def _code(forward: str) -> str:
    """Lines of kernels: dtypes that SWEEP and make_args name are those of tensors."""
    return "\n".join(line for line in forward.split("\n") if "tl." in line)
