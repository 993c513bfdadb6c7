"""Self-distillation loss with a centred, sharpened teacher: the student alone is trained, from two saved normalisers.

    loss[m] = -sum over k of p[k] log q[k],    p = softmax((teacher - centre) / t),    q = softmax(student / s)

Teacher and centre are constants, so that ds = g (q - p) / s. With both log-sum-exps saved every element of it stands
alone: any number of programs may share a row of tens of thousands of prototypes.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ema_teacher_center",
    "family": "mixing_misc",
    "op": "dino_loss",
    "schema": 1,
    "techniques": ("partial-gradient", "saved-lse", "elementwise", "recompute", "strided-cotangent"),
    "saves": ("lse: fp32 (2, M)",),
    "grads": ("student",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _distill_fwd(Student, Teacher, Centre, Loss, LSE, M, K, cool_s, cool_t, BLOCK_K: tl.constexpr):
    # One read of both rows. Per lane: running maximum and sum for each side, and the sum of p z under p's maximum.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    s_top = tl.full((BLOCK_K,), -1.0e30, tl.float32)
    t_top = tl.full((BLOCK_K,), -1.0e30, tl.float32)
    s_sum = tl.zeros((BLOCK_K,), tl.float32)
    t_sum = tl.zeros((BLOCK_K,), tl.float32)
    cross = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + lane
        inside = k < K
        z = tl.load(Student + row * K + k, mask=inside, other=0.0).to(tl.float32) * cool_s
        teacher = tl.load(Teacher + row * K + k, mask=inside, other=0.0).to(tl.float32)
        centre = tl.load(Centre + k, mask=inside, other=0.0).to(tl.float32)
        w = tl.where(inside, (teacher - centre) * cool_t, float("-inf"))
        new_top = tl.maximum(s_top, tl.where(inside, z, -1.0e30))
        s_sum = s_sum * tl.exp(s_top - new_top) + tl.where(inside, tl.exp(z - new_top), 0.0)
        s_top = new_top
        new_top = tl.maximum(t_top, w)
        shrink = tl.exp(t_top - new_top)
        weight = tl.exp(w - new_top)
        t_sum = t_sum * shrink + weight
        cross = cross * shrink + weight * z
        t_top = new_top
    s_high = tl.max(s_top, 0)
    s_lse = s_high + tl.log(tl.sum(s_sum * tl.exp(s_top - s_high), 0))
    t_high = tl.max(t_top, 0)
    scale = tl.exp(t_top - t_high)
    t_total = tl.sum(t_sum * scale, 0)
    # -sum p log q = lse - <p, z>
    tl.store(Loss + row, s_lse - tl.sum(cross * scale, 0) / t_total)
    tl.store(LSE + row, s_lse)
    tl.store(LSE + M + row, t_high + tl.log(t_total))


def forward(student, teacher, centre, student_temperature=0.1, teacher_temperature=0.04):
    """Student and teacher logits (M, K), centre (K); the result (M) is in fp32."""
    student, teacher, centre = student.contiguous(), teacher.contiguous(), centre.contiguous()
    M, K = student.shape
    loss = torch.empty(M, device=student.device, dtype=torch.float32)
    lse = torch.empty(2, M, device=student.device, dtype=torch.float32)
    # Five running vectors for each lane: narrow tiles keep them in registers.
    BLOCK_K = min(1024, triton.next_power_of_2(K))
    _distill_fwd[(M,)](
        student, teacher, centre, loss, lse, M, K, 1.0 / student_temperature, 1.0 / teacher_temperature,
        BLOCK_K=BLOCK_K, num_warps=max(1, min(4, BLOCK_K // 256)),
    )  # fmt: skip
    return loss, (student, teacher, centre, lse, student_temperature, teacher_temperature)


# --- backward ---
@triton.jit
def _distill_bwd(G, Student, Teacher, Centre, LSE, DStudent, M, K, cool_s, cool_t, g_m, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    g = tl.load(G + row * g_m) * cool_s
    s_lse = tl.load(LSE + row)
    t_lse = tl.load(LSE + M + row)
    student = tl.load(Student + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    teacher = tl.load(Teacher + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    centre = tl.load(Centre + k, mask=k < K, other=0.0).to(tl.float32)
    q = tl.exp(student * cool_s - s_lse)
    p = tl.exp((teacher - centre) * cool_t - t_lse)
    tl.store(DStudent + row * K + k, g * (q - p), mask=k < K)


def backward(saved, grad_loss, needs=None):
    student, teacher, centre, lse, student_temperature, teacher_temperature = saved
    M, K = student.shape
    dstudent = torch.empty_like(student)
    BLOCK_K = min(2048, triton.next_power_of_2(K))
    _distill_bwd[(M, triton.cdiv(K, BLOCK_K))](
        grad_loss, student, teacher, centre, lse, dstudent, M, K, 1.0 / student_temperature, 1.0 / teacher_temperature,
        grad_loss.stride(0), BLOCK_K=BLOCK_K, num_warps=max(1, min(8, BLOCK_K // 256)),
    )  # fmt: skip
    return dstudent


# --- check ---
SWEEP = ({"M": 6, "K": 64}, {"M": 5, "K": 2603}, {"M": 7, "K": 40, "dtype": "bfloat16"})
BENCH = ({"M": 1024, "K": 65536, "dtype": "bfloat16"},)


def make_args(M, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (0.3 * torch.randn(M, K, generator=g), 0.1 * torch.randn(M, K, generator=g), torch.randn(K, generator=g))
    student, teacher, centre = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return student, teacher, 0.1 * centre


def reference(student, teacher, centre, student_temperature=0.1, teacher_temperature=0.04):
    p = ((teacher.float() - centre.float()) / teacher_temperature).softmax(-1)
    return -(p * (student.float() / student_temperature).log_softmax(-1)).sum(-1)
