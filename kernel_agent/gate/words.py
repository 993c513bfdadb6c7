"""The words of a verdict: short, about the candidate's own lines, enough to repair from."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_agent.gate.answer import Failure
from kernel_agent.gate.rule import Comparison

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


def trace(source: str, failure: Failure) -> str:
    """The candidate's own frames, outermost first, and the whole message below them."""
    rows = [f"line {frame.line} in {frame.function}: {line_text(source, frame.line)}" for frame in failure.frames]
    message = failure.message.strip()
    if message and message != first_paragraph(message):
        rows.append(message[:3000])
    return "\n".join(rows)


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
    names = _unpacked(source)
    result = []
    for path in paths:
        match = re.fullmatch(r"saved\[([0-9]{1,4})\]", path)
        known = match is not None and int(match[1]) < len(names)
        result.append(f"{path} ({names[int(match[1])]})" if match is not None and known else path)
    return tuple(result)


def _unpacked(source: str) -> list[str]:
    """Names that `backward` unpacks its first parameter to; empty if it does it otherwise."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.name == "backward" and function.args.args:
            first = function.args.args[0].arg
            for node in ast.walk(function):
                if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == first):
                    continue
                target = node.targets[0]
                if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
                    return [e.id for e in target.elts if isinstance(e, ast.Name)]
    return []
