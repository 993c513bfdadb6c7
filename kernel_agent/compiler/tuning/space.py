"""`space`: the numbers of a derived backward that any value is right for and speed depends on.

Those of `kernel_agent.bench.variants`, and formulas besides: `num_warps = max(4, min(32, BLOCK // 512))` as a whole may
become a number, and `RELOAD = BLOCK > 8192`, which says whether a long row is loaded again, True or False.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from kernel_agent.bench.bindings import Bindings, bindings
from kernel_agent.bench.tunable import LADDERS, Site, Tunable, TunableKind
from kernel_agent.bench.variants import Space
from kernel_agent.pairs.spec import Candidate

WARPS, STAGES, PROGRAMS = (4, 8, 16, 32), (1, 2, 3, 4), (1, 2, 4, 8)
LEAST_DOT_TILE = 16
"""Of a tile that a product takes."""
WITH_PRODUCTS = {
    TunableKind.BLOCK: (16, 32, 64, 128),
    TunableKind.WARPS: (4, 8),
    TunableKind.STAGES: (2, 3, 4),
}
"""What kernels with products are tried with: sm_90 multiplies by groups of four warps, and their accumulators, which
stay in registers, allow no larger tiles."""
WITHOUT_PRODUCTS = {
    TunableKind.BLOCK: tuple(1 << power for power in range(16)),
    TunableKind.WARPS: (1, 2, 4, 8, 16, 32),
}
"""What others are tried with: a row that is read twice is read from a cache the second time if few programs, of many
warps each, have theirs there."""


def space(candidate: Candidate) -> Space:
    """What can be tuned in a derived backward; formulas have the value 0, and conditions -1, since what they come to
    differs from call to call."""
    tree = ast.parse(candidate.backward)
    formulas: dict[Site, Tunable] = {}
    for tunable in _formulas(tree):
        known = formulas.get(tunable.sites[0])
        kernels = tunable.kernels if known is None else tuple(dict.fromkeys((*known.kernels, *tunable.kernels)))
        formulas[tunable.sites[0]] = replace(tunable, kernels=kernels)
    asked = {name for tunable in formulas.values() if tunable.kind is TunableKind.PROGRAMS for name in tunable.kernels}
    numbers = [
        tunable
        for tunable in Space.of(candidate).tunables
        if not any(_inside(site, whole) for site in tunable.sites for whole in formulas)
        and not (tunable.kind is TunableKind.PROGRAMS and asked & set(tunable.kernels))
        and "divisor" not in tunable.name
    ]
    products = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _has_product(node)}
    return Space(candidate, tuple(_bounded(tunable, products) for tunable in (*numbers, *formulas.values())))


def _has_product(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "dot" for node in ast.walk(function))


def _bounded(tunable: Tunable, products: set[str]) -> Tunable:
    """The tunable with values that are worth a try; the present one is among them if it was."""
    bounds = WITH_PRODUCTS if products & set(tunable.kernels) else WITHOUT_PRODUCTS
    values = bounds.get(tunable.kind)
    if values is None or (bounds is WITHOUT_PRODUCTS and tunable.value <= 0):
        return tunable
    here = {tunable.value} & set(tunable.values)
    return replace(tunable, values=tuple(sorted({*values, *here})))


def _formulas(tree: ast.Module) -> Iterator[Tunable]:
    kernels = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name in kernels:
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                name = ast.unparse(call.func.value)
                known = {**bindings(tree), **bindings(function, call)}
                for kind, key, values in _asked(kernels.get(name)):
                    for keyword in call.keywords:
                        formula = _formula(keyword.value, known) if keyword.arg == key else None
                        if formula is not None:
                            value = -1 if kind is TunableKind.SWITCH else 0
                            yield Tunable(f"{key} of {name}", kind, value, values, (Site.of(formula),), kernels=(name,))
                for factor in _factors(call.func.slice, known):
                    formula = _formula(factor, known)
                    if formula is not None:
                        label = f"programs of {name} per multiprocessor"
                        yield Tunable(label, TunableKind.PROGRAMS, 0, PROGRAMS, (Site.of(formula),), kernels=(name,))


def _asked(kernel: ast.FunctionDef | None) -> Iterator[tuple[TunableKind, str, tuple[int, ...]]]:
    """Keywords of a launch that options, the stages of the kernel's own loops and what it loads again go by."""
    yield TunableKind.WARPS, "num_warps", WARPS
    yield TunableKind.STAGES, "num_stages", STAGES
    for node in ast.walk(kernel) if kernel is not None else ():
        if isinstance(node, ast.keyword) and node.arg == "num_stages" and isinstance(node.value, ast.Name):
            yield TunableKind.STAGES, node.value.id, STAGES
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and _loads_again(node):
            yield TunableKind.SWITCH, node.test.id, LADDERS[TunableKind.SWITCH]


def _loads_again(branch: ast.If) -> bool:
    """Whether a branch only computes what is there already from what it reads once more, for the last time."""
    loads = [node for node in ast.walk(branch) if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"]
    last = all(any(ast.unparse(key) == "eviction_policy='evict_first'" for key in load.keywords) for load in loads)
    return bool(loads) and last and not branch.orelse and all(isinstance(node, ast.Assign) for node in branch.body)


def _formula(value: ast.expr, known: Bindings) -> ast.expr | None:
    """The formula that gives a name its value; None for a number."""
    if isinstance(value, ast.Name):
        made_of = known.get(value.id, ())
        value = made_of[0] if len(made_of) == 1 else ast.Constant(0)
    return None if isinstance(value, ast.Constant) else value


def _factors(value: ast.expr, known: Bindings, depth: int = 3) -> Iterator[ast.expr]:
    """What the number of multiprocessors is multiplied by in an extent of a grid."""
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.Name):
            if isinstance(node.right, ast.Attribute) and node.right.attr == "multi_processor_count":
                yield node.left
        elif isinstance(node, ast.Name) and depth:
            for made_of in known.get(node.id, ()):
                yield from _factors(made_of, known, depth - 1)


def _inside(site: Site, whole: Site) -> bool:
    start, end = (whole.line, whole.start), (whole.end_line, whole.end)
    return start <= (site.line, site.start) and (site.end_line, site.end) <= end
