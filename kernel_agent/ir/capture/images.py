"""Images: float64 tensors that report the dtype and device the code under test believes in.

An image is a plain tensor, float64 for every floating dtype, that carries its declared dtype as an attribute.
Torch code runs on images inside of an `ImageMode`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.capture.unsigned import HELD_SIGNED
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.rounding import rounded

DECLARED = "_declared_dtype"
"""Attribute of an image that tells its declared dtype."""


def is_image(tensor: Tensor) -> bool:
    """Whether a tensor is an image."""
    return hasattr(tensor, DECLARED)


def declared_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype an image reports; the tensor's own dtype for any other tensor."""
    return getattr(tensor, DECLARED, None) or tensor.dtype


def held_dtype(declared: torch.dtype) -> torch.dtype:
    """The dtype an image of a declared dtype is held in."""
    if declared.is_complex:
        return torch.complex128
    return torch.float64 if declared.is_floating_point else HELD_SIGNED.get(declared, declared)


def declare(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Set what a tensor reports. The tensor must be held in `held_dtype(dtype)`."""
    setattr(tensor, DECLARED, dtype)
    return tensor


def real_parts(image: Tensor) -> Tensor:
    """An image of complex numbers as kernels see it: pairs of real ones on the same memory; any other as it is."""
    if not image.is_complex():
        return image
    return declare(torch.view_as_real(image), declared_dtype(image).to_real())


def as_image(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An image of a tensor, detached, with the same sizes and strides; it reports `dtype`, by default the tensor's."""
    return Images().image(tensor, dtype)


class Images:
    """Makes images of argument tensors; tensors that share storage get images that share storage."""

    def __init__(
        self,
        numerics: Numerics = Numerics.EXACT,
        device: torch.device | None = None,
        outside: Images | None = None,
    ) -> None:
        self._outside = outside
        """Where images of tensors that are no arguments are made and kept; None: here."""
        self._adopted: dict[int, tuple[Tensor, Tensor]] = {}
        self._faithful = numerics is Numerics.FAITHFUL
        self._device = device
        """Where images are made; None: where their tensors are."""
        self._storages: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def image(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `as_image`."""
        declared = dtype or declared_dtype(tensor)
        flat = self.storage(tensor, held_dtype(declared))
        if self._faithful and declared.is_floating_point:
            flat.copy_(rounded(flat, declared))
        return declare(flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()), declared)

    def adopted(self, tensor: Tensor) -> Tensor:
        """The image of a tensor that is no argument, the same one every time."""
        if self._outside is not None:
            return self._outside.adopted(tensor)
        if id(tensor) not in self._adopted:
            self._adopted[id(tensor)] = (tensor, self.image(tensor))
        return self._adopted[id(tensor)][1]

    def storage(self, tensor: Tensor, held: torch.dtype) -> Tensor:
        """A copy of the whole storage behind a tensor, shape (elements,), in the dtype images are held in."""
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = torch.as_strided(tensor.detach(), (elements,), (1,), 0)
            plain = whole.view(held) if tensor.dtype in HELD_SIGNED else whole
            self._storages[key] = self._copy(plain, held)
            self._kept.append(tensor)
        return self._storages[key]

    def _copy(self, elements: Tensor, held: torch.dtype) -> Tensor:
        return elements.to(self._device or elements.device, held, copy=True)


class SameImages(Images):
    """Of several calls: an argument of the same form at the same place is the same object at the same address.

    Who keeps what was computed for a tensor, and knows it again by identity, address or version, meets other values
    there. Tensors that are no arguments hold what the calls before left in them. For calls on the CPU, one after the
    other.
    """

    def __init__(self, outside: Images) -> None:
        super().__init__(outside=outside)
        self._flat: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._images: dict[tuple[Any, ...], Tensor] = {}
        """By place, address and form."""

    def begin(self) -> SameImages:
        """The next call."""
        self._storages, self._kept = {}, []
        self._turn = 0
        return self

    def image(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `as_image`; the object that stood here before, where it has the same form."""
        fresh = super().image(tensor, dtype)
        self._turn += 1
        form = (self._turn, fresh.data_ptr(), declared_dtype(fresh), tuple(fresh.size()), tuple(fresh.stride()))
        known = self._images.setdefault(form, fresh)
        changed = known.size() != fresh.size() or known.stride() != fresh.stride()
        if changed:  # by the code that was given it, as `t_` does
            known = self._images[form] = fresh
        return known

    def _copy(self, elements: Tensor, held: torch.dtype) -> Tensor:
        key = (len(self._kept), int(elements.numel()), held)
        if key not in self._flat:
            self._flat[key] = super()._copy(elements, held)
        self._flat[key].data.copy_(elements)  # past the version counter, as kernels write
        return self._flat[key]
