"""`Recorder`: writes down, while a call runs, every torch function and every launch of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import class_of
from kernel_agent.ir.memory import ADDRESS_BITS, Buffer
from kernel_agent.ir.recorded.forms import CannotRecord, Writer, kernel_line, spelled
from kernel_agent.ir.recorded.program import MOST_STEPS, Constant, Launch, Program, Torch

MOST_ELEMENTS = 4096
"""Elements of one tensor that may stand in a program because nothing in it made them."""


class Recorder:
    """Of one call. What cannot be written down does not disturb the call: its program says so."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._of_storage: dict[int, int] = {}
        self._steps: list[Torch | Constant | Launch] = []
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

    def did(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A torch function was called."""
        leaves = tree_leaves(result)
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
        try:
            self._result = self._writer.form(result)
        except CannotRecord as error:
            self._refused = self._refused or error.message

    @property
    def program(self) -> Program:
        """What was written down."""
        return Program(steps=tuple(self._steps), result=self._result, refused=self._refused[:2000])

    def _note(self, make: Callable[[], Torch | Launch]) -> None:
        if self._refused:
            return
        try:
            self._steps.append(make())
            if len(self._steps) > MOST_STEPS:
                raise CannotRecord(f"it takes more than {MOST_STEPS} steps")
        except CannotRecord as error:
            self._refused = error.message
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
        if tensor.numel() > MOST_ELEMENTS:
            shape = tuple(tensor.shape)
            raise CannotRecord(
                f"a tensor of shape {shape} is used that neither is an argument nor was made in this call"
            )
        if tensor.is_complex():
            raise CannotRecord("a complex tensor is used that was not made in this call")
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
