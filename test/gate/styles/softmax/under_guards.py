"""Under guards of device, gradients and compiler, and ranges for a profiler; in place of a copy of the cotangent."""

import torch
import triton
import triton.language as tl


@triton.jit
def _in_place(DX, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = row * N + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < N
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(DX + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + at, (y * (g - tl.sum(y * g, 0))).to(DX.type.element_ty), mask=inside)


@torch.compiler.disable
@torch.inference_mode(False)
def _softmax_backward(y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.cuda.device_of(y), torch.cuda.nvtx.range("softmax backward"):
        stream = torch.cuda.current_stream()
        assert stream is not None
        dx = grad.detach().clone(memory_format=torch.contiguous_format)
        rows, columns = dx.view(-1, dx.shape[-1]).shape
        run = _in_place[(rows,)]
        run(dx, y.data, columns, BLOCK=triton.next_power_of_2(columns), num_warps=1, num_ctas=1, maxnreg=128)
        return dx


def backward(saved, grad_out, *, needs=None):
    (y,) = list(saved)
    if needs is not None and not any(needs):
        return None
    if y.data_ptr() % 16 or not y.is_cuda or y.device.type != "cuda" or y.get_device() != grad_out.get_device():
        y = y.clone()
    return _softmax_backward(y, grad_out)
