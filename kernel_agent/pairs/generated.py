"""The `forward` written for a user's stub that has none of its own: it calls the stub and says what it saves."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernel_agent.pairs.mark import find_mark
from kernel_agent.pairs.spec import ArgumentKind, KernelSpec
from kernel_agent.pairs.syntax import Function, ImportedNames, parse

_WIDTH = 110


def generated_forward(spec: KernelSpec) -> str:
    """Text of `forward(...) -> (outputs, saved)` for a user's stub, with `saved` as `saved_layout` says."""
    function = _stub(spec)
    call, before = _call(spec)
    names = [item.name for item in spec.outputs]
    outputs = _tuple(names) if spec.returns_tuple else names[0]
    assigned = ", ".join(names) if len(names) > 1 else outputs
    return (
        before
        + _wrapped("def forward(", _signature(spec, function), "):")
        + _wrapped(f"    {assigned} = {call}(", _arguments(function, spec), ")")
        + _wrapped(f"    return {outputs}, (", _trailing(saved_layout(spec)), ")")
    )


def saved_layout(spec: KernelSpec) -> tuple[str, ...]:
    """Names of what the generated forward saves, in order: tensor arguments, tensor outputs, then all other arguments.

    The others (`causal`, `eps`, ...) are saved because a backward must not guess them. Empty for a pair file, whose own
    forward says what it saves.
    """
    if spec.facts.is_pair:
        return ()
    arguments = _stub(spec).args
    tensors = {item.name.partition("[")[0] for item in spec.inputs if item.kind is ArgumentKind.TENSOR}
    parameters = [
        f"*{name}" if arguments.vararg is not None and name == arguments.vararg.arg else name
        for name in spec.facts.parameters
    ]
    keywords = [] if arguments.kwarg is None else [item.name for item in spec.inputs if item.name not in _plain(spec)]
    parameters += [f'{arguments.kwarg.arg}["{name}"]' for name in keywords] if arguments.kwarg else []
    is_tensor = dict(zip(parameters, [name in tensors for name in (*spec.facts.parameters, *keywords)], strict=True))
    outputs = [item.name for item in spec.outputs if item.kind is ArgumentKind.TENSOR]
    return (*(p for p in parameters if is_tensor[p]), *outputs, *(p for p in parameters if not is_tensor[p]))


def _plain(spec: KernelSpec) -> set[str]:
    """Inputs that go to a named parameter or into `*args`."""
    return {*spec.facts.parameters, "ctx", *(item.name for item in spec.inputs if "[" in item.name)}


def _stub(spec: KernelSpec) -> Function:
    tree = parse(spec.facts.source, spec.facts.path)
    return find_mark(tree, ImportedNames(tree), spec.facts.path).function


def _passes_ctx(spec: KernelSpec) -> bool:
    """Whether make_args itself fills the tolerated parameter `ctx`."""
    return any(item.name == "ctx" for item in spec.inputs)


def _call(spec: KernelSpec) -> tuple[str, str]:
    """How the stub is called, and the line that makes it callable where its name is taken."""
    name = spec.facts.stub
    if name != "forward" and name not in spec.facts.parameters:
        return name, ""
    return "launch_stub", f"launch_stub = {name}\n\n\n"


def _signature(spec: KernelSpec, function: Function) -> list[str]:
    """The stub's parameters without annotations and `ctx`; keyword-only ones may also be given by position."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: dict[str, ast.expr] = {}
    if arguments.defaults:
        defaults = {a.arg: d for a, d in zip(positional[-len(arguments.defaults) :], arguments.defaults, strict=True)}
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    names = [a.arg for a in positional]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [a.arg for a in arguments.kwonlyargs]
    has_default, parts = False, []
    for name in names:
        if name == "ctx" and not _passes_ctx(spec):
            continue
        default = ast.unparse(defaults[name]) if name in defaults else "None" if has_default else ""
        if name.startswith("*"):
            has_default, default = False, ""
        has_default = has_default or bool(default)
        parts.append(f"{name}={default}" if default else name)
    return parts + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _arguments(function: Function, spec: KernelSpec) -> list[str]:
    arguments, parts = function.args, []
    by_name = False
    for argument in (*arguments.posonlyargs, *arguments.args):
        if argument.arg == "ctx" and not _passes_ctx(spec):
            by_name = True
            continue
        parts.append(f"{argument.arg}={argument.arg}" if by_name else argument.arg)
    parts += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    parts += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs if a.arg != "ctx" or _passes_ctx(spec)]
    return parts + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _tuple(names: list[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _trailing(names: Iterable[str]) -> list[str]:
    """Elements of a tuple display: one alone keeps its comma."""
    items = list(names)
    return [f"{items[0]},"] if len(items) == 1 else items


def _wrapped(opening: str, items: list[str], closing: str) -> str:
    """One line, or one item per line where that would be too long."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= _WIDTH:
        return line + "\n"
    indent = " " * (len(opening) - len(opening.lstrip()))
    inner = "".join(f"{indent}    {item.rstrip(',')},\n" for item in items)
    return f"{opening}\n{inner}{indent}{closing}\n"
