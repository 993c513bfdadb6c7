"""How far the loops of a backward's kernels are pipelined: a tunable of each loop that loads.

Triton overlaps the loads of one trip with the work of those before only where it is asked to, or where they feed a dot.
A kernel that walks over rows gains from it what its occupancy does not give.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernel_agent.bench.tunable import LADDERS, Site, Tunable, TunableKind


def loops(kernels: Iterable[ast.FunctionDef], text: str) -> Iterator[Tunable]:
    """Loops over `range` or `tl.range` of kernels that load and have no dot in them: there `num_stages` of the launch
    counts already. A loop within one that is yielded is yielded too. `text`: what the kernels were parsed from."""
    for kernel in kernels:
        for node in ast.walk(kernel):
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
                called = {ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
                if "tl.load" in called and "tl.dot" not in called:
                    yield from _of_loop(node, node.iter, kernel.name, text)


def _of_loop(node: ast.For, bounds: ast.Call, kernel: str, text: str) -> Iterator[Tunable]:
    if ast.unparse(bounds.func) not in ("range", "tl.range"):
        return
    known = {keyword.arg: keyword.value for keyword in bounds.keywords}
    present = known.pop("num_stages", ast.Constant(1))
    value = present.value if isinstance(present, ast.Constant) else None
    if not isinstance(value, int) or value not in LADDERS[TunableKind.PIPELINE]:
        return
    parts = [ast.get_source_segment(text, part) or "" for part in bounds.args]
    parts += [f"{name}={ast.get_source_segment(text, given)}" for name, given in known.items()]
    texts = [f"tl.range({', '.join(parts)}, num_stages={count})" for count in LADDERS[TunableKind.PIPELINE]]
    if not known:
        texts[0] = f"range({', '.join(parts)})"
    yield Tunable(
        f"stages of the loop over `{ast.unparse(node.target)}` of {kernel}",
        TunableKind.PIPELINE,
        value,
        LADDERS[TunableKind.PIPELINE],
        (Site.of(bounds),),
        texts=tuple(texts),
        kernels=(kernel,),
    )
