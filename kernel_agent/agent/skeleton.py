"""The reply as a skeleton: exact signature, what `saved` unpacks to, what may be None, what is allocated and returned.

It is Python: a reply that fills its `...` has the right form, whatever it computes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from kernel_agent.agent.shapewords import either, shape_words, tensor_words
from kernel_agent.pairs.generated import saved_layout
from kernel_agent.pairs.sections import BACKWARD_MARKER
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, KernelSpec
from kernel_agent.pairs.syntax import defined_functions, parse

_WIDTH = 110


def signature(spec: KernelSpec) -> str:
    """The first line of the function that is asked for."""
    return f"def backward({', '.join(('saved', *cotangent_names(spec)))}, needs=None):"


def gradient_name(name: str) -> str:
    """The variable that holds the gradient of an input: `dx`, `dxs_0` for `xs[0]`."""
    return "d" + re.sub(r"\W+", "_", name).strip("_")


def skeleton(spec: KernelSpec) -> str:
    """The backward section to fill in."""
    lines = [f"    {line}" for line in (*_unpacking(spec), *_facts(spec), *_allocation(spec))]
    return "\n".join(
        (
            BACKWARD_MARKER,
            "# the kernels that backward launches",
            "",
            "",
            signature(spec),
            *lines,
            "    ...",
            f"    return {', '.join(map(gradient_name, spec.grads))}",
        )
    )


def saved_names(spec: KernelSpec) -> tuple[str, ...]:
    """What `saved` holds, in order, as the given forward says; empty where a pair's own forward does not show it."""
    return _returned(spec) if spec.facts.is_pair else saved_layout(spec)


def cotangent_names(spec: KernelSpec) -> tuple[str, ...]:
    """Names of backward's positional parameters after `saved`, one per output."""
    return tuple(f"grad_{facts.name}" for facts in spec.outputs)


def _unpacking(spec: KernelSpec) -> list[str]:
    names = [_variable(name) for name in saved_names(spec)]
    if not names:
        return ["... = saved  # what the forward above returns as its second value"]
    return _wrapped(names, " = saved")


def _facts(spec: KernelSpec) -> list[str]:
    """One comment per slot and per cotangent, in columns."""
    known = {facts.name.partition("[")[0]: facts for facts in (*spec.inputs, *spec.outputs)}
    outputs = {facts.name for facts in spec.outputs}
    rows = []
    for name in saved_names(spec):
        variable = _variable(name).lstrip("*")
        text = _slot(known.get(variable), spec)
        rows.append((_variable(name), f"{text}; an output" if variable in outputs else text))
    several = sum(facts.needs_grad for facts in spec.outputs) > 1
    for cotangent, facts in zip(cotangent_names(spec), spec.outputs, strict=True):
        rows.append((cotangent, _cotangent(facts, several=several)))
    width = max(len(name) for name, _ in rows)
    return [f"# {name:<{width}}  {text}".rstrip() for name, text in rows]


def _slot(facts: ArgumentFacts | None, spec: KernelSpec) -> str:
    if facts is None:
        return "a plain value" if not spec.facts.is_pair else ""
    if facts.kind is ArgumentKind.OTHER:
        return f"a plain value, such as {facts.text}"
    if facts.kind is ArgumentKind.NONE:
        return "None where the user leaves it out"
    many = "each " if "[" in facts.name else ""
    written = ", with what the forward wrote into it" if facts.name in spec.mutated else ""
    return f"{many}{tensor_words(facts)}{written}"


def _cotangent(facts: ArgumentFacts, *, several: bool) -> str:
    if not facts.needs_grad:
        return "always None"
    none = "None when it gets no gradient: leave out its terms" if several else "never None"
    return f"{tensor_words(facts)}; any strides, 0 too; {none}"


def _allocation(spec: KernelSpec) -> list[str]:
    known = {facts.name: facts for facts in spec.inputs}
    reached = {_variable(name).lstrip("*") for name in saved_names(spec)}
    lines = []
    if len(spec.grads) > 1:
        lines.append(
            f"needs = needs or (True,) * {len(spec.grads)}  # per gradient: False means return None and skip its work"
        )
    for name in spec.grads:
        words = shape_words(known[name]) if name in known else "?"
        if name.partition("[")[0] in reached:
            lines.append(f"{gradient_name(name)} = torch.empty_like({name})  # {words}")
        else:
            dtypes = either(known[name].dtypes or (known[name].dtype,)) if name in known else "?"
            lines.append(f"{gradient_name(name)} = ...  # {words}, {dtypes} as {name}, which is not saved")
    return lines


def _variable(name: str) -> str:
    """A slot as a name on the left of an assignment: `kw["scale"]` is `scale`."""
    inner = re.fullmatch(r'\w+\["(\w+)"\]', name)
    return inner[1] if inner else name


def _wrapped(names: Sequence[str], tail: str) -> list[str]:
    """`a, b, c = saved`, over several lines where one would be too long."""
    flat = f"{', '.join(names)}{',' if len(names) == 1 else ''}{tail}"
    if len(flat) <= _WIDTH:
        return [flat]
    return ["(", *(f"    {name}," for name in names), f"){tail}"]


def _returned(spec: KernelSpec) -> tuple[str, ...]:
    """Names in the second value that a pair's forward returns."""
    function = defined_functions(parse(spec.facts.source)).get(spec.facts.stub)
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)] if function else []
    for value in reversed(returns):
        if isinstance(value, ast.Tuple) and len(value.elts) == 2 and isinstance(value.elts[1], ast.Tuple):
            items = value.elts[1].elts
            if items and all(isinstance(item, ast.Name) for item in items):
                return tuple(item.id for item in items if isinstance(item, ast.Name))
    return ()
