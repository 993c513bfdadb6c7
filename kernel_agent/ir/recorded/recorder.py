"""`Recorder`: writes down, while a call runs, every torch function and every launch of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of
from kernel_agent.ir.memory import ADDRESS_BITS, Buffer
from kernel_agent.ir.recorded.earlier import MOST_ELEMENTS, EarlierMemory, Use
from kernel_agent.ir.recorded.forms import CannotRecord, Writer, kernel_line, spelled
from kernel_agent.ir.recorded.program import MOST_STEPS, Constant, Launch, Program, Step, Torch

_IN_PLACE = frozenset(
    {
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
        *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    }
)
"""Torch functions that write into their first argument, beside those whose names end with one underscore."""


class Recorder:
    """Of one call. What cannot be written down does not disturb the call: its program says so."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._of_storage: dict[int, int] = {}
        self._steps: list[Step | Use] = []
        self._earlier = EarlierMemory()
        self._refused = ""
        self._buffers: Mapping[int, Buffer] = {}
        self._known_buffer: Callable[[Tensor], Buffer | None] = lambda _tensor: None
        self._writer = Writer(self._number_of, self._place_of)
        self._result: Any = None

    def begin(
        self,
        arguments: Sequence[Tensor],
        buffers: Mapping[int, Buffer],
        known_buffer: Callable[[Tensor], Buffer | None],
    ) -> None:
        """The call starts with these tensors; buffers are looked up by the upper bits of addresses, and by tensor."""
        self._buffers, self._known_buffer = buffers, known_buffer
        for tensor in arguments:
            self._number(tensor)

    def will(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch function is about to be called: what it writes into is looked at before."""
        with self._refusing():
            for tensor in [] if self._refused else _written(name, args, kwargs):
                self._number_of(tensor)

    def did(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A torch function was called."""
        leaves = tree_leaves(result)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._earlier.took_part(name, inputs, _written(name, args, kwargs))
        if class_of(name, floats=True) is None and not any(isinstance(leaf, Tensor) for leaf in leaves):
            return

        def step() -> Torch:
            space, known = spelled(func)
            forms = self._writer.form(list(args)), self._writer.form(kwargs)
            numbers = tuple(self._number(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
            return Torch(space=space, name=known, args=forms[0], kwargs=forms[1], results=numbers)

        self._note(step)

    def took_part(self, name: str, tensor: Tensor, result: Tensor) -> None:
        """An attribute that is a tensor, such as `x.T`, was read."""
        self._note(
            lambda: Torch(
                space="part",
                name=name,
                args=[self._writer.form(tensor)],
                kwargs={"dict": {}},
                results=(self._number(result),),
            )
        )

    def launched(
        self, kernel: Any, grid: tuple[int, int, int], values: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """A kernel was launched with these arguments by parameter."""
        self._note(
            lambda: Launch(
                kernel=kernel.fn.__name__,
                line=kernel_line(kernel),
                grid=grid,
                values=self._writer.form(dict(values)),
                options=self._writer.form(dict(options)),
            )
        )

    def returned(self, result: Any) -> None:
        """The call is over."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        with self._refusing():
            self._result = self._writer.form(result)
            if any(self._earlier.is_written(tensor, self._known_buffer(tensor)) for tensor in tensors):
                raise CannotRecord(
                    "it returns memory of an earlier call, which the next one writes over: make it in the call"
                )
            self._earlier.read(tensors)
            self._steps = [
                self._earlier.step(step, self._known_buffer(step.tensor)) if isinstance(step, Use) else step
                for step in self._steps
            ]

    @property
    def program(self) -> Program:
        """What was written down, once the call is over."""
        steps = tuple(step for step in self._steps if not isinstance(step, Use))
        return Program(steps=steps, result=self._result, refused=self._refused[:2000])

    def _note(self, make: Callable[[], Torch | Launch]) -> None:
        with self._refusing():
            if self._refused:
                return
            self._steps.append(make())
            if len(self._steps) > MOST_STEPS:
                raise CannotRecord(f"it takes more than {MOST_STEPS} steps")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except CannotRecord as error:
            self._refused = self._refused or error.message
            self._steps.clear()

    def _number(self, tensor: Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        number = self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)
        self._of_storage.setdefault(tensor.untyped_storage()._cdata, number)
        return number

    def _number_of(self, tensor: Tensor) -> int:
        """The number of a tensor that is used; one that nothing made is written down with its elements."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        if tensor.is_complex():
            raise CannotRecord("a complex tensor is used that was not made in this call")
        if self._earlier.holds(tensor) or tensor.untyped_storage()._cdata not in self._of_storage:
            number = self._number(tensor)
            self._steps.append(self._earlier.use(tensor, number))
            return number
        if tensor.numel() > MOST_ELEMENTS:  # a view that nothing made, of memory that an argument or a step did
            shape = tuple(tensor.shape)
            raise CannotRecord(
                f"a tensor of shape {shape} is used that neither is an argument nor was made in this call"
            )
        dtype = str(declared_dtype(tensor)).removeprefix("torch.")
        values = tuple(tensor.detach().flatten().tolist())
        number = self._number(tensor)
        self._steps.append(Constant(dtype=dtype, shape=tuple(tensor.shape), values=values, result=number))
        return number

    def _place_of(self, value: int) -> tuple[int, int] | None:
        """Where an address points: a tensor with that memory, and bytes behind its start."""
        buffer = self._buffers.get(value >> ADDRESS_BITS) if value >> ADDRESS_BITS else None
        if buffer is None:
            return None
        for number in self._of_storage.values():
            if self._known_buffer(self._kept[number]) is buffer:
                return number, value - buffer.base
        return None


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a torch function of this name writes into."""
    into = [kwargs.get("out")]
    plain = name.endswith("_") and not name.startswith("__")
    if args and (plain or name in _IN_PLACE) and class_of(name, floats=True) is not CallClass.VIEW:
        into.append(args[0])
    return [leaf for leaf in tree_leaves(into) if isinstance(leaf, Tensor)]
