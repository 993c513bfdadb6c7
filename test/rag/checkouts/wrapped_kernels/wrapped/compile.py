import functools

import triton

fast_jit = functools.partial(triton.jit, do_not_specialize=["n"])
kernel_of = triton.jit


def tuned(function):
    """A kernel with a choice of tiles."""
    return triton.autotune(configs=CONFIGS, key=["n"])(triton.jit(function))


CONFIGS = [triton.Config({"BLOCK": 256}, num_warps=4)]
CONFIGS.append(triton.Config({"BLOCK": 1024}, num_warps=8))
