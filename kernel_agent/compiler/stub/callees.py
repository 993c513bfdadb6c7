"""`callees`: what a stub may call that has a body in its file: functions, forwards of autograd functions, operators."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Mapping

_CONTEXT_CALLS = ("save_for_backward", "set_materialize_grads")
"""What a forward tells autograd without effect on what it returns."""
_OPERATORS = ("triton_op", "custom_op")


def callees(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Plain functions by the text that calls them: `helper`, `Square.apply`, `torch.ops.mine.square`.

    Of a forward the context is left out, if it is only told what to save. A function with a decorator is not plain.
    """
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            operator = _operator(node)
            if operator:
                body = _Launching().visit(copy.deepcopy(node))
                found |= dict.fromkeys((node.name, f"torch.ops.{operator}", f"torch.ops.{operator}.default"), body)
            elif not node.decorator_list:
                found[node.name] = node
        elif isinstance(node, ast.ClassDef) and _is_autograd_function(node):
            methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
            forward = _without_context(methods) if "forward" in methods else None
            if forward is not None:
                found[f"{node.name}.apply"] = forward
    return found


def launches(node: ast.AST, helpers: Collection[str] = ()) -> bool:
    """Whether a launch of a kernel, or a call of a helper that is one, stands in a tree."""
    return any(
        isinstance(one, ast.Call) and (isinstance(one.func, ast.Subscript) or ast.unparse(one.func) in helpers)
        for one in ast.walk(node)
    )


def _operator(function: ast.FunctionDef) -> str:
    """`mine.square` of a function that only `triton_op("mine::square", mutates_args={})` decorates; else nothing."""
    if len(function.decorator_list) != 1 or not isinstance(call := function.decorator_list[0], ast.Call):
        return ""
    names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    mutated = [ast.unparse(one.value) for one in call.keywords if one.arg == "mutates_args"]
    known = ast.unparse(call.func).rpartition(".")[2] in _OPERATORS and mutated in (["{}"], ["()"], ["[]"])
    return names[0].replace("::", ".") if known and len(names) == 1 else ""


def _is_autograd_function(node: ast.ClassDef) -> bool:
    return [ast.unparse(base) for base in node.bases] in (
        ["torch.autograd.Function"],
        ["autograd.Function"],
        ["Function"],
    )


def _without_context(methods: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef | None:
    """A forward as a function of its tensors; None where it does more with its context than to save."""
    forward = copy.deepcopy(methods["forward"])
    if not all(_keeps_values(decorator) for decorator in forward.decorator_list):
        return None
    forward.decorator_list = []
    if "setup_context" in methods:
        return forward
    arguments = [*forward.args.posonlyargs, *forward.args.args]
    if not arguments:
        return None
    context = arguments[0].arg
    del (forward.args.posonlyargs or forward.args.args)[0]
    forward.body = [left for one in forward.body if (left := _told(one, context)) is not None]
    used = any(isinstance(node, ast.Name) and node.id == context for one in forward.body for node in ast.walk(one))
    return None if used else forward


def _keeps_values(decorator: ast.expr) -> bool:
    """Whether a forward computes the same without a decorator: `custom_fwd` may make its inputs narrower."""
    if isinstance(decorator, ast.Call):
        named = ast.unparse(decorator.func).rpartition(".")[2] == "custom_fwd"
        return named and not decorator.args and [one.arg for one in decorator.keywords] == ["device_type"]
    return ast.unparse(decorator).rpartition(".")[2] in ("staticmethod", "custom_fwd")


def _told(statement: ast.stmt, context: str) -> ast.stmt | None:
    """A statement without what it tells the context; None where nothing is left."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        told = [f"{context}.{name}" for name in _CONTEXT_CALLS]
        return None if ast.unparse(statement.value.func) in told else statement
    if isinstance(statement, ast.Assign) and not launches(statement):
        targets = [target for target in statement.targets if not _is_of(target, context)]
        if not targets:
            return None
        statement.targets = targets
    return statement


def _is_of(target: ast.expr, context: str) -> bool:
    """Whether a target is an attribute of the context, or attributes."""
    if isinstance(target, ast.Tuple):
        return all(_is_of(one, context) for one in target.elts)
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == context


class _Launching(ast.NodeTransformer):
    """`kernel[grid]` for `wrap_triton(kernel)[grid]`, which tells torch of a launch inside of an operator."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        wrapping = ast.unparse(node.func).rpartition(".")[2] == "wrap_triton" and len(node.args) == 1
        return node.args[0] if wrapping else node
