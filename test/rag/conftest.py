"""Seven small pairs of six families, indexed once per test process with and without vectors."""

from pathlib import Path

import pytest

from rag import Index, build_index
from rag.embed import missing_packages

PAIRS = Path(__file__).parent / "pairs"


@pytest.fixture(scope="session")
def embedding_model() -> None:
    """Skips where the model is not installed: words alone are searched there, which other tests cover."""
    if missing := missing_packages():
        pytest.skip(f"needs the embedding model: {', '.join(missing)} not installed")


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, embedding_model: None) -> Index:
    return build_index(PAIRS, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def lexical_index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build_index(PAIRS, tmp_path_factory.mktemp("lexical"), dense=False)


@pytest.fixture
def pair_source():
    """Text of one of the small pairs by its slug."""
    return lambda slug: next(PAIRS.glob(f"*/{slug}.py")).read_text()


LAYERNORM = '''
"""LayerNorm over the last dimension."""
import torch, triton
import triton.language as tl
from kernel_agent.autodiff import autodiff


@triton.jit
def layer_norm_fwd_kernel(x_ptr, y_ptr, mean_ptr, rstd_ptr, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(cols < n_cols, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / n_cols + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * n_cols + cols, centred * rstd, mask=cols < n_cols)


@autodiff(inputs_require_grad=(0,))
def layer_norm(x, eps=1e-5):
    y = torch.empty_like(x)
    mean = torch.empty(x.shape[0], device=x.device)
    rstd = torch.empty_like(mean)
    layer_norm_fwd_kernel[(x.shape[0],)](x, y, mean, rstd, x.shape[1], eps, BLOCK_SIZE=1024)
    return y, mean, rstd


SWEEP = [{"attention_heads": 8, "cross_entropy_vocab": 10}]


def make_args(attention_heads, cross_entropy_vocab):
    return (torch.randn(attention_heads, cross_entropy_vocab),)
'''


@pytest.fixture
def layernorm() -> str:
    """A user's file whose check speaks of other operators than its forward does."""
    return LAYERNORM
