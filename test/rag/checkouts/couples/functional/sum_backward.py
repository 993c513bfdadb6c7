import torch
import triton
import triton.language as tl


@triton.jit
def copy_twice(dc, da, db, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(dc + at, mask=at < n)
    tl.store(da + at, v, mask=at < n)
    tl.store(db + at, v, mask=at < n)


def backward_add(dc):
    da, db = torch.empty_like(dc), torch.empty_like(dc)
    copy_twice[(triton.cdiv(dc.numel(), 256),)](dc, da, db, dc.numel(), BLOCK=256)
    return da, db
