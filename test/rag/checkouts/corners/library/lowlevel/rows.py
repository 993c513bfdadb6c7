"""Neither folder of this file is a package."""
import triton
import triton.language as tl

from library.tuning import configs, drop_large


@triton.autotune(configs=configs(), key=["n"], prune_configs_by={"early_config_prune": drop_large})
@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
