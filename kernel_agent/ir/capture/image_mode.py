"""Runs torch code on images: the values are computed in float64, what the code asks is answered as on the GPU.

Values are not rounded. Dtype, device, element size and data pointers are the declared ones; those of results come from
running the same call on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from kernel_agent.ir.capture.custom_ops import custom_function
from kernel_agent.ir.capture.device import CUDA, names_gpu
from kernel_agent.ir.capture.exactness import exactly
from kernel_agent.ir.capture.expected import Fresh, Same, expected_of
from kernel_agent.ir.capture.host_memory import goes_to_host, made_on_host, note_place
from kernel_agent.ir.capture.images import declare, declared_dtype, held_dtype, is_image
from kernel_agent.ir.capture.placement import compute_on
from kernel_agent.ir.capture.torch_calls import CallClass, TorchCall, class_of
from kernel_agent.ir.capture.unsigned import unsigned_followed
from kernel_agent.ir.errors import CaptureError
from kernel_agent.ir.memory import CPU, Buffer
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.recorded.recorder import Recorder
from kernel_agent.ir.rounding import rounded


def _name(func: Any) -> str:
    """The name of a torch function, without the overload of an operator."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return str(func._qualified_op_name if isinstance(func, OpOverloadPacket) else func._schema.name).split("::")[-1]
    return str(getattr(func, "__name__", ""))


class Session(Protocol):
    """What the mode asks, and tells of its work."""

    functions: int
    """How many `autograd.Function`s the code is inside of."""

    def adopt(self, tensor: Tensor) -> Tensor:
        """The image of a tensor that is none."""

    def buffer(self, tensor: Tensor, *, written: bool = True) -> Buffer:
        """The buffer behind an image."""

    def known_buffer(self, tensor: Tensor) -> Buffer | None:
        """The buffer behind an image, if kernels or allocations met it before."""

    def record(self, call: TorchCall) -> None:
        """A torch function was called."""


_CASTS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}
_SEVERAL_VIEWS = frozenset({"unbind", "split", "chunk", "split_with_sizes", "tensor_split", "hsplit", "vsplit"})
_ABOUT_DTYPES = frozenset({"result_type", "promote_types", "can_cast"})
"""Asked of declared dtypes: by the ones that images are held in, every answer would be float64."""
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_PRODUCTS = frozenset(
    {
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "linear", "bilinear", "einsum"),
        *("addmm", "addmv", "baddbmm", "addbmm", "tensordot", "chain_matmul"),
    }
)
"""Sums of products, which GPUs accumulate in float32."""

_PARTS = tuple(getattr(Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are tensors on the same memory."""

_NO_TENSORS = frozenset({torch.device, torch.is_grad_enabled, torch._C._set_grad_enabled})
"""Naming the GPU is not using it, and whether gradients are recorded is answered and set as the code sees it."""

_POISON = 77
"""Unwritten integers: tracked, so the value only has to be defined."""


class ImageMode(TorchFunctionMode):  # type: ignore[misc]
    """Runs torch code on images."""

    def __init__(
        self,
        session: Session,
        *,
        grad: bool,
        poison: bool,
        numerics: Numerics = Numerics.EXACT,
        device: torch.device = CPU,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.faithful = numerics is Numerics.FAITHFUL
        """Results are rounded to the dtype they report."""
        self.session = session
        self.grad = grad
        self.poison = poison
        self.device = device
        self.recorder = recorder  # who writes down what is called

    def __torch_function__(
        self, func: Any, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function on images."""
        kwargs = dict(kwargs or {})
        name = _name(func)
        if func in _NO_TENSORS:
            return func(*args, **kwargs)
        if func is Tensor.record_stream:  # everything is done when it is asked for
            return None
        if name == "__get__":
            return self._attribute(func, args)
        answer = _question(self.session, func, args)
        if answer is not None:
            return answer
        if name == "__iter__":
            whole = args[0].dim() == 0  # torch says why that cannot be
            return iter(args[0].unbind(0) if whole else self._call("unbind", torch.unbind, (args[0],), {}))
        return self._call(name, func, args, kwargs)

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`tensor.dtype` and the like; `tensor.T` is a view."""
        tensor, own = args[0], getattr(func, "__self__", None)
        declared = declared_dtype(tensor)
        if own is Tensor.dtype:
            return declared
        if own in (Tensor.is_cuda, Tensor.is_cpu):
            return own is Tensor.is_cuda
        if own is Tensor.device:
            return CUDA
        if own is Tensor.itemsize:
            return declared.itemsize
        if own is Tensor.nbytes:
            return declared.itemsize * tensor.numel()
        if own is Tensor.data and self.session.functions:
            return self._call("data", _alias, args, {})
        with torch.set_grad_enabled(self.grad):
            tensor = tensor if is_image(tensor) or own not in _PARTS else self.session.adopt(tensor)
            result = func(tensor)
        if isinstance(result, Tensor) and result is not tensor:
            declare(result, declared)
            if self.recorder is not None:
                self.recorder.took_part(_name(own), tensor, result)
        return result

    def _call(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not all(is_image(value) for value in inputs):
            args, kwargs = tree_map(self._adopted, (args, kwargs))
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        python = custom_function(func)
        if python is not None:
            with self:
                return python(*args, **kwargs)
        if name == "detach" and self.session.functions:  # a forward is not recorded: there detaching changes nothing
            func = _alias
        expected = expected_of(name, func, args, kwargs, bool(inputs))
        if name in _ABOUT_DTYPES and expected is not None:
            return expected
        followed = unsigned_followed(
            name, args, [declared_dtype(value) for value in inputs], getattr(expected, "dtype", None)
        )
        if self.recorder is not None:
            self.recorder.will(name, args, kwargs)
        with torch.set_grad_enabled(self.grad):
            result = self._compute(name, func, *exactly(name, followed, kwargs, getattr(expected, "dtype", None)))
            result = self._declare_all(name, result, expected, inputs)
            if self.faithful:
                _round_all((args[0], result) if name == "__setitem__" else result)
        self._note(name, args, kwargs, result, inputs)
        if isinstance(result, Tensor):
            note_place(name, result, args, kwargs, alone=not inputs)
        if self.recorder is not None:
            self.recorder.did(name, func, args, kwargs, result)
        return result

    def _adopted(self, value: Any) -> Any:
        return self.session.adopt(value) if isinstance(value, Tensor) else value

    def _compute(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if goes_to_host(name, args, kwargs) and not made_on_host(args[0]):
            args = (args[0].clone(), *args[1:])
        if name in ("cuda", "cpu"):
            return args[0]
        if name in _CASTS and args and isinstance(args[0], Tensor):
            held = held_dtype(_CASTS[name])
            return args[0].to(held)
        if name in _SEVERAL_VIEWS and args and isinstance(args[0], Tensor):
            # torch forbids changing one of several views that were made together; made one by one they may be changed
            with torch.no_grad():
                parts = func(*args, **kwargs)
            return tuple(args[0].as_strided(part.size(), part.stride(), part.storage_offset()) for part in parts)
        if kwargs.get("out") is not None:  # torch records no call that writes to `out`
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            return _written(kwargs["out"], self._compute(name, func, args, rest))
        kwargs.pop("pin_memory", None)
        if self.faithful and name in _PRODUCTS:
            return _product_in_float32(func, args, kwargs, self._real)
        real_args, real_kwargs = tree_map(self._real, (args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(_frozen, lambda tensor: tensor):
            if self.device != CPU:
                return compute_on(self.device, name, func, real_args, real_kwargs)
            return func(*real_args, **real_kwargs)

    def _real(self, value: Any) -> Any:
        """An argument for the real call: float64 for floating dtypes, the execution's device for the GPU."""
        if isinstance(value, torch.dtype):
            return held_dtype(value)
        return self.device if names_gpu(value) else value

    def _declare_all(self, name: str, result: Any, expected: Any, inputs: list[Tensor]) -> Any:
        """Give every tensor of the result its declared dtype, and a storage of its own where the GPU would make one."""
        leaves, spec = tree_flatten(result)
        hints = tree_leaves(expected) if expected is not None else []
        if len(hints) != len(leaves):
            hints = [None] * len(leaves)
        changed = []
        for leaf, hint in zip(leaves, hints, strict=True):
            if not isinstance(leaf, Tensor):
                changed.append(leaf)
                continue
            known = any(leaf is tensor for tensor in inputs)
            if known and not (isinstance(hint, Fresh)):
                changed.append(leaf)
                continue
            tensor = leaf.clone() if known else leaf
            dtype = hint.dtype if isinstance(hint, (Fresh, Same)) else _guess(name, tensor, inputs)
            if isinstance(hint, (Fresh, Same)) and hint.shape != tensor.shape:
                raise _reads_bits(name, hint.dtype, inputs)
            if tensor.dtype != held_dtype(dtype):
                if tensor.dtype != held_dtype(tensor.dtype):
                    tensor = tensor.to(held_dtype(tensor.dtype))
                if tensor.dtype != held_dtype(dtype):
                    dtype = tensor.dtype
            changed.append(declare(tensor, dtype))
        return spec.unflatten(changed)

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[Tensor]
    ) -> None:
        """Tell the session what the call did to memory."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        kind = class_of(name, floats=any(tensor.is_floating_point() for tensor in (*inputs, *outputs)))
        if kind is not None:
            shown = name.strip("_") if kind in (CallClass.COMPUTE, CallClass.INDEX) else name
            self.session.record(TorchCall(shown, kind))
        if name in _UNWRITTEN and self.poison:
            for tensor in outputs:
                _poison(tensor)
                self.session.buffer(tensor, written=False)
        elif name == "__setitem__":
            buffer = self.session.known_buffer(args[0])
            if buffer is not None:
                buffer.mark_written(args[0], args[1])
        elif name.endswith("_") or "out" in kwargs:
            for tensor in outputs:
                buffer = self.session.known_buffer(tensor) if any(tensor is given for given in inputs) else None
                if buffer is not None:
                    buffer.mark_written(tensor)


def _question(session: Session, func: Any, args: tuple[Any, ...]) -> Any:
    """Answers about a tensor's place in memory; None for any other function."""
    if func is Tensor.element_size:
        return declared_dtype(args[0]).itemsize
    if func is Tensor.get_device:
        return 0
    if func is Tensor.data_ptr:
        buffer = session.buffer(session.adopt(args[0]))
        return buffer.base + args[0].storage_offset() * buffer.itemsize
    if func is Tensor.type and len(args) == 1:
        return f"torch.cuda.{str(declared_dtype(args[0])).removeprefix('torch.')}"
    return None


def _reads_bits(name: str, dtype: torch.dtype, inputs: list[Tensor]) -> CaptureError:
    given = declared_dtype(inputs[0]) if inputs else dtype
    return CaptureError(
        f"torch function {name} reads memory of {given} as {dtype}, and the bits of such memory are not followed",
        remedy=f"Allocate a workspace as what it holds, with torch.empty(..., dtype={dtype}); convert values with "
        ".to(dtype), and bits inside of a kernel with .to(dtype, bitcast=True).",
    )


def _written(out: Any, result: Any) -> Any:
    """Results put where `out` wants them: into one tensor or several, which take the results' shapes."""
    for place, part in zip(tree_leaves(out), tree_leaves(result), strict=True):
        if place.shape != part.shape:
            raise CaptureError(
                f"out= of shape {tuple(place.shape)} is given for a result of shape {tuple(part.shape)}",
                remedy="Allocate the output in the shape of the result.",
            )
        place.copy_(part)
    return out


def _alias(tensor: Tensor) -> Tensor:
    """A view of all of a tensor."""
    return tensor.view_as(tensor)


def _guess(name: str, tensor: Tensor, inputs: list[Tensor]) -> torch.dtype:
    """Declared dtype of a result whose meta run failed: floats follow the inputs' promotion."""
    floats = [declared_dtype(given) for given in inputs if given.is_floating_point()]
    if not tensor.is_floating_point():
        return tensor.dtype
    if name in _CASTS:
        return _CASTS[name]
    dtype = floats[0] if floats else torch.float32
    for other in floats[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


def _product_in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real: Callable[[Any], Any]) -> Tensor:
    """A sum of products, accumulated in float32 unless a declared dtype is wider."""
    floats = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.is_floating_point()]
    wide = any(declared_dtype(value) == torch.float64 for value in floats)

    def narrow(value: Any) -> Any:
        return value.to(torch.float32) if any(value is tensor for tensor in floats) and not wide else real(value)

    real_args, real_kwargs = tree_map(narrow, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    return result.to(torch.float64) if result.is_floating_point() else result


def _round_all(result: Any) -> None:
    """Round images in place to what they report. A view's elements are its base's and mostly rounded already."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
            near = rounded(tensor.detach(), declared_dtype(tensor))
            if not bool(((near == tensor) | tensor.isnan()).all()):
                tensor.copy_(near)


def _frozen(tensor: Tensor) -> Tensor:
    """What autograd saves: a copy, since kernels change memory in place afterwards."""
    return tensor.detach().clone() if tensor.is_floating_point() else tensor


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(0 if tensor.dtype == torch.bool else _POISON)
