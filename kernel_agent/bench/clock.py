"""`Clock`: times calls on the GPU by events, with cold caches, while the host runs ahead.

It is made before a candidate is imported and holds the primitives it works with, so that what a candidate does to
`torch.cuda` afterwards changes no measurement. Numbers leave the child raw; the parent makes statistics of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3
LEAST_REPEATS, MOST_REPEATS = 7, 400
_MOST_FLUSHES = 64
_LOOKS = 7


@dataclass(frozen=True)
class Pace:
    """How a call is repeated."""

    repeats: int
    flushes: int
    """Clears of the cache before each repetition: as many as the host needs to enqueue one call meanwhile."""
    host_us: float
    """What the host needs to enqueue a call."""


class Clock:
    """Microseconds of calls on the current stream of the current device."""

    def __init__(self, flush_bytes: int) -> None:
        torch.cuda.init()
        base: Any = getattr(torch._C, "_CudaEventBase", torch.cuda.Event)
        self._record, self._elapsed = base.record, base.elapsed_time
        self._synchronize: Callable[[], None] = torch._C._cuda_synchronize
        self._now = time.perf_counter
        self._stream = torch.cuda.current_stream()
        self._flush_buffer = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")
        self._flush = self._flush_buffer.zero_
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * MOST_REPEATS + 2)]
        for event in self._events:  # events come into being when they are first recorded
            self._record(event, self._stream)
        self._synchronize()
        self.flush_us = self._flush_time()
        self.latency_us = sorted(self._behind(lambda: None) for _ in range(_LOOKS))[_LOOKS // 2]

    def now(self) -> float:
        """Seconds of the host's clock."""
        return self._now()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._synchronize()

    def flush(self, times: int = 1) -> None:
        """Write over the cache."""
        for _ in range(times):
            self._flush()

    def between(self, call: Callable[[], object], first: Any, last: Any) -> None:
        """Enqueue a call between two events."""
        self._record(first, self._stream)
        call()
        self._record(last, self._stream)

    def record(self, number: int) -> None:
        """Enqueue one of the clock's events."""
        self._record(self._events[number], self._stream)

    def pair(self, number: int) -> tuple[Any, Any]:
        """Two events."""
        return self._events[2 * number], self._events[2 * number + 1]

    def elapsed_us(self, number: int) -> float:
        """Between the two events of a pair, once the device has passed them."""
        first, last = self.pair(number)
        return float(self._elapsed(first, last)) * 1e3

    def _flush_time(self) -> float:
        self.flush(3)
        self._synchronize()
        first, last = self._events[:2]
        self.between(lambda: self.flush(10), first, last)
        self._synchronize()
        return max(1.0, float(self._elapsed(first, last)) * 1e2)

    def pace(self, call: Callable[[], object], budget_s: float) -> Pace:
        """Warm up, and find out how often a call can be repeated within a budget."""
        for _ in range(WARM_UPS):
            call()
        self._synchronize()
        hosts, whole = [], []
        for _ in range(_LOOKS):
            start = self._now()
            call()
            hosts.append(self._now() - start)
            self._synchronize()
            whole.append(self._now() - start)
        host_us = sorted(hosts)[_LOOKS // 2] * 1e6
        flushes = min(_MOST_FLUSHES, 1 + math.ceil(1.3 * host_us / self.flush_us))
        once = sorted(whole)[_LOOKS // 2] + flushes * self.flush_us * 1e-6
        return Pace(max(LEAST_REPEATS, min(MOST_REPEATS, int(budget_s / once))), flushes, host_us)

    def times(
        self,
        call: Callable[[], object],
        pace: Pace,
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[int], None] = lambda _: None,
        late: Collection[int] = (),
    ) -> list[float]:
        """Microseconds of every repetition, each with a cold cache; `before` and `after` are not timed.

        In `late` ones, `before` is enqueued after the cache is cleared, right ahead of the call, which a call that does
        not wait for its stream then overtakes. Its times are left out: the cache is not cold.
        """
        pairs = [self.pair(number) for number in range(pace.repeats)]
        for number, (first, last) in enumerate(pairs):
            if number not in late:
                before(number)
            self.flush(pace.flushes)
            if number in late:
                before(number)
            self.between(call, first, last)
            after(number)
        self._synchronize()
        return [self.elapsed_us(number) for number in range(pace.repeats) if number not in late]

    def hidden_us(self, call: Callable[[], object]) -> float:
        """Time for which the device is still busy when the call's stream is through: work on streams nobody waits for.

        The median of several calls, less what an idle device takes to tell.
        """
        looks = sorted(self._behind(call) for _ in range(_LOOKS))
        return max(0.0, looks[_LOOKS // 2] - self.latency_us)

    def _behind(self, call: Callable[[], object]) -> float:
        first, last = self.pair(MOST_REPEATS)
        self._synchronize()
        self.between(call, first, last)
        self._synchronize()
        self._record(first, self._stream)
        self._synchronize()
        return float(self._elapsed(last, first)) * 1e3


@dataclass(frozen=True)
class Probe:
    """Where one gradient is looked at."""

    places: Tensor
    """Flat positions, on the device."""
    reach: int
    """Elements that a gradient has at least: known on the host, so that looking waits for nothing."""

    @classmethod
    def at(cls, places: Tensor) -> Probe:
        """A probe of positions that are still on the CPU."""
        return cls(places.to("cuda"), 1 + int(places.max()) if places.numel() else 0)

    def look(self, gradient: Any) -> Tensor:
        """The elements, in float64; NaN for a gradient that is not there."""
        if isinstance(gradient, Tensor) and gradient.numel() >= self.reach:
            return gradient.detach().reshape(-1)[self.places].to(torch.float64)
        return torch.full(self.places.shape, math.nan, dtype=torch.float64, device=self.places.device)


def look(gradients: Sequence[Any], probes: Sequence[Probe | None]) -> Tensor:
    """What all probes see, in one tensor."""
    parts = [p.look(gradient) for gradient, p in zip(gradients, probes, strict=False) if p is not None]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
