"""`told_strides`: which cotangents kernels may read where they lie, because a launch is told strides by its arguments.

A forward that asks an output for its strides addresses it by indices alone: its backward gives the kernel those of the
cotangent, which then need not lie as the output does. A gradient that a sum expands, or one in rows for an output in
columns, is not copied for the launch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.free_names import words
from kernel_agent.compiler.plan import BackwardPlan, Fact
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Atom, Form
from kernel_agent.compiler.schedule.polynomial import ZERO, Monomial, Polynomial
from kernel_agent.compiler.schedule.sites import Site, negatives, sites
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.stub.wording import Launched


@dataclass(frozen=True)
class Told:
    """A launch's arguments for the strides of an output."""

    tensor: str
    """Argument that is the output."""
    parameters: tuple[str, ...]
    """By axis."""


def told_strides(launched: Launched, name: str) -> Told | None:
    """The arguments that a launch has for all strides of a tensor; None where it lacks one, or has it twice."""
    given = launched.text.arguments
    tensor, node = launched.seen.tensors[name], given.get(name)
    if not isinstance(node, ast.Name) or name in launched.seen.clones or not tensor.dim():
        return None
    found: dict[int, str] = {}
    for parameter, text in given.items():
        axis = _axis(text, node.id)
        if axis is not None:
            axis %= tensor.dim()
            if axis in found:
                return None
            found[axis] = parameter
    return Told(name, tuple(found[axis] for axis in range(tensor.dim()))) if len(found) == tensor.dim() else None


def _axis(node: ast.expr, tensor: str) -> int | None:
    """The axis of `tensor.stride(axis)`."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(name), "stride"), [place], []) if name == tensor:
            try:
                axis = ast.literal_eval(place)
            except ValueError:
                return None
            return axis if type(axis) is int else None
    return None


def read_anywhere(plan: BackwardPlan, launched: Launched, told: Told) -> BackwardPlan | None:
    """The plan, with what it then asks for, where its kernels read the cotangent of a tensor by indices of its axes,
    and need its strides for nothing else; None where that is not proved."""
    argument = plan.cotangents.get(told.tensor)
    if argument is None or argument in plan.consumed or plan.censuses or plan.listings or plan.inverses:
        return None
    if _mentioned(plan, {*told.parameters, told.tensor, argument}):
        return None
    facts: dict[str, None] = {}
    for step in plan.steps:
        ends = _ends(step.kernel, len(step.grid), argument, told)
        if ends is None:
            return None
        facts |= {f"{end} <= {argument}.shape[{axis}]": None for axis, end in ends}
    grid = {f"grid{axis}": extent for axis, extent in enumerate(launched.seen.grid)}
    names = {**launched.seen.values, **grid, argument: launched.seen.tensors[told.tensor]}
    if not Calls((names,)).show(facts):
        return None
    asked = Fact(" and ".join(facts) or "True", f"{argument} is read within its axes", argument)
    return replace(plan, facts=(*plan.facts, asked))


def _mentioned(plan: BackwardPlan, names: set[str]) -> bool:
    """Whether an expression of a plan is about one of some arguments, or a buffer lies as one does."""
    texts = [fact.expression for fact in plan.facts] + list(plan.settings.values())
    for buffer in plan.buffers:
        texts += [buffer.like, buffer.empty_if, *buffer.shape]
        texts += [text for axis in buffer.axes for text in (axis.stride, axis.size)]
    for step in plan.steps:
        texts += [*step.grid, *step.scalars.values(), step.num_warps]
    return any(names & words(text) for text in texts)


def _ends(kernel: Kernel, axes: int, argument: str, told: Told) -> list[tuple[int, str]] | None:
    """By axis, what the indices are less than by which a kernel reads a cotangent; None where it does anything else
    with the strides. No kernel that does not read it is asked of it."""
    strides = {value.name: value for value in kernel.arguments if value.name in told.parameters}
    if not _only_read_by(kernel, set(strides.values()), argument):
        return None
    forms = Forms(kernel, Launch.like_forward(axes))
    found: list[tuple[int, str]] = []
    for site in sites(kernel.body, frozenset({Code.LOAD})):
        if site.op.base.name != argument:
            continue
        indices = _indices(forms.of(site.op.offset), told.parameters)
        if indices is None:
            return None
        for axis, index in enumerate(indices):
            end = _end(forms, site, index)
            if end is None:
                return None
            found.append((axis, end))
    return found


def _only_read_by(kernel: Kernel, strides: set[Value], argument: str) -> bool:
    """Whether strides come to nothing but offsets of loads of an argument, in integers that no longer stride
    overflows, and all that is done with the argument is to load from it."""
    touched = set(strides)
    for op in kernel.ops:
        if op.attributes.get("base") is not None and op.base.name == argument and op.code is not Code.LOAD:
            return False
        yields = [value for block in op.blocks for value in block.yields]
        told = [value for value in (*op.operands, *yields) if value in touched]
        if not told:
            continue
        if op.code is Code.LOAD and op.base.name == argument and told == [op.offset]:
            continue
        scales = op.code in (Code.MUL, Code.ADD) and op.result.element == "i64"
        if not (scales or op.code in _MOVES):
            return False
        touched |= set(op.results)
    return not any(value in touched for value in kernel.body.yields)


_MOVES = frozenset({Code.CAST, Code.FULL, Code.BROADCAST, Code.EXPAND, Code.TRANS})
"""What changes no number, where that keeps or widens it: a form has it only then."""


def _indices(address: Form, parameters: tuple[str, ...]) -> list[Form] | None:
    """The index along each axis, of an address that is the sum of index * stride; None of any other."""
    places = {name: axis for axis, name in enumerate(parameters)}
    terms: list[dict[Atom, Polynomial]] = [{} for _ in parameters]
    bases: list[Polynomial] = [ZERO for _ in parameters]
    for atom, number in (*address.terms, (None, address.base)):
        for monomial, count in number.terms:
            found = [symbol for symbol in monomial if symbol.text in places]
            rest: Monomial = tuple(symbol for symbol in monomial if symbol not in found)
            if len(found) != 1 or any(words(symbol.text) & places.keys() for symbol in rest):
                return None
            part, axis = Polynomial.of({rest: count}), places[found[0].text]
            if atom is None:
                bases[axis] = bases[axis] + part
            else:
                terms[axis][atom] = terms[axis].get(atom, ZERO) + part
    return [Form.of(numbers, base) for numbers, base in zip(terms, bases, strict=True)]


def _end(forms: Forms, site: Site, index: Form) -> str | None:
    """What an index is less than wherever a load takes part; None where it is not known to be at least 0 and so."""
    if not index.not_negative:
        return None
    return next((end.text() for end in _limits(forms, site, index) if end.printable), None)


def _limits(forms: Forms, site: Site, index: Form) -> Iterator[Polynomial]:
    if index.invariant is not None:
        yield index.base + Polynomial.integer(1)
    for negative in negatives(forms, site):
        if negative.terms == index.terms:
            yield index.base - negative.base
    if len(index.terms) == 1 and not index.base.terms:
        ((atom, step),) = index.terms
        if step == Polynomial.integer(1) and atom.extent is not None:
            yield atom.extent
