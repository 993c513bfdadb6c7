"""The words of a verdict: short, about the candidate's own lines, enough to repair from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_agent.gate.answer import Failure, FailureKind
from kernel_agent.gate.naming import unpacked_names
from kernel_agent.gate.rule import Comparison
from kernel_agent.pairs.blame import essence

_FACTORS = {-1.0: "the sign is wrong", 2.0: "it is twice the truth", 0.5: "it is half the truth"}


def listed(names: Sequence[str]) -> str:
    """`a`, `b` and `c`."""
    quoted_names = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted_names[:-1]), quoted_names[-1]]) if len(names) > 1 else "".join(quoted_names)


def quoted(source: str, line: int | None) -> str:
    """` (line 41: dx = ...)`, or nothing where the line is unknown."""
    text = line_text(source, line)
    return f" (line {line}: `{text}`)" if text else ""


def line_text(source: str, line: int | None) -> str:
    """A line of the source without its indentation; empty when there is no such line."""
    lines = source.splitlines()
    return lines[line - 1].strip()[:160] if line and 1 <= line <= len(lines) else ""


def first_paragraph(message: str) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:500] if lines else "no message"


def failure_message(failure: Failure) -> str:
    """The first line of what an exception says; Triton's complaint itself for a kernel that does not compile."""
    if failure.kind is FailureKind.COMPILE:
        return first_paragraph(essence(failure.message))
    prefix = f"{failure.type}: " if failure.type and failure.kind is FailureKind.PYTHON else ""
    return prefix + first_paragraph(failure.message)


def trace(source: str, failure: Failure) -> str:
    """The candidate's own frames, outermost first, and below them the line with a caret, or the whole message."""
    rows = [f"line {frame.line} in {frame.function}: {line_text(source, frame.line)}" for frame in failure.frames]
    if failure.kind is FailureKind.COMPILE and failure.column is not None:
        return "\n".join([*rows, caret(source, failure.line, failure.column)])
    message = failure.message.strip()
    if message and message != first_paragraph(message):
        rows.append(message[:3000])
    return "\n".join(rows)


def caret(source: str, line: int | None, column: int) -> str:
    """A line below the two before it, numbered, and a caret under the place that is meant."""
    lines = source.splitlines()
    if line is None or not 1 <= line <= len(lines):
        return ""
    width = len(str(line))
    shown = [f"{number:>{width}} | {lines[number - 1]}" for number in range(max(1, line - 2), line + 1)]
    return "\n".join([*shown, " " * (width + 3 + column) + "^"])


def place(seen: Comparison) -> str:
    """`in tile (0, 1), elements [0:16, 64:128]`."""
    spans = ", ".join(
        str(i) if e == 1 else f"{i * e}:{(i + 1) * e}" for i, e in zip(seen.tile, seen.extent, strict=True)
    )
    return f"in tile {seen.tile}, elements [{spans}]" if seen.tile else "in its only element"


def difference(seen: Comparison) -> str:
    """How two tensors differ, and what the difference looks like."""
    if math.isinf(seen.ratio):
        what = (
            f"{seen.strange} elements are infinite or NaN on one side only"
            if seen.strange
            else "it must be exactly zero"
        )
        return f"{what}, first {place(seen)}" if seen.strange else f"{what} {place(seen)}"
    many = f"{seen.wrong_tiles} of {seen.tiles} tiles are wrong, the worst " if seen.tiles > 1 else "wrong "
    much = f"by {seen.ratio:.3g} times the allowed error; relative error of the whole {seen.relative_error:.3g}"
    text = f"{many}{place(seen)}, {much}"
    hint = _factor_hint(seen)
    return f"{text}; {hint}" if hint else text


def _factor_hint(seen: Comparison) -> str:
    """Names a factor that explains the whole error."""
    if math.isnan(seen.factor) or not seen.is_multiple:
        return ""
    if abs(seen.factor) < 1e-9:
        return "it is zero where the truth is not"
    for factor, text in _FACTORS.items():
        if math.isclose(seen.factor, factor, rel_tol=1e-6):
            return text
    return f"it is {seen.factor:.6g} times the truth everywhere"


def strange(given: Tensor) -> str:
    """`12 NaN`, `3 infinite values`."""
    nans, infinite = int(given.isnan().sum()), int(given.isinf().sum())
    parts = [f"{nans} NaN"] if nans else []
    parts += [f"{infinite} infinite values"] if infinite else []
    return " and ".join(parts)


def worst_elements(name: str, given: Tensor, expected: Tensor, seen: Comparison, count: int = 3) -> str:
    """The elements of the worst tile that are farthest off, in units of the truth's RMS: values are never told."""
    window = tuple(
        slice(i * e, min((i + 1) * e, n)) for i, e, n in zip(seen.tile, seen.extent, expected.shape, strict=True)
    )
    error = (given[window] - expected[window]).abs().flatten()
    rms = float(expected[window].square().mean().sqrt()) or 1.0
    rows = []
    for flat in error.nan_to_num(0.0).topk(min(count, error.numel())).indices:
        inside = torch.unravel_index(flat, expected[window].shape)
        index = tuple(int(i) + w.start for i, w in zip(inside, window, strict=True))
        rows.append(f"{name}{list(index)}: off by {float(error[flat]) / rms:.3g} x the RMS of the tile's truth")
    return "\n".join(rows)


def in_backward(paths: Sequence[str], source: str) -> tuple[str, ...]:
    """`saved[0]` with the name that backward unpacks it to, where it does so in one assignment."""
    names = unpacked_names(source)
    result = []
    for path in paths:
        match = re.fullmatch(r"saved\[([0-9]{1,4})\]", path)
        known = match is not None and int(match[1]) < len(names)
        result.append(f"{path} ({names[int(match[1])]})" if match is not None and known else path)
    return tuple(result)


def returned_values(answer_form: Sequence[tuple[str, tuple[int, ...] | None]], wanted: Sequence[str]) -> str:
    """What a backward returned, position by position, beside what is wanted there."""
    rows = []
    for position in range(max(len(answer_form), len(wanted))):
        name = f"the gradient of `{wanted[position]}`" if position < len(wanted) else "nothing"
        if position >= len(answer_form):
            rows.append(f"returned[{position}]: missing; wanted here: {name}")
            continue
        what, shape = answer_form[position]
        form = what if shape is None else f"{what} {shape}"
        rows.append(f"returned[{position}]: {form}; wanted here: {name}")
    return "\n".join(rows)


def shape_hint(given: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """How a shape could have come about."""
    if sorted(given) == sorted(expected):
        return "; the dimensions are in another order"
    if [n for n in given if n != 1] == [n for n in expected if n != 1]:
        return "; they differ in dimensions of size 1 alone"
    if len(given) > len(expected) and given[len(given) - len(expected) :] == expected:
        return f"; the first {len(given) - len(expected)} dimensions are still to be summed over"
    if math.prod(given) == math.prod(expected):
        return "; it has as many elements: a view is missing"
    return ""
