"""Result dtypes under `torch.autocast("cuda")`: images live on the CPU, where that context changes nothing.

The lists are those of https://pytorch.org/docs/stable/amp.html ("CUDA Ops that can autocast").
"""

from __future__ import annotations

import torch

_LOWER_NAMES = (
    "__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm mv einsum scaled_dot_product_attention"
)
_FLOAT32_NAMES = (
    "__pow__ __rpow__ acos asin cosh cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum dist "
    "erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log2 log_softmax log1p "
    "margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist "
    "poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum "
    "renorm tan triplet_margin_loss"
)
_LOWER, _FLOAT32 = frozenset(_LOWER_NAMES.split()), frozenset(_FLOAT32_NAMES.split())


def autocast(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a torch function's result of `dtype` has under the current thread's autocast."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not torch.is_autocast_enabled("cuda"):
        return dtype
    if name in _LOWER:
        return torch.get_autocast_dtype("cuda")
    return torch.float32 if name in _FLOAT32 else dtype
