"""Hypotheses about factors: of one local derivative (missing, twice, replaced), or of a term, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.ir.edges import Key, Occurrence
from kernel_agent.oracle.adjoint import Trial
from kernel_agent.oracle.guesses import Guess
from kernel_agent.oracle.term_groups import Term
from kernel_agent.oracle.terms import Form, Place
from kernel_agent.oracle.value_names import Names

_CHANCE = 1e-12
"""Largest probability that the ratios of one term are all found among the values of a variable by chance."""
_NEAR = 1e-6
"""Relative distance at which a ratio counts as one of the values of a variable."""


@dataclass(frozen=True)
class Variable:
    """A named value of the forward."""

    place: tuple[int, int]
    """(kernel, operation) that computes it."""
    name: str
    line: int


def variables_of(trial: Trial, names: Sequence[Names]) -> list[Variable]:
    """Named values that carry gradients, each once."""
    found: dict[tuple[int, str, int], Variable] = {}
    for launch, op in trial.adjoint.edges.occurrences:
        value = names[launch].module.all_ops[op].results[0] if trial.adjoint.edges.occurrences[launch, op] else None
        name = "" if value is None else names[launch].variable(value)
        line = None if value is None else names[launch].line(value)
        if name and line is not None:
            found[launch, name, line] = Variable((launch, op), name, line)
    return list(found.values())


# --- local derivatives


def local_guesses(first: Trial, names: Sequence[Names], variables: Sequence[Variable]) -> Iterator[Guess]:
    """Every operation whose derivative has a factor: without it, with it twice, and with another value in its place."""
    gates = [key for key, op in first.adjoint.edges.met.items() if key.operand >= 0 and op.name in _FACTORS]
    for form, power in ((Form.DROPPED, 0), (Form.TWICE, 2)):
        for key in gates:
            yield _local(first, names, key, form, _with_power(power))
    for key in gates:
        for variable in variables:
            if variable.place[0] == key.launch and _fits(first, key, variable):
                yield _local(first, names, key, Form.REPLACED, _with_variable(first, variable), variable.name)


Value = Callable[[Trial, Occurrence, Tensor], Tensor]
"""(case, operation, factor) -> what stands in place of the factor."""


def _with_power(power: int) -> Value:
    return lambda _trial, _occurrence, factor: factor**power


def _with_variable(first: Trial, variable: Variable) -> Value:
    assert first.adjoint.edges.occurrences[variable.place]

    def value(trial: Trial, occurrence: Occurrence, _: Tensor) -> Tensor:
        other = trial.adjoint.edges.occurrences[variable.place][occurrence.number].result
        assert other is not None
        return other

    return value


def _local(first: Trial, names: Sequence[Names], key: Key, form: Form, value: Value, instead: str = "") -> Guess:
    def effect(trial: Trial) -> Mapping[str, Tensor]:
        def change(gradient: Tensor, occurrence: Occurrence, operand: int) -> Tensor | None:
            if occurrence.arriving is None:
                return gradient
            factor, rest = _FACTORS[occurrence.op.name](occurrence, operand)
            return _summed(occurrence.arriving * rest * value(trial, occurrence, factor), gradient.shape)

        return trial.beyond(trial.adjoint.gradients(trial.cotangents, {key: change}))

    op, named = first.adjoint.edges.met[key], names[key.launch]
    place = Place(line=named.line_of(op), variable=named.variable(op.operands[key.operand]))
    return Guess(form, effect, (place,), other=_factor_name(named, key, first), instead=instead)


def _factor_name(names: Names, key: Key, first: Trial) -> str:
    op = first.adjoint.edges.met[key]
    if op.name == "arith.mulf":
        return names.variable(op.operands[1 - key.operand])
    if op.name == "arith.divf":
        return f"1/{names.variable(op.operands[1])}" if names.variable(op.operands[1]) else ""
    return names.variable(op.results[0])


def _of_product(occurrence: Occurrence, operand: int) -> tuple[Tensor, Tensor]:
    other = occurrence.operands[1 - operand]
    return other, torch.ones_like(other)


def _of_quotient(occurrence: Occurrence, operand: int) -> tuple[Tensor, Tensor]:
    inverse = 1.0 / occurrence.operands[1]
    return inverse, torch.ones_like(inverse) if operand == 0 else -occurrence.operands[0] * inverse


def _of_exponential(scale: float) -> Callable[[Occurrence, int], tuple[Tensor, Tensor]]:
    def parts(occurrence: Occurrence, _: int) -> tuple[Tensor, Tensor]:
        assert occurrence.result is not None
        return occurrence.result, torch.full_like(occurrence.result, scale)

    return parts


_FACTORS: dict[str, Callable[[Occurrence, int], tuple[Tensor, Tensor]]] = {
    "arith.mulf": _of_product,
    "arith.divf": _of_quotient,
    "math.exp": _of_exponential(1.0),
    "math.exp2": _of_exponential(0.6931471805599453),
}
"""Operation -> (the factor of its derivative that a backward has to bring along, the rest of the derivative)."""


def _fits(first: Trial, key: Key, variable: Variable) -> bool:
    """Whether the values of a variable can stand at an operation: they exist as often, and broadcast to its shape."""
    runs = first.adjoint.edges.occurrences
    here, there = runs.get((key.launch, key.op), []), runs[variable.place]
    if not here or len(here) != len(there) or variable.place == (key.launch, key.op):
        return False
    for at, value in ((here[0], there[0]), (here[-1], there[-1])):
        if at.result is None or value.result is None or value.result.dim() != at.result.dim():
            return False
        if any(m not in (1, n) for m, n in zip(value.result.shape, at.result.shape, strict=True)):
            return False
    factor = _FACTORS[here[0].op.name](here[0], key.operand)[0]
    assert there[0].result is not None
    return not (factor.shape == there[0].result.shape and torch.equal(factor, there[0].result))


def _summed(gradient: Tensor, shape: torch.Size) -> Tensor:
    """A gradient for an operand that was broadcast."""
    dims = [d for d, n in enumerate(shape) if n == 1 and gradient.size(d) != 1]
    return (gradient.sum(dims, keepdim=True) if dims else gradient).expand(shape)


# --- factors of terms


@dataclass(frozen=True)
class _Ratio:
    """A function of a variable by which a term may be off."""

    words: str
    of: Callable[[Tensor], Tensor]


_RATIOS = (
    _Ratio("{} is missing", lambda v: 1.0 / v),
    _Ratio("{} stands once too often", lambda v: v),
    _Ratio("{}^2 is missing", lambda v: 1.0 / v.square()),
    _Ratio("{}^2 stands there too much", lambda v: v.square()),
    _Ratio("1 - {} is missing", lambda v: 1.0 / (1.0 - v)),
    _Ratio("1 - {} stands once too often", lambda v: 1.0 - v),
    _Ratio("1 + {} is missing", lambda v: 1.0 / (1.0 + v)),
    _Ratio("1 + {} stands once too often", lambda v: 1.0 + v),
    _Ratio("{} stands in place of 1 - {}", lambda v: v / (1.0 - v)),
    _Ratio("1 - {} stands in place of {}", lambda v: (1.0 - v) / v),
    _Ratio("1 + {} stands in place of 1 - {}", lambda v: (1.0 + v) / (1.0 - v)),
)


def ratio_guesses(
    first: Trial, terms: Sequence[tuple[Term, Mapping[str, Tensor]]], variables: Sequence[Variable]
) -> Iterator[Guess]:
    """Every term, and the whole gradient, times a function of a variable, whichever element of it belongs where."""
    tables = {(v, r): _table(first, v, r) for v in variables for r in _RATIOS}
    whole: tuple[Term | None, Mapping[str, Tensor]] = (None, first.truth)
    for term, part in (whole, *terms):
        for name, residual in first.residuals.items():
            ratios = _ratios(residual, part[name])
            if ratios is None:
                continue
            distinct = ratios.unique()
            for (variable, ratio), table in tables.items():
                if _among(distinct, table):
                    yield _by_ratio(term, variable, ratio)


def _by_ratio(term: Term | None, variable: Variable, ratio: _Ratio) -> Guess:
    def effect(trial: Trial) -> Mapping[str, Tensor]:
        part = trial.truth if term is None else trial.cut(term.gate)
        table = _table(trial, variable, ratio)
        found = {}
        for name, direction in part.items():
            ratios = trial.residuals[name] / direction + 1.0 if name in trial.residuals else direction
            nearest = table[_nearest(ratios, table)] if table.numel() else torch.ones_like(ratios)
            close = (nearest - ratios).abs() <= _NEAR * nearest.abs()
            found[name] = torch.where(close, (nearest - 1.0) * direction, 0.0)
        return found

    places = () if term is None else (Place(line=term.line, variable=term.variable),)
    return Guess(Form.FACTOR, effect, places, other=ratio.words.replace("{}", f"`{variable.name}`"))


def _table(trial: Trial, variable: Variable, ratio: _Ratio) -> Tensor:
    """All finite values, sorted."""
    values = [o.result.reshape(-1) for o in trial.adjoint.edges.occurrences[variable.place] if o.result is not None]
    found = ratio.of(torch.cat(values)) if values else torch.empty(0, dtype=torch.float64)
    return found[found.isfinite()].unique()


def _ratios(residual: Tensor, part: Tensor) -> Tensor | None:
    """Candidate over truth of a term where it does not vanish; None where it vanishes altogether."""
    largest = part.abs().amax() if part.numel() else torch.zeros(())
    if not bool(largest > 0):
        return None
    telling = part.abs() > 1e-7 * largest
    # what is wrong where the term vanishes has nothing to do with it
    if bool((residual[~telling].abs() > 1e-6 * residual.abs().amax()).any()):
        return None
    return residual[telling] / part[telling] + 1.0


def _among(ratios: Tensor, table: Tensor) -> bool:
    """Whether all ratios are values of a table, and too many for that to be chance. `ratios` are distinct."""
    if table.numel() == 0:
        return False
    apart = ratios[:1].new_ones(1).bool()
    if ratios.numel() > 1:  # rounding makes several of one
        apart = torch.cat([apart, (ratios.diff().abs() > 10 * _NEAR * ratios[1:].abs())])
    chance = min(1.0, 10 * _NEAR * table.numel()) ** int(apart.sum())
    nearest = table[_nearest(ratios, table)]
    return chance <= _CHANCE and bool(((nearest - ratios).abs() <= _NEAR * nearest.abs()).all())


def _nearest(ratios: Tensor, table: Tensor) -> Tensor:
    """Positions of the nearest values of a sorted table."""
    above = torch.searchsorted(table, ratios.contiguous()).clamp(max=table.numel() - 1)
    below = (above - 1).clamp(min=0)
    return torch.where((table[above] - ratios).abs() < (table[below] - ratios).abs(), above, below)
