"""`Buffers`: the memory that the backward of one launch allocates, as statements."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import Buffer, Fill
from kernel_agent.compiler.ssa.value import NARROW
from kernel_agent.compiler.stub.cotangents import Cotangents
from kernel_agent.compiler.stub.dtypes import follows_tensors
from kernel_agent.compiler.stub.flow import disjoint
from kernel_agent.compiler.stub.lines import ROOM, Line, helpers_of
from kernel_agent.compiler.stub.wording import Wording
from kernel_agent.ir.capture.images import declared_dtype

DTYPES = {
    "f64": "torch.float64", "f32": "torch.float32", "f16": "torch.float16", "bf16": "torch.bfloat16",
    "i1": "torch.bool", "i8": "torch.int8", "i16": "torch.int16", "i32": "torch.int32", "i64": "torch.int64",
}  # fmt: skip
"""Elements of buffers as torch names them."""

_FLOATS = {"fp64": "f64", "fp32": "f32", "fp16": "f16"}
"""Elements whose types in a launch are called otherwise."""
_LONG = 64
"""Characters from which a condition gets a name."""


def element_of(kind: str) -> str:
    """What a tensor is made of that a launch has as an argument of a type: `f32` for `*fp32` and
    `tensordesc<fp32[16, 16]>`."""
    element = kind.removeprefix("*").removeprefix("tensordesc<").partition("[")[0]
    return _FLOATS.get(element, element)


def rows_summed(partials: str, *, large: bool) -> str:
    """The sum of rows of partial results; where they may be large, a single one is not copied for it."""
    total = f"{partials}.sum(0)"
    return f"{partials}[0] if len({partials}) == 1 else {total}" if large else total


@dataclass
class Sliced:
    """The gradient of a whole tensor that a launch was given parts of."""

    root: Tensor
    variable: str
    parts: list[Tensor] = field(default_factory=list)


class Buffers:
    """Allocates the buffers of one plan."""

    def __init__(self, wording: Wording, cotangents: Cotangents, wide: Collection[str] = ()) -> None:
        self.wording = wording
        self.cotangents = cotangents
        self.body = wording.body
        self.references = wording.references
        self.flow = wording.references.flow
        self._sliced: dict[int, Sliced] = {}
        self.held: dict[str, str] = {}
        """Elements of buffers that were there before, as `Grad` has them."""
        self.lent: set[str] = set()
        """Buffers that may be cotangents."""
        self.wide = wide
        """Cotangents that are not made of what their tensors are."""

    @property
    def sliced(self) -> list[Sliced]:
        """Gradients of whole tensors, whose parts were allocated."""
        return list(self._sliced.values())

    def allocate(self, buffer: Buffer) -> str:
        """Write the statement that makes a buffer; the expression that the launches are given. Raises
        `CannotDerive`."""
        if buffer.unless and not self._is_lent(buffer):
            self.wording.variables[buffer.unless] = "True"
        if buffer.fill is Fill.HELD:
            return self._held(buffer)
        if not buffer.like:
            return self._shaped(buffer)
        if buffer.like in self.wording.plan.cotangents.values():
            return self._like_cotangent(buffer)
        tensor = self.wording.launched.seen.tensors[buffer.like]
        if self._is_lent(buffer):
            return self._lent(buffer)
        if self.flow.is_slice(tensor):
            return self._slice(tensor, self.wording.launched.text.arguments[buffer.like])
        return self._like(buffer, tensor)

    def as_like(self, buffer: Buffer) -> bool:
        """Whether a buffer has the dtype of the tensor it is like, in every call: what is added to stays float32."""
        types = self.wording.launched.seen.build.types
        if not buffer.like or element_of(types.get(buffer.like, "")) != buffer.element:
            return False
        return buffer.fill is Fill.EMPTY or bool(buffer.empty_if) or buffer.element in NARROW

    def _make(self, buffer: Buffer, end: str) -> str:
        """The function of torch."""
        if buffer.fill is not Fill.ZEROS or self._is_checked(buffer):
            return f"torch.empty{end}"
        if not buffer.empty_if:
            return f"torch.zeros{end}"
        whole = self._whole(buffer)
        return f"torch.empty{end}" if whole == "True" else f"(torch.empty{end} if {whole} else torch.zeros{end})"

    def _is_checked(self, buffer: Buffer) -> bool:
        """Whether the launch is refused where not every element is stored to."""
        return any(fact.expression == buffer.empty_if for fact in self.wording.plan.facts)

    def _whole(self, buffer: Buffer) -> str:
        """The condition under which every element is stored to; a variable, if it is long."""
        self.body.helpers |= helpers_of(buffer.empty_if)
        text = self.wording.condition(buffer.empty_if)
        known = self.body.holding(text)
        if known:
            return known
        return text if len(text) <= _LONG else self.body.bind(f"{self.wording.gradient(buffer.name)}_whole", text)

    def _dtype(self, buffer: Buffer) -> str:
        return "" if self.as_like(buffer) else f", dtype={self._element(buffer.element)}"

    def _element(self, element: str) -> str:
        """A dtype: that of a tensor of the launch, where kernels compute in what their tensors are made of."""
        if follows_tensors(element, self.references.source.text):
            for tensor in self.wording.launched.seen.tensors.values():
                if DTYPES[element] == str(declared_dtype(tensor)) and self.flow.same_form(tensor) is not None:
                    return self.references.asked(tensor, "dtype")
        return DTYPES[element]

    def _shaped(self, buffer: Buffer) -> str:
        make, dtype = self._make(buffer, ""), self._dtype(buffer)
        base = self.wording.gradient(buffer.name)
        shape = ", ".join(self.wording.short(text) for text in buffer.shape)
        name = self.body.fresh(base if base != buffer.name else buffer.name.lower())
        shape = f"({shape},)" if len(buffer.shape) == 1 else f"({shape})"
        options = [text for text in (dtype.removeprefix(", "), f"device={self.references.device()}") if text]
        self.body.write(Line(f"{name} = {make}(", (shape, *options), ")"))
        return name

    def _like_cotangent(self, buffer: Buffer) -> str:
        """Laid out as a cotangent is when it reaches the launch. Raises `CannotDerive` for one of a slice."""
        like = self.wording.variables[buffer.like]
        if not like.isidentifier():
            raise CannotDerive(f"{buffer.name} would lie as a part of a tensor does", remedy="Write to a whole tensor.")
        name = self.body.fresh(buffer.name)
        self.body.write(Line(f"{name} = {self._make(buffer, '_like')}({like}{self._dtype(buffer)})"))
        return name

    def _like(self, buffer: Buffer, tensor: Tensor) -> str:
        dtype = self._dtype(buffer)
        name = self.body.fresh(self.wording.gradient(buffer.name))
        like = self.wording.form(buffer.like)
        expanded = self.flow.is_expanded(tensor)
        if expanded:
            # Kernels add to the elements that the indices share, so that the sum over them is there already.
            tensor = self.flow.expanded(tensor)
            dtype = f", dtype={DTYPES[buffer.element]}"
            if self.flow.local(tensor) is None:
                zeros = f"torch.zeros({self.references.shape(tensor)}{dtype}, device={self.references.device()})"
                self.body.write(Line(f"{name} = {zeros}"))
                return name
            like = self.references.named(tensor, "a tensor that is expanded for a launch")
        if self.flow.always_dense(tensor):
            make = "torch.zeros_like" if expanded else self._make(buffer, "_like")
            self.body.write(Line(f"{name} = {make}({like}{dtype})"))
            return name
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CannotDerive(
                f"indices of `{like}` share elements of memory, so that its gradient has no room of that form",
                remedy="Expand it in the stub, or give it whole, by .contiguous().",
            )
        self.body.helpers[ROOM] = None
        options = [dtype.removeprefix(", ")] if dtype else []
        if buffer.fill is not Fill.ZEROS or self._is_checked(buffer):
            options.append("zeros=False")
        elif buffer.empty_if:
            text = self._whole(buffer)
            shown = text if text.isidentifier() else f"({text})"
            options.append("zeros=False" if text == "True" else f"zeros=not {shown}")
        if buffer.axes:
            axes = [f"({self.wording.short(one.stride)}, {self.wording.short(one.size)})" for one in buffer.axes]
            options.append(f"stored=({', '.join(axes)},)" if len(axes) == 1 else f"stored=({', '.join(axes)})")
        self.body.write(Line(f"{name} = gradient_room(", (like, *options), ")"))
        return name

    def _is_lent(self, buffer: Buffer) -> bool:
        """Whether it may be a cotangent: of the form and dtype of the tensor, in every call."""
        plan, tensors = self.wording.plan, self.wording.launched.seen.tensors
        lenders = [tensors[name] for name, argument in plan.cotangents.items() if argument == buffer.lender]
        if buffer.fill is Fill.HELD or not lenders or buffer.lender in plan.consumed or buffer.lender in self.wide:
            return False
        return self.flow.alike(tensors[buffer.like], lenders[0]) and self.flow.always_contiguous(lenders[0])

    def _lent(self, buffer: Buffer) -> str:
        """The cotangent, or zeros for what is stored to."""
        own, lender = self.wording.variables[buffer.unless], self.wording.variables[buffer.lender]
        self.lent.add(buffer.name)
        zeros = f"torch.zeros_like({self.wording.form(buffer.like)})"
        return self.body.bind(self.wording.gradient(buffer.name), f"{zeros} if {own} else {lender}")

    def _held(self, buffer: Buffer) -> str:
        """What earlier launches left of a gradient."""
        grad = self.cotangents.taken_over(self.wording.launched.seen.tensors[buffer.like])
        self.held[buffer.name] = buffer.element
        text = f"{grad.text}.float()" if buffer.element != grad.element else grad.text
        return text if text.isidentifier() else self.body.bind(self.wording.gradient(buffer.name), text)

    def _slice(self, tensor: Tensor, node: ast.expr) -> str:
        """Part of a gradient of the whole tensor that the launch was given a part of."""
        root = self.flow.root(tensor)
        found = self.references.part(tensor, node)
        if found is None:
            raise CannotDerive(
                f"the part that `{ast.unparse(node)}` is of a tensor cannot be told from the stub's text",
                remedy="Take parts in plain assignments, in one step.",
            )
        view, whole = found
        known = self._sliced.get(id(root))
        if known is not None and not disjoint([*known.parts, tensor]):
            raise CannotDerive(
                f"a launch is given parts of `{whole}` that overlap", remedy="Pass the whole tensor once."
            )
        if known is None:
            name = self.body.fresh(f"d{self.references.hint(root)}")
            like = self.references.names.tensor(whole)
            dense = self.flow.always_dense(root)
            self.body.helpers |= {} if dense else {ROOM: None}
            make = "torch.zeros_like" if dense else "gradient_room"  # views have the strides of the tensor's own
            self.body.write(Line(f"{name} = {make}({like}, dtype=torch.float32)"))
            known = self._sliced[id(root)] = Sliced(root, name)
        known.parts.append(tensor)
        return self.references.over(view, whole, known.variable)
