"""What each launch of a backward takes and what its compiled kernel uses, read where Triton launches it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field
from triton.runtime.jit import JITFunction

from kernel_agent.bench.clock import Clock, Pace
from kernel_agent.gate.answer import Said

REPEATS = 15
_PAIRS = 200
"""Launches of one call that can be timed."""


class KernelSeen(Said):
    """One launch, as a child saw it."""

    name: str = Field(max_length=500)
    microseconds: float
    registers: int | None = None
    spills: int | None = Field(default=None, description="bytes of local memory per thread")
    shared_bytes: int | None = None
    warps: int | None = None


@dataclass
class _Watch:
    """What is called around every launch."""

    before: Callable[[], None] = field(default=lambda: None)
    after: Callable[[str, Any], None] = field(default=lambda _name, _kernel: None)


@contextmanager
def watched(watch: _Watch) -> Iterator[None]:
    """Tell of every launch of the block."""
    real = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("warmup"):
            return real(self, *args, **kwargs)
        watch.before()
        kernel = real(self, *args, **kwargs)
        watch.after(getattr(self.fn, "__name__", "kernel"), kernel)
        return kernel

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real


def compiled_kernels(call: Callable[[], object]) -> list[tuple[str, Any]]:
    """Names and compiled kernels of the launches of a call, in order."""
    found: list[tuple[str, Any]] = []
    with watched(_Watch(after=lambda name, kernel: found.append((name, kernel)))):
        call()
    return found


def time_launches(clock: Clock, call: Callable[[], object], pace: Pace, repeats: int = REPEATS) -> list[KernelSeen]:
    """Median time of every launch of a call, with a cold cache before the first one.

    A call of more than `_PAIRS` launches is timed up to there.
    """
    kernels = compiled_kernels(call)[:_PAIRS]
    times: list[list[float]] = [[] for _ in kernels]
    for _ in range(repeats):
        bells = _Bells(clock, len(kernels))
        clock.flush(2 * pace.flushes)  # twice: recording takes the host time, too
        with watched(_Watch(bells.before, bells.after)):
            call()
        clock.synchronize()
        for place in range(min(bells.number, len(kernels))):
            times[place].append(clock.elapsed_us(place))
    return [_seen(name, kernel, sorted(took)) for (name, kernel), took in zip(kernels, times, strict=True) if took]


class _Bells:
    """Records an event before and after each of the first launches."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock = clock
        self._most = most
        self.number = 0

    def before(self) -> None:
        """A launch begins."""
        if self.number < self._most:
            self._clock.record(2 * self.number)

    def after(self, _name: str, _kernel: Any) -> None:
        """A launch is enqueued."""
        if self.number < self._most:
            self._clock.record(2 * self.number + 1)
        self.number += 1


def _seen(name: str, kernel: Any, took: list[float]) -> KernelSeen:
    spilled = getattr(kernel, "n_spills", None)
    metadata = getattr(kernel, "metadata", None)
    return KernelSeen(
        name=name,
        microseconds=took[len(took) // 2],
        registers=getattr(kernel, "n_regs", None),
        spills=None if spilled is None else 4 * spilled,
        shared_bytes=getattr(metadata, "shared", None),
        warps=getattr(metadata, "num_warps", None),
    )


_DOT = re.compile(r"tt\.dot\s.*?:\s*tensor<[0-9x]*x(\w+)[^>]*>\s*\*\s*tensor<[0-9x]*x(\w+)[^>]*>")
_PRECISION = re.compile(r"inputPrecision\s*=\s*(\w+)")
_BITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8E4M3FN": 4, "f8E5M2": 3, "f8E4M3FNUZ": 4, "f8E5M2FNUZ": 3}
TF32_BITS = 10
"""Tensor cores drop what follows the eleventh bit: in the mean as far off as rounding to ten."""
_SCALED_BITS = 3


def dot_bits(ttir: str) -> int | None:
    """Significant bits of the operands of the coarsest product in the text of a kernel's TTIR; None without products.

    Operands of float32 have 24 with `ieee` and with the multi-pass modes, `TF32_BITS` with `tf32`.
    """
    found: list[int] = []
    for line in ttir.splitlines():
        if "tt.dot_scaled" in line:
            found.append(_SCALED_BITS)
            continue
        match = _DOT.search(line)
        if match is None:
            continue
        bits = max(_BITS.get(match[1], 0), _BITS.get(match[2], 0))  # the narrower one is widened
        if bits == 0:
            continue  # whole numbers do not round
        precision = _PRECISION.search(line)
        if bits == _BITS["f32"] and precision is not None and precision[1] == "tf32":
            bits = TF32_BITS
        found.append(bits)
    return min(found, default=None)


def coarsest_dot(call: Callable[[], object]) -> int | None:
    """`dot_bits` over all kernels that a call launches."""
    texts = [kernel.asm["ttir"] for _, kernel in compiled_kernels(call) if "ttir" in getattr(kernel, "asm", {})]
    return min((bits for bits in map(dot_bits, texts) if bits is not None), default=None)
