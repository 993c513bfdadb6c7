"""Images of the arguments of one call, and the leaves that gradients are taken by."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from kernel_agent.ir.capture.capture import Capture
from kernel_agent.ir.capture.images import Images, declare, declared_dtype, held_dtype, real_parts
from kernel_agent.ir.capture.signature_names import argument_names, path_name


class Inputs:
    """Images of the arguments of one call, and of the parameters and buffers of a module that is called."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Collection[int | str],
        capture: Capture,
        images: Images | None = None,
    ) -> None:
        self.leaves: dict[int | str, Tensor] = {}
        self._capture = capture
        self._before: list[tuple[str, Tensor, Tensor]] = []
        self._taken: dict[int, Tensor] = {}
        capture.images = images or capture.images
        names = argument_names(fn, len(args))
        flat, spec = tree_flatten_with_path((list(args), dict(kwargs)))
        values = []
        self._names = names
        self._held: dict[str, Any] = {}
        """What the arguments hold before the call; see `_parts`."""
        for path, value in flat:
            name = path_name(path, names)
            key = _leaf_key(path, name, leaves)
            values.append(self._image(value, name, key) if isinstance(value, Tensor) else value)
            self._held[name] = values[-1]
        self.args, self.kwargs = tree_unflatten(values, spec)
        self._module = _module_of(fn)
        if self._module is not None:
            own = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
            for name, tensor in own.items():
                capture.adopt(tensor, self._image(tensor, name, name if name in leaves else None))

    def _image(self, value: Tensor, name: str, key: int | str | None) -> Tensor:
        image = self._leaf(value, key) if key is not None else self._capture.images.image(value)
        self._capture.buffer(image, name=name).extents.give(name, real_parts(image))
        self._before.append((name, image, image.detach().clone()))
        return image

    def _leaf(self, value: Tensor, key: int | str) -> Tensor:
        declared = declared_dtype(value)
        device = self._capture.options.device
        leaf = value.detach().to(device, torch.float64).clone(memory_format=torch.contiguous_format)
        leaf.requires_grad_(True)
        self.leaves[key] = leaf
        if _overlaps_itself(value):
            return declare(leaf.clone(), declared)
        images = Images(self._capture.options.numerics, device) if self._take(value) else self._capture.images
        storage = images.storage(value, held_dtype(declared))
        with torch.enable_grad():
            image = storage.as_strided(value.size(), value.stride(), value.storage_offset())
            image.copy_(leaf)
        return declare(image, declared)

    def _take(self, value: Tensor) -> bool:
        """Note which elements of its storage a leaf takes; whether an earlier leaf took some of them already.

        Then it gets memory of its own: the gradient of an argument is that of this argument alone.
        """
        key = value.untyped_storage()._cdata
        if key not in self._taken:
            self._taken[key] = torch.zeros(value.untyped_storage().nbytes() // value.element_size(), dtype=torch.bool)
        mine = self._taken[key].as_strided(value.size(), value.stride(), value.storage_offset())
        shared = bool(mine.any())
        mine.fill_(True)
        return shared

    @contextlib.contextmanager
    def module_kept(self) -> Iterator[None]:
        """What the call sets on the module it belongs to is undone: images must not stay there."""
        parts = list(self._module.modules()) if self._module is not None else []
        before = [(part, vars(part).copy(), part._parameters.copy(), part._buffers.copy()) for part in parts]
        try:
            yield
        finally:
            for part, attributes, parameters, buffers in before:
                vars(part).clear()
                vars(part).update({**attributes, "_parameters": parameters, "_buffers": buffers})

    def _parts(self) -> dict[str, Any]:
        """All that the arguments hold, by name: a list that somebody took something out of has other parts."""
        flat, _ = tree_flatten_with_path((self.args, self.kwargs))
        return {path_name(path, self._names): value for path, value in flat}

    def images(self) -> dict[str, Tensor]:
        """The images by name."""
        return {name: image for name, image, _ in self._before}

    def mutated(self) -> tuple[str, ...]:
        """Names of arguments whose content is no longer what it was, and of what lists and dicts among them hold."""
        parts = self._parts()
        every = dict.fromkeys((*self._held, *parts))
        absent = object()
        changed = [name for name in every if self._held.get(name, absent) is not parts.get(name, absent)]
        for name, image, before in self._before:
            same = torch.equal(image.detach(), before) or torch.allclose(
                image.detach().double(), before.double(), rtol=0.0, atol=0.0, equal_nan=True
            )
            if not same:
                changed.append(name)
        return tuple(changed)


def _module_of(fn: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that is called, itself or by one of its methods."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", fn)
    return owner if isinstance(owner, torch.nn.Module) else None


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether several indices of a tensor mean one element of memory."""
    known = int(torch._debug_has_internal_overlap(tensor))
    if known != 2:  # 2: it did not look closely
        return bool(known)
    offsets = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    places = offsets.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    distinct: int = places.unique().numel()
    return distinct < int(tensor.numel())


def _leaf_key(path: tuple[Any, ...], name: str, leaves: Collection[int | str]) -> int | str | None:
    """The entry of `leaves` that means this argument, if any."""
    if len(path) == 2 and path[0].idx == 0 and path[1].idx in leaves:
        return int(path[1].idx)
    return name if name in leaves else None
