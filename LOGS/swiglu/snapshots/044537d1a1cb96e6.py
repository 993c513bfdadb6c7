# --- backward ---
@triton.jit
def _swiglu_bwd_kernel(
    DOUT, GATE, UP, DGATE, DUP, n_cols, n_blocks, stride_row, stride_col,
    NEEDS_GATE: tl.constexpr, NEEDS_UP: tl.constexpr, BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // n_blocks
    cols = (pid - row * n_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    at = row * n_cols + cols
    dout = tl.load(DOUT + row * stride_row + cols * stride_col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(GATE + at, mask=mask, other=0.0).to(tl.float32)
    sig = tl.sigmoid(gate)
    if NEEDS_GATE:
        up = tl.load(UP + at, mask=mask, other=0.0).to(tl.float32)
        slope = sig * (1.0 + gate * (1.0 - sig))
        tl.store(DGATE + at, dout * (up * slope), mask=mask)
    if NEEDS_UP:
        tl.store(DUP + at, dout * (gate * sig), mask=mask)


def backward(saved, grad_out, needs=None):
    gate, up, out = saved
    needs = needs or (True,) * 2
    if not (needs[0] or needs[1]):
        return None, None
    gate, up = gate.contiguous(), up.contiguous()
    dgate = torch.empty_like(gate) if needs[0] else None
    dup = torch.empty_like(up) if needs[1] else None
    n_elements = gate.numel()
    if grad_out.dim() != 2:
        grad_out = grad_out.contiguous()
    if grad_out.is_contiguous():
        n_rows, n_cols, stride_row, stride_col = 1, n_elements, 0, 1
    else:
        n_rows, n_cols = gate.shape
        stride_row, stride_col = grad_out.stride(0), grad_out.stride(1)
    BLOCK = 1024
    n_blocks = triton.cdiv(n_cols, BLOCK)
    _swiglu_bwd_kernel[(n_rows * n_blocks,)](
        grad_out, gate, up, dgate if needs[0] else gate, dup if needs[1] else up,
        n_cols, n_blocks, stride_row, stride_col,
        NEEDS_GATE=bool(needs[0]), NEEDS_UP=bool(needs[1]), BLOCK=BLOCK, num_warps=4,
    )
    return dgate, dup
