"""Times in tables and words, the same for model, trace and terminal. Whether they were measured or modelled is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kernel_agent.bench.records import KernelTime, Measurement, ShapeTime


def headline_time(measurement: Measurement) -> str:
    """`12.3 us per backward (measured, NVIDIA H100, geometric mean of 4 shapes)`."""
    count = len(measurement.shapes)
    over = f", geometric mean of {count} shapes" if count > 1 else ""
    return f"{microseconds(measurement.geomean_us)} per backward ({basis_words(measurement)}{over})"


def baseline_words(measurement: Measurement) -> tuple[str, ...]:
    """How the time compares, in geometric means; what is not known at every shape is left out."""
    shapes = measurement.shapes
    bound = ratio([(shape.bound_us, shape.median_us) for shape in shapes])
    eager = ratio([(shape.eager_us, shape.median_us) for shape in shapes])
    compiled = ratio([(shape.compiled_us, shape.median_us) for shape in shapes])
    return tuple(
        words
        for value, words in (
            (bound, f"{bound:.0%} of what the bound allows" if bound else ""),
            (eager, f"{eager:.2f}x the speed of eager autograd" if eager else ""),
            (compiled, f"{compiled:.2f}x the speed of torch.compile" if compiled else ""),
        )
        if value
    )


def ratio(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Geometric mean of the quotients; None when one is unknown."""
    logs = [math.log(value / own) for value, own in pairs if value]
    return math.exp(sum(logs) / len(logs)) if logs and len(logs) == len(pairs) else None


def basis_words(measurement: Measurement) -> str:
    """`measured, NVIDIA H100` or `modelled, not measured, H100 SXM`."""
    return f"{measurement.basis.value}, {measurement.device}"


def microseconds(value: float) -> str:
    """`12.3 us`, `1.25 ms`."""
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def shape_table(shapes: Sequence[ShapeTime]) -> str:
    """A Markdown table with one row per call; columns that nothing fills are left out."""
    columns: list[tuple[str, Callable[[ShapeTime], str]]] = [
        ("call", lambda shape: shape.label or "the one call"),
        ("time", lambda shape: microseconds(shape.median_us)),
        ("spread", lambda shape: f"{shape.spread:.0%}" if shape.spread else ""),
        ("bound", lambda shape: _time(shape.bound_us)),
        ("of the bound", lambda shape: f"{shape.bound_us / shape.median_us:.0%}" if shape.bound_us else ""),
        ("eager", lambda shape: _against(shape.eager_us, shape.median_us)),
        ("torch.compile", lambda shape: _against(shape.compiled_us, shape.median_us)),
    ]
    return _table([name for name, _ in columns], [[show(shape) for _, show in columns] for shape in shapes])


def kernel_table(kernels: Sequence[KernelTime]) -> str:
    """A Markdown table with one row per kernel; columns that nothing fills are left out."""
    columns: list[tuple[str, Callable[[KernelTime], str]]] = [
        ("kernel", lambda kernel: f"`{kernel.name}`"),
        ("time", lambda kernel: microseconds(kernel.microseconds)),
        ("bound by", lambda kernel: kernel.bound_by),
        ("its bound", lambda kernel: _time(kernel.bound_us)),
        ("of its bound", lambda kernel: f"{kernel.bound_us / kernel.microseconds:.0%}" if kernel.bound_us else ""),
        ("atomics", lambda kernel: f"{kernel.atomics:,}" if kernel.atomics else ""),
        ("registers", lambda kernel: "" if kernel.registers is None else str(kernel.registers)),
        ("spills", lambda kernel: f"{kernel.spills} B" if kernel.spills else ""),
        ("shared memory", lambda kernel: f"{kernel.shared_bytes:,} B" if kernel.shared_bytes else ""),
    ]
    return _table([name for name, _ in columns], [[show(kernel) for _, show in columns] for kernel in kernels])


def _time(value: float | None) -> str:
    return "" if value is None else microseconds(value)


def _against(value: float | None, own: float) -> str:
    return "" if value is None else f"{microseconds(value)} ({value / own:.2f}x)"


def _table(names: list[str], rows: list[list[str]]) -> str:
    filled = [place for place in range(len(names)) if any(row[place] for row in rows)]
    lines = [[names[place] for place in filled], ["---"] * len(filled)]
    lines += [[row[place] for place in filled] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
