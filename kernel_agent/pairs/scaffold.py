"""`scaffold`: a bare kernel file with the mark, a SWEEP and a make_args added, their shapes guessed from the stub."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.mark import is_mark, jit_kernels
from kernel_agent.pairs.modulework import launching_functions
from kernel_agent.pairs.syntax import ImportedNames, assigned_values, called_names, defined_functions, parse

_LARGE, _SMALL = 1024, (17, 100, 3, 5, 33, 7)
_TENSOR_USES = frozenset(
    (
        "shape",
        "stride",
        "size",
        "numel",
        "device",
        "dtype",
        "contiguous",
        "ndim",
        "dim",
        "view",
        "reshape",
        "is_cuda",
        "T",
    )
)
_VECTORS = ("weight", "bias", "gamma", "beta", "scale", "w", "b")
_NO_STUB = ("reference", "backward", "surrogate", "make_args", "setup", "flops", "main")


def scaffold(source: str, path: Path | None = None) -> str:
    """Add `@autodiff`, SWEEP and make_args to a file with kernels and a function that launches them.

    What the file has already is left as it is. Raises `InputError` when it is marked already or nothing in it launches.
    """
    tree = parse(source, path)
    imported = ImportedNames(tree)
    stub = _stub(tree, imported, path)
    lines = source.replace("\r\n", "\n").rstrip("\n").split("\n")
    first = min([stub.lineno, *(decorator.lineno for decorator in stub.decorator_list)])
    lines.insert(first - 1, "@autodiff")
    after_imports = _end_of_imports(tree)
    fresh = ["from kernel_agent import autodiff"]
    if "torch" not in imported.bound():
        fresh.insert(0, "import torch")
    lines[after_imports:after_imports] = ["", *fresh] if after_imports else [*fresh, ""]
    shapes = _shapes(stub)
    dims = list(dict.fromkeys(dim for shape in shapes.values() for dim in shape)) or ["N"]
    if not assigned_values(tree, "SWEEP"):
        lines += ["", "", *_sweep(dims)]
    if "make_args" not in defined_functions(tree):
        lines += ["", "", *_make_args(stub, shapes, dims)]
    return "\n".join(lines) + "\n"


def _stub(tree: ast.Module, imported: ImportedNames, path: Path | None) -> ast.FunctionDef:
    """The outermost launching function; the first one, forwards before others."""
    functions = defined_functions(tree)
    for function in functions.values():
        if any(is_mark(decorator, imported) for decorator in function.decorator_list):
            raise InputError(
                f"`{function.name}` is marked with @autodiff already",
                remedy="The file needs no scaffold: run kernel-agent --file-path on it.",
                path=path,
                line=function.lineno,
            )
    kernels = jit_kernels(tree, imported)
    launching = {
        name
        for name in launching_functions(functions) - {*kernels, *_NO_STUB}
        if not name.startswith(("test", "bench"))
    }
    called = {name for caller in launching for name in called_names(functions[caller]) if name != caller}
    outermost = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in launching - called]
    if not outermost:
        raise InputError(
            "no function of the file launches a kernel" if kernels else "the file has no @triton.jit kernel",
            remedy="Write the stub: a module-level function that allocates outputs and runs kernel[grid](...).",
            path=path,
        )
    return min(outermost, key=lambda node: any(word in node.name for word in ("bwd", "backward", "grad")))


def _end_of_imports(tree: ast.Module) -> int:
    """Line of the last import of the block that opens the file; 0 when it opens with something else."""
    end = 0
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            end = node.end_lineno or node.lineno
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break
        elif not end:
            end = node.end_lineno or node.lineno
    return end


def _required(stub: ast.FunctionDef) -> list[ast.arg]:
    positional = [*stub.args.posonlyargs, *stub.args.args]
    needed = positional[: len(positional) - len(stub.args.defaults)]
    return needed + [a for a, d in zip(stub.args.kwonlyargs, stub.args.kw_defaults, strict=True) if d is None]


def _is_tensor(argument: ast.arg, stub: ast.FunctionDef) -> bool:
    annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
    if annotation:
        return "Tensor" in annotation
    for node in ast.walk(stub):
        if isinstance(node, ast.Attribute) and node.attr in _TENSOR_USES and _is_name(node.value, argument.arg):
            return True
        like = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_like")
        if like and any(_is_name(value, argument.arg) for value in node.args):  # type: ignore[attr-defined]
            return True
    return argument.arg.startswith(_VECTORS[:4])


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _shapes(stub: ast.FunctionDef) -> dict[str, tuple[str, ...]]:
    """Guessed dims of every required tensor: from `M, N = x.shape`, else vectors by name, else like the first one."""
    tensors = [argument.arg for argument in _required(stub) if _is_tensor(argument, stub)]
    known: dict[str, tuple[str, ...]] = {}
    for name, dims in _unpacked(stub):
        last = next(reversed(known.values()))[-1] if known else "K"
        known.setdefault(name, tuple(last if dim.startswith("_") else dim for dim in dims))
    first = next((known[name] for name in tensors if name in known), ("N",))
    return {name: known.get(name, first[-1:] if name.startswith(_VECTORS) else first) for name in tensors}


def _unpacked(stub: ast.FunctionDef) -> Iterator[tuple[str, list[str]]]:
    """Every `A, B = name.shape` in the stub."""
    for node in ast.walk(stub):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], (ast.Tuple, ast.List)):
            continue
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.value, ast.Tuple):  # (M, K), N = a.shape, b.shape[1]
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))  # type: ignore[arg-type]
        for target, value in pairs:
            is_shape = isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name)
            if is_shape and isinstance(target, (ast.Tuple, ast.List)):
                names = [item.id for item in target.elts if isinstance(item, ast.Name)]
                if len(names) == len(target.elts):
                    yield value.value.id, names  # type: ignore[attr-defined]


def _sweep(dims: list[str]) -> list[str]:
    large = ", ".join(f"{dim}={_LARGE if len(dims) < 4 else 128}" for dim in dims)
    small = ", ".join(f"{dim}={_SMALL[i % len(_SMALL)]}" for i, dim in enumerate(dims))
    return [
        "# Guessed from the stub: make these the shapes of your own calls, and some odd ones.",
        "SWEEP = [",
        f"    dict({large}),",
        f"    dict({small}),",
        "]",
    ]


def _make_args(stub: ast.FunctionDef, shapes: dict[str, tuple[str, ...]], dims: list[str]) -> list[str]:
    """One tensor per required tensor parameter; the number 1 for what looks like no tensor."""
    names = [argument.arg for argument in _required(stub) if argument.arg != "ctx"]
    positional = [name for name in names if name not in {a.arg for a in stub.args.kwonlyargs}]
    values = {
        name: f"torch.randn({', '.join(shapes[name])}, device=device)" if name in shapes else "1" for name in names
    }
    result = ", ".join(positional) + ("," if len(positional) == 1 else "")
    keywords = [name for name in names if name not in positional]
    if keywords:
        result = f"({result}), dict({', '.join(f'{name}={name}' for name in keywords)})"
    return [
        f'def make_args({", ".join(dims)}, device="cuda"):',
        *(f"    {name} = {value}" for name, value in values.items()),
        f"    return {result or '()'}",
    ]
