"""Follows one call of a stub and writes down, in order, what it launches and what torch does around the launches.

Nothing is executed but torch code on small arguments: kernels are bound and lowered, not run.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.jit import JITFunction

from kernel_agent.compiler.stub.descriptors import taken_apart
from kernel_agent.gate.layout import meets
from kernel_agent.ir import standin
from kernel_agent.ir.capture.build import Build
from kernel_agent.ir.capture.capture import Capture, Compiled, shared_memory
from kernel_agent.ir.capture.image_mode import ImageMode
from kernel_agent.ir.capture.images import Images, declare, declared_dtype
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.capture.signature import Signature
from kernel_agent.ir.launch import LaunchOptions

_PERHAPS_ITSELF = frozenset(
    [
        "contiguous",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "reshape",
        "reshape_as",
        "view",
        "flatten",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
    ]
)
"""Functions that return their argument where there is nothing to do: here they return a tensor of its own, so that what
they are for is seen."""


@dataclass(frozen=True)
class Site:
    """Where in the user's file something was called."""

    function: str
    """Name of the function around it; empty outside of the file."""
    line: int
    names: Mapping[str, Any]
    """What the function's locals were then."""
    span: tuple[int, int, int, int] | None = None
    """Line, end line, column and end column (in bytes) of the expression that called; None where Python does not tell,
    as before 3.11."""
    outer: int = 0
    """Line of the file's outermost function, the stub, that led there."""


@dataclass(frozen=True)
class Clone:
    """What a tensor held before a launch overwrote it."""

    of: str
    """The argument that is overwritten."""
    local: str
    """Of the stub, which holds it."""


@dataclass(frozen=True)
class LaunchSeen:
    """One launch."""

    kernel: JITFunction
    values: Mapping[str, Any]
    """What every parameter was given, tensors as images; descriptors as `taken_apart` has them."""
    build: Build
    """What Triton compiles for it."""
    grid: tuple[int, ...]
    options: Mapping[str, Any]
    """Keywords of the launch that are no parameters: `num_warps` and the like, those of a tuned configuration too."""
    site: Site
    clones: Mapping[str, Clone] = field(default_factory=dict)
    """Arguments that the compiler has given the kernel, among `values` too."""

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.fn.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs, and None, functions and the like, by name, in the order of the source."""
        names = [parameter.name for parameter in self.kernel.params]
        found = {names[path[0]]: value for path, value in sorted(self.build.constants.items()) if len(path) == 1}
        constexprs = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        return {name: value for name, value in found.items() if name in constexprs or type(value) is not int}

    @property
    def shared(self) -> tuple[frozenset[str], ...]:
        """See `Launch.shared`."""
        return shared_memory(self.values)

    @property
    def descriptors(self) -> dict[str, int]:
        """Parameters that the stub gave a descriptor for, with its rank."""
        ranks: dict[str, int] = {}
        for parameter in self.kernel.params:
            ends = [key for key in self.values if key.startswith(f"{parameter.name}_stride_")]
            if str(self.build.types.get(parameter.name, "")).startswith("tensordesc"):
                ranks[parameter.name] = len(ends)
        return ranks

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters that are tensors."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class TorchSeen:
    """One torch function outside of kernels that made or changed a tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    site: Site


@dataclass(frozen=True)
class Trace:
    """One call of a stub."""

    events: tuple[LaunchSeen | TorchSeen, ...]
    inputs: Mapping[str, Tensor]
    """Images of the tensor arguments by parameter, as the stub got them."""
    result: Any
    """What it returned, tensors as images."""
    names: Mapping[str, Any]
    """Locals of the stub as it returned."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the entry that it is a call at, by name."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """The same before they were made small enough to be looked at."""
    dims: Mapping[str, Any] = field(default_factory=dict)
    """All that the entry says, sizes and others."""

    @property
    def launches(self) -> tuple[LaunchSeen, ...]:
        """The launches among the events."""
        return tuple(event for event in self.events if isinstance(event, LaunchSeen))


def trace(stub: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Trace:
    """Call the stub of the file at `path` with images of its tensors. Raises what the stub raises, and `IRError`."""
    capture = _Tracing(str(path))
    inputs = Inputs(stub, args, kwargs, (), capture, _Apart(tree_leaves((args, kwargs))))
    with standin(), capture.running(), _last_names(stub) as names:
        result = stub(*inputs.args, **inputs.kwargs)
    result = tree_map(lambda part: capture.adopt(part) if isinstance(part, Tensor) else part, result)
    bound = inspect.signature(stub).bind(*inputs.args, **inputs.kwargs).arguments
    given: dict[str, Tensor] = {}
    for name, value in bound.items():
        parts = {name: value}
        if isinstance(value, tuple):
            parts = {f"{name}[{place}]": part for place, part in enumerate(value)}
        elif isinstance(value, dict):
            parts = value
        given |= {key: part for key, part in parts.items() if isinstance(part, Tensor)}
    return Trace(tuple(capture.events), given, result, names)


class _Apart(Images):
    """Images of inputs in memory of their own where one tensor was made for several, as by `s, t = torch.randn(2, N)`,
    and no two have an element in common: what depends on inputs is told by the memory that it lies in."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        super().__init__(device=torch.device("cpu"))
        there: dict[int, list[Tensor]] = {}
        for one in inputs:
            if isinstance(one, Tensor):
                there.setdefault(one.untyped_storage()._cdata, []).append(one)
        self._common = {
            storage
            for storage, some in there.items()
            if any(one is other or meets(one, other) for one, other in itertools.combinations(some, 2))
        }
        """Storages in which elements belong to several."""

    def image(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Images.image`."""
        if tensor.untyped_storage()._cdata in self._common:
            return super().image(tensor, dtype)
        return Images(device=self._device).image(tensor, dtype)


@contextmanager
def _last_names(stub: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """What the locals of a function are when it returns; filled by then."""
    code, names = inspect.unwrap(stub).__code__, {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            names.update(frame.f_locals)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


class _Tracing(Capture):
    """A capture that writes events down and runs no kernel."""

    def __init__(self, path: str) -> None:
        super().__init__(grad=False, poison=False, options=LaunchOptions(sanitize=False))
        self.path = path
        self.events: list[LaunchSeen | TorchSeen] = []

    def mode(self) -> ImageMode:
        """See `Capture.mode`."""
        return _Noting(self)

    def site(self) -> Site:
        """The innermost frame of the user's file."""
        frames = [frame for frame in _frames(sys._getframe(1)) if frame.f_code.co_filename == self.path]
        if not frames:
            return Site("", 0, {})
        inner, outer = frames[0], frames[-1]
        return Site(inner.f_code.co_name, inner.f_lineno, dict(inner.f_locals), _span(inner), outer.f_lineno)

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """See `Capture.launch`."""
        own = {key: value for key, value in kwargs.items() if key in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **own)
        bound.apply_defaults()
        values = {name: self._argument(value) for name, value in bound.arguments.items()}
        sizes = grid(dict(values)) if callable(grid) else grid
        listed = tuple(operator.index(size) for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,)))
        with torch._C.DisableTorchFunction():
            signature = Signature(kernel, values, self.buffer, self.buffers)
            build = Build.of(kernel, signature.types, signature.constants, values, kwargs)
        options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names and value is not None}
        self.events.append(LaunchSeen(kernel, taken_apart(values), build, listed, options, self.site()))
        return Compiled(kernel, values)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _span(frame: FrameType) -> tuple[int, int, int, int] | None:
    """See `Site.span`."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    line, end_line, column, end_column = next(itertools.islice(positions(), frame.f_lasti // 2, None))
    return None if None in (line, end_line, column, end_column) else (line, end_line, column, end_column)


class _Noting(ImageMode):
    """Runs torch code on images and tells of every call that has a tensor to show for it."""

    def __init__(self, capture: _Tracing) -> None:
        super().__init__(capture, grad=False, poison=False)
        self.capture = capture

    def _call(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(self._adopted, (args, kwargs))
        result = super()._call(name, func, args, dict(kwargs))
        if name in _PERHAPS_ITSELF and args and result is args[0]:
            with torch._C.DisableTorchFunction():
                result = declare(result.view(result.shape), declared_dtype(result))
        self._tell(name, args, kwargs, result)
        return result

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = super()._attribute(func, args)
        if isinstance(result, Tensor):
            name = str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
            self._tell(name, (self._adopted(args[0]),), {}, result)
        return result

    def _tell(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if name == "__setitem__" or any(isinstance(part, Tensor) for part in parts):
            self.capture.events.append(TorchSeen(name, args, kwargs, result, self.capture.site()))
