import torch
import triton
import triton.language as tl


@triton.jit
def _kldiv_kernel_forward(
    y_ptr,
    y_stride,
    gt_ptr,
    gt_stride,
    loss_ptr,
    loss_stride,
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,
    log_target: tl.constexpr,
    reduction: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    y_ptr += pid * y_stride
    gt_ptr += pid * gt_stride
    loss_ptr += pid * loss_stride
    base = tl.arange(0, BLOCK_SIZE)
    total = 0.0
    for i in range(0, n_cols, BLOCK_SIZE):
        o = i + base
        m = o < n_cols
        y = tl.load(y_ptr + o, mask=m, other=0.0)
        t = tl.load(gt_ptr + o, mask=m, other=0.0)
        if not log_target:
            loss = t * (tl.log(tl.maximum(t, eps)) - y)
        else:
            loss = tl.exp(t) * (t - y)
        if reduction == 0:
            tl.store(loss_ptr + o, loss, mask=m)
        else:
            total += tl.sum(loss, axis=0)
    if reduction != 0:
        tl.store(loss_ptr, total)


def kldiv_forward_triton(y_pred, y_true, log_target, reduction, eps):
    BT, V = y_pred.shape
    out = torch.zeros((BT,), device=y_pred.device, dtype=torch.float32)
    _kldiv_kernel_forward[(BT,)](
        y_pred, V, y_true, V, out, 1, V, eps, min(32768, triton.next_power_of_2(V)), log_target, reduction
    )
    return out.sum() / BT
