"""Tile functions of every family, and torch functions of the same mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """A tile function and what it computes."""

    function: Any
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: str
    inputs: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.function.fn.__name__)


@triton.jit
def rmsnorm(x, w, eps):
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)
    y = x * rstd[:, None] * w[None, :]
    return y, rstd


def torch_rmsnorm(x, w, eps):
    rstd = torch.rsqrt((x * x).mean(1) + eps)
    return x * rstd[:, None] * w, rstd


@triton.jit
def swiglu(gate, up):
    wide = gate.to(tl.float32)
    return wide * tl.sigmoid(wide) * up


@triton.jit
def softmax(x):
    return tl.softmax(x, dim=1, keep_dims=True)


@triton.jit
def extremes(x):
    return tl.max(x, axis=1), tl.min(x, axis=0)


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def product(x):
    return tl.reduce(x, 1, multiply)


@triton.jit
def running_sum(x):
    return tl.cumsum(x, axis=1, reverse=True)


@triton.jit
def step(a_left, h_left, a_right, h_right):
    return a_left * a_right, a_right * h_left + h_right


@triton.jit
def recurrence(a, x):
    _, h = tl.associative_scan((a, x), 1, step)
    return h


def torch_recurrence(a, x):
    h = [torch.zeros_like(x[:, 0])]
    for column in range(x.shape[1]):
        h.append(a[:, column] * h[-1] + x[:, column])
    return torch.stack(h[1:], 1)


@triton.jit
def attend(q, k, v):
    scores = tl.dot(q, tl.trans(k)) * 0.125
    p = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    return tl.dot(p.to(v.dtype), v)


def torch_attend(q, k, v):
    return torch.softmax(q @ k.T * 0.125 * 0.6931471805599453, 1) @ v


@triton.jit
def halves(x, y):
    a, b = tl.split(tl.reshape(tl.join(x, y), (x.shape[0], x.shape[1], 2)))
    return tl.trans(a * b), a + 2 * b


@triton.jit
def gelu(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def summed(x):
    total = tl.zeros(x.shape, tl.float32)
    for k in range(3):
        total += tl.sin(x.to(tl.float32) * k)
    return total


@triton.jit
def root(x):
    y = x * 0 + 1.0
    for _ in range(4):
        y = 0.5 * (y + x / y)
    return y


def torch_root(x):
    y = torch.ones_like(x)
    for _ in range(4):
        y = 0.5 * (y + x / y)
    return y


@triton.jit
def unrolled(x):
    y = x
    for _ in tl.static_range(3):
        y = multiply(y, tl.sin(x))
    return y


@triton.jit
def powers(x, n):
    y = x
    k = 0
    while k < n:
        y = y * x + k
        k += 1
    return y


def torch_powers(x, n):
    y = x
    for k in range(int(n)):
        y = y * x + k
    return y


@triton.jit
def branches(x, n, CAUSAL: tl.constexpr):
    if CAUSAL:
        rows = tl.arange(0, x.shape[0])
        x = tl.where(rows[:, None] >= rows[None, :], x, 0.0)
    if n > 3:
        y = x * x
    else:
        y = x * 3
    return y


def torch_branches(x, n, CAUSAL):
    x = x.tril() if CAUSAL else x
    return x * x if n > 3 else x * 3


@triton.jit
def picked(x, places, keep, scale):
    found = tl.gather(x, places, 1)
    return tl.sum(tl.where(keep, found * scale, 0.0))


def torch_picked(x, places, keep, scale):
    return torch.where(keep, torch.gather(x, 1, places.long()) * scale, 0.0).sum()


@triton.jit
def nested(x, n):
    y = x
    for i in range(2):
        z = y
        for k in range(n):
            if k % 2 == 0:
                z = z * tl.sin(x + k)
            else:
                z = z * y
        y = y + z * i
    return y


def torch_nested(x, n):
    y = x
    for i in range(2):
        z = y
        for k in range(int(n)):
            z = z * (torch.sin(x + k) if k % 2 == 0 else y)
        y = y + z * i
    return y


@triton.jit
def converged(x):
    y = x * 0 + 1.0
    error = 1.0
    while error > 1e-3:
        y = 0.5 * (y + x / y)
        error = tl.max(tl.abs(y * y - x))
    return y


def torch_converged(x):
    y = torch.ones_like(x)
    while (y * y - x).abs().max() > 1e-3:
        y = 0.5 * (y + x / y)
    return y


@triton.jit
def outer(row, column, cube):
    return row * column, tl.permute(cube, (2, 0, 1)) * 2


@triton.jit
def largest(x):
    return tl.max(x, 1, return_indices=True)


POSITIVE: dict[str, Callable[[Tensor], Tensor]] = {"x": lambda x: x.abs() + 0.5}
PAIRS = (
    Pair(swiglu, lambda gate, up: gate * torch.sigmoid(gate) * up, "gate=[8, 16] bf16, up=[8, 16] bf16"),
    Pair(softmax, lambda x: torch.softmax(x, 1), "x=[8, 16]"),
    Pair(extremes, lambda x: (x.amax(1), x.amin(0)), "x=[8, 16]"),
    Pair(product, lambda x: x.prod(1), "x=[4, 8]"),
    Pair(running_sum, lambda x: x.flip(1).cumsum(1).flip(1), "x=[4, 8]"),
    Pair(recurrence, torch_recurrence, "a=[4, 8], x=[4, 8]"),
    Pair(attend, torch_attend, "q=[16, 32] fp16, k=[64, 32] fp16, v=[64, 32] fp16"),
    Pair(halves, lambda x, y: ((x * y).T, x + 2 * y), "x=[4, 8], y=[4, 8]"),
    Pair(gelu, torch.nn.functional.gelu, "x=[16]"),
    Pair(summed, lambda x: sum(torch.sin(x * k) for k in range(3)), "x=[16] fp16"),
    Pair(root, torch_root, "x=[16]", POSITIVE),
    Pair(unrolled, lambda x: x * torch.sin(x) ** 3, "x=[16]"),
    Pair(powers, torch_powers, "x=[16], n=i32"),
    Pair(nested, torch_nested, "x=[16], n=i32"),
    Pair(converged, torch_converged, "x=[16]", POSITIVE),
    Pair(outer, lambda r, c, x: (r * c, x.permute(2, 0, 1) * 2), "row=[1, 16], column=[8, 1], cube=[2, 4, 8] fp64"),
    Pair(largest, lambda x: (x.amax(1), x.argmax(1)), "x=[4, 8]"),
    Pair(branches, torch_branches, "x=[16, 16], n=i32, CAUSAL=True"),
    Pair(picked, torch_picked, "x=[4, 8], places=[4, 8] i32, keep=[4, 8] i1, scale=fp32"),
)
