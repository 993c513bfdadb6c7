"""What torch functions a stub or a backward called outside kernels, sorted by what they do to data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CallClass(str, enum.Enum):
    """What a torch function does."""

    ALLOCATION = "ALLOCATION"
    VIEW = "VIEW"
    COPY = "COPY"
    FILL = "FILL"
    REDUCTION = "REDUCTION"
    INDEX = "INDEX"
    COMPUTE = "COMPUTE"


@dataclass(frozen=True)
class TorchCall:
    """One torch function that was called, however often."""

    name: str
    kind: CallClass
    """COMPUTE is everything that is not known to be harmless; INDEX is arithmetic on integers alone."""

    @property
    def computes(self) -> bool:
        """Whether a backward may have to compute with floats because of it: a mean is divided by its count."""
        return self.kind is CallClass.COMPUTE or self.name in _COMPUTING_BACK


_COMPUTING_BACK = frozenset({"mean", "amax", "amin", "max", "min", "gather", "index_select"})
"""Functions that only sum, choose or copy, while their adjoints divide, compare or add."""
_ALLOCATION = (
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones "
    "ones_like "
    "new_ones full full_like new_full tensor as_tensor new_tensor scalar_tensor arange linspace eye rand rand_like "
    "randn "
    "randn_like randint randperm from_numpy"
)
_VIEW = (
    "view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze transpose swapaxes swapdims permute "
    "movedim "
    "moveaxis t adjoint T mT H mH expand expand_as broadcast_to broadcast_tensors select narrow split chunk "
    "tensor_split "
    "split_with_sizes unbind as_strided diagonal detach data real imag __getitem__ __iter__ unfold alias view_as_real "
    "view_as_complex atleast_1d atleast_2d atleast_3d hsplit vsplit positive requires_grad_ grad"
)
_COPY = (
    "clone contiguous to type type_as float double half bfloat16 int long short char byte bool cuda cpu copy_ "
    "__setitem__ "
    "cat concat concatenate stack hstack vstack repeat repeat_interleave tile flip roll index_select gather "
    "pad __deepcopy__ numpy tolist item"
)
_FILL = "fill_ zero_ fill fill_diagonal_ masked_fill masked_fill_ tril triu tril_ triu_"
_REDUCTION = "sum mean amax amin max min all any count_nonzero nansum"
_SILENT = (
    "size stride numel nelement dim ndimension ndim shape dtype device layout is_cuda is_cpu is_contiguous "
    "storage_offset "
    "data_ptr untyped_storage element_size itemsize nbytes get_device is_floating_point is_complex requires_grad "
    "grad_fn "
    "is_leaf __len__ __repr__ __format__ __str__ __hash__ __bool__ __int__ __float__ __index__ __contains__ dim_order "
    "is_sparse is_meta is_quantized is_mkldnn names is_same_size broadcast_shapes is_tensor get_default_dtype "
    "is_grad_enabled set_default_dtype finfo iinfo __dir__ is_set_to retain_grad is_inference is_conj is_neg is_xpu "
    "set_grad_enabled set_ is_mps _version _base is_nested is_non_overlapping_and_dense promote_types result_type "
    "can_cast is_signed"
)

_CLASSES: dict[str, CallClass | None] = {
    **dict.fromkeys(_SILENT.split(), None),
    **dict.fromkeys(_ALLOCATION.split(), CallClass.ALLOCATION),
    **dict.fromkeys(_VIEW.split(), CallClass.VIEW),
    **dict.fromkeys(_COPY.split(), CallClass.COPY),
    **dict.fromkeys(_FILL.split(), CallClass.FILL),
    **dict.fromkeys(_REDUCTION.split(), CallClass.REDUCTION),
}


def class_of(name: str, *, floats: bool) -> CallClass | None:
    """The class of a torch function by its name; None when it only asks about a tensor.

    `floats` says whether any floating tensor went in or came out: pure integer arithmetic is `INDEX`.
    """
    known = _CLASSES.get(name, CallClass.COMPUTE)
    return CallClass.INDEX if known is CallClass.COMPUTE and not floats else known
