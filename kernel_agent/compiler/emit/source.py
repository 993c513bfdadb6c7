"""`triton_source`: a kernel as Triton source that a person would sign."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_agent.compiler.emit.device_functions import Helper
from kernel_agent.compiler.emit.implicit import implicit
from kernel_agent.compiler.emit.layout import bracketed
from kernel_agent.compiler.emit.printer import printed
from kernel_agent.compiler.ssa.code import MEMORY, Code
from kernel_agent.compiler.ssa.value import Kernel, Value

LIBDEVICE = "from triton.language.extra import libdevice"


@dataclass(frozen=True)
class KernelSource:
    """One kernel as text."""

    name: str
    text: str
    """The function with its decorator, as `ruff format` would have it at 120 columns; ends with a line break."""
    parameters: tuple[str, ...]
    """In order, constexprs last."""
    constexprs: tuple[str, ...]
    """Those of the parameters that are constexprs."""
    helpers: tuple[Helper, ...] = ()
    """Functions of the module that it calls, in an order in which they can be defined; equal names have equal text."""
    imports: tuple[str, ...] = ()
    """Import lines beside `import triton` and `import triton.language as tl`."""

    @property
    def module_text(self) -> str:
        """A module with this kernel alone."""
        parts = [helper.text for helper in self.helpers] + [self.text]
        return "\n".join(("import triton", "import triton.language as tl", *self.imports, "", "", "\n\n".join(parts)))


def documented(source: KernelSource, docstring: str) -> KernelSource:
    """The source with a docstring, whose lines but for the first are indented."""
    head, colon, body = source.text.partition("):\n")
    return replace(source, text=f'{head}{colon}    """{docstring}"""\n{body}')


def triton_source(
    kernel: Kernel,
    *,
    name: str | None = None,
    comments: Mapping[int, str] | None = None,
    unsigned: Collection[str] = (),
) -> KernelSource:
    """Print a kernel.

    `name`: of the function; the kernel's own by default. `comments`: source line -> comment lines to stand above what
    is computed there, once (see `comments_above`). `unsigned`: arguments that are, or point to, unsigned integers.
    Raises `CannotDerive` for what Triton's language cannot say.
    """
    kernel = replace(implicit(kernel), name=name or kernel.name)
    arguments = _in_order(kernel)
    reserved = [value.name for value in kernel.arguments] + list(kernel.constants) + [kernel.name]
    body = printed(kernel, reserved, unsigned, comments)
    parameters = [value.name for value in arguments if value.is_pointer or value.name in body.reads]
    constexprs = [constant for constant in kernel.constants if constant in body.reads]
    head = bracketed(f"def {kernel.name}", [*parameters, *(f"{c}: tl.constexpr" for c in constexprs)], ":", 0)
    lines = ["@triton.jit", *head]
    lines += _narrowed([value.name for value in arguments if value.element == "f32" and value.name in parameters])
    lines += body.lines or ["    pass"]
    return KernelSource(
        kernel.name,
        "\n".join(lines) + "\n",
        (*parameters, *constexprs),
        tuple(constexprs),
        tuple(body.helpers.values()),
        (LIBDEVICE,) if "libdevice" in body.needs else (),
    )


def _narrowed(numbers: Sequence[str]) -> list[str]:
    """Statements for numbers that Triton takes for float32 and `torch.compile` hands over as float64: what is computed
    of them would be, too, and loops that carry it would not compile."""
    if not numbers:
        return []
    casts = [f"    {name} = tl.cast({name}, tl.float32)" for name in numbers]
    return [f"{casts[0]}  # float64 under torch.compile", *casts[1:]]


def _in_order(kernel: Kernel) -> list[Value]:
    """Arguments as a person would order them: tensors that are read, those that are written, scalars."""
    read: set[Value] = set()
    written: set[Value] = set()
    for op in kernel.ops:
        if op.code in MEMORY or op.code in (Code.LOAD_BLOCK, Code.STORE_BLOCK):
            (read if op.code in (Code.LOAD, Code.LOAD_BLOCK) else written).add(op.base)
    pointers = [value for value in kernel.arguments if value.is_pointer and value in read | written]
    scalars = [value for value in kernel.arguments if not value.is_pointer]
    return [v for v in pointers if v not in written] + [v for v in pointers if v in written] + scalars
