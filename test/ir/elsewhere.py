"""A device that is not the CPU, on any machine: tensors that report `meta` and compute on hidden CPU tensors.

It is as strict as a GPU: tensors of two devices do not mix (but for zero-dimensional CPU numbers), and everything that
would make the host wait for the device is counted. `Elsewhere` must be active while such tensors are used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}


class Remote(Tensor):
    """A tensor elsewhere."""

    @staticmethod
    def __new__(cls, hidden):
        return Tensor._make_wrapper_subclass(
            cls,
            hidden.size(),
            strides=hidden.stride(),
            storage_offset=hidden.storage_offset(),
            dtype=hidden.dtype,
            device=DEVICE,
        )

    def __init__(self, hidden):
        self.hidden = hidden

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} met a tensor elsewhere while no Elsewhere is active")

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"Remote({self.hidden!r})"


class Elsewhere(TorchDispatchMode):
    """Runs operations on remote tensors and counts what would make the host wait."""

    def __init__(self):
        super().__init__()
        self.waits = []
        """Operations that asked for a value, in order."""
        self.largest = 0
        """Elements of the largest tensor made."""
        self.limit = None
        """Elements above which a new tensor does not fit; None: no limit."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        remote = any(isinstance(tensor, Remote) for tensor in tensors)
        target = kwargs.get("device")
        if func is aten._to_copy.default:
            there = torch.device(target) == DEVICE if target is not None else remote
            if (remote and not there) or (there and not remote and not kwargs.get("non_blocking")):
                self.waits.append(func)
            kwargs["device"] = CPU
            hidden = func(*tree_map(_hidden, args), **kwargs)
            return self._made(hidden) if there else hidden
        if not remote and (target is None or torch.device(target) != DEVICE):
            return func(*args, **kwargs)
        strangers = [t for t in tensors if not isinstance(t, Remote) and t.dim() > 0]
        if remote and strangers and func not in (aten.copy_.default, aten.index.Tensor):
            raise RuntimeError(f"{func} mixes a tensor of the CPU, {tuple(strangers[0].shape)}, with tensors elsewhere")
        if target is not None:
            kwargs["device"] = CPU
        if func in WAITS or (func is aten.index.Tensor and any(_is_mask(t) for t in tree_leaves(args[1]))):
            self.waits.append(func)
        if func is aten.index_put_.default and any(_is_mask(t) for t in tree_leaves(args[1])):
            self.waits.append(func)
        hidden = func(*tree_map(_hidden, args), **tree_map(_hidden, kwargs))
        return self._wrapped(func, args, hidden)

    def _wrapped(self, func, args, hidden):
        if func._schema.is_mutable and isinstance(args[0], Tensor) and isinstance(hidden, Tensor):
            return args[0]
        return tree_map(lambda leaf: self._made(leaf) if isinstance(leaf, Tensor) else leaf, hidden)

    def _made(self, hidden):
        size = hidden.untyped_storage().nbytes() // max(1, hidden.element_size())
        if self.limit is not None and size > self.limit:
            raise torch.OutOfMemoryError(f"{size} elements do not fit")
        self.largest = max(self.largest, size)
        return Remote(hidden)


def _hidden(value):
    return value.hidden if isinstance(value, Remote) else value


def _is_mask(index):
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
