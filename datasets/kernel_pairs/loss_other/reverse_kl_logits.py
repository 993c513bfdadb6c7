"""Reverse KL(student || teacher) of two logit tables: dstudent is centred by the loss itself, a saved row sum.

With y = softmax(student), q = softmax(teacher), r = log y - log q:    L = sum y r,    dstudent = y (r - L) g,
dteacher = (q - y) g. The forward sees each row once: with the student's running sum it carries the sum weighted by
(student - teacher), from which L follows without knowing the normalisers beforehand.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "reverse_kl_logits",
    "family": "loss_other",
    "op": "reverse_kl",
    "schema": 1,
    "techniques": ("saved-lse", "saved-output", "recompute", "one-launch"),
    "saves": ("lse: fp32 (2, M)", "loss: fp32 (M,)"),
    "grads": ("student", "teacher"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _reverse_kl_fwd(Student, Teacher, Loss, Lse, M, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top_s = -float("inf")
    top_t = -float("inf")
    sum_s = 0.0
    sum_t = 0.0
    gap = 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        live = c < V
        s = tl.load(Student + row * V + c, mask=live, other=-float("inf")).to(tl.float32)
        t = tl.load(Teacher + row * V + c, mask=live, other=-float("inf")).to(tl.float32)
        new_s = tl.maximum(top_s, tl.max(s, 0))
        new_t = tl.maximum(top_t, tl.max(t, 0))
        e = tl.exp(s - new_s)
        shrink = tl.exp(top_s - new_s)
        sum_s = sum_s * shrink + tl.sum(e, 0)
        gap = gap * shrink + tl.sum(e * tl.where(live, s - t, 0.0), 0)
        sum_t = sum_t * tl.exp(top_t - new_t) + tl.sum(tl.exp(t - new_t), 0)
        top_s = new_s
        top_t = new_t
    lse_s = top_s + tl.log(sum_s)
    lse_t = top_t + tl.log(sum_t)
    tl.store(Lse + row, lse_s)
    tl.store(Lse + M + row, lse_t)
    tl.store(Loss + row, gap / sum_s - lse_s + lse_t)


def forward(student, teacher):
    student, teacher = student.contiguous(), teacher.contiguous()
    M, V = student.shape
    loss = torch.empty(M, device=student.device, dtype=torch.float32)
    lse = torch.empty(2, M, device=student.device, dtype=torch.float32)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _reverse_kl_fwd[(M,)](student, teacher, loss, lse, M, V, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)))
    return loss, (student, teacher, lse, loss)


# --- backward ---
@triton.jit
def _reverse_kl_bwd(
    DLoss, Student, Teacher, Lse, Loss, DStudent, DTeacher, M, V, stride_g,
    NEED_S: tl.constexpr, NEED_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < V
    g = tl.load(DLoss + row * stride_g)
    log_y = tl.load(Student + row * V + c, mask=live, other=0.0).to(tl.float32) - tl.load(Lse + row)
    log_q = tl.load(Teacher + row * V + c, mask=live, other=0.0).to(tl.float32) - tl.load(Lse + M + row)
    y = tl.exp(log_y)
    if NEED_S:
        centred = log_y - log_q - tl.load(Loss + row)
        tl.store(DStudent + row * V + c, g * y * centred, mask=live)
    if NEED_T:
        tl.store(DTeacher + row * V + c, g * (tl.exp(log_q) - y), mask=live)


def backward(saved, grad_loss, needs=(True, True)):
    student, teacher, lse, loss = saved
    M, V = student.shape
    ds = torch.empty_like(student) if needs[0] else None
    dt = torch.empty_like(teacher) if needs[1] else None
    BLOCK = max(64, min(2048, triton.next_power_of_2(V)))
    _reverse_kl_bwd[(M, triton.cdiv(V, BLOCK))](
        grad_loss, student, teacher, lse, loss, ds, dt, M, V, grad_loss.stride(0),
        NEED_S=needs[0], NEED_T=needs[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return ds, dt


# --- check ---
SWEEP = (
    {"M": 6, "V": 128},
    {"M": 9, "V": 217},
    {"M": 4, "V": 96, "dtype": "bfloat16"},
    {"M": 5, "V": 70, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 32000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g) for _ in range(2))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in logits)


def reference(student, teacher):
    log_y = torch.log_softmax(student.float(), -1)
    log_q = torch.log_softmax(teacher.float(), -1)
    return (log_y.exp() * (log_y - log_q)).sum(-1)
