"""`read_file`: what a user's file or a pair file says, from its syntax tree alone. Nothing of the file is executed."""

from __future__ import annotations

import ast
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.benchsizes import read_bench
from kernel_agent.pairs.imports import check_imports
from kernel_agent.pairs.mark import find_mark, jit_kernels
from kernel_agent.pairs.meta import Gradient, meta_node, read_meta
from kernel_agent.pairs.modulework import check_module_work
from kernel_agent.pairs.sections import has_all_markers, has_marker, without_backward
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.syntax import ImportedNames, assigned_values, defined_functions, parameter_names, parse

_SWEEP_REMEDY = "Add, for example, SWEEP = [dict(M=128, N=512), dict(M=7, N=33, required=False)]."
_MAKE_ARGS_REMEDY = "Add make_args(M, N, device, seed), returning the stub's arguments for one SWEEP entry."


def read_file(path: Path) -> FileFacts:
    """Read a user's file or a pair file.

    Raises `InputError` with path, line, one sentence and a remedy for everything in the file that cannot work and that
    can be seen without running it. What only a run shows is found by `kernel_agent.pairs.observe`.
    """
    source = read_text(path)
    try:
        return read_source(source, path)
    except InputError as error:
        if error.path is not None:
            raise
        raise InputError(error.message, remedy=error.remedy, path=path, line=error.line) from None


def read_source(source: str, path: Path) -> FileFacts:
    """Do `read_file`'s work on text already in memory; `path` names it in messages and is searched for neighbours."""
    tree = parse(source, path)
    has_meta = meta_node(tree) is not None
    if has_meta and has_all_markers(source):
        return _read_pair(source, path)
    if has_meta and has_marker(source):
        without_backward(source)  # says which marker is missing or misplaced
    imported = ImportedNames(tree)
    check_imports(tree, path)
    mark = find_mark(tree, imported, path)
    _check_sweep(tree, path)
    functions = defined_functions(tree)
    check_module_work(tree, imported, path)
    return FileFacts(
        path=path,
        source=source,
        is_pair=False,
        stub=mark.function.name,
        stub_line=mark.function.lineno,
        parameters=mark.parameters,
        inputs_require_grad=mark.inputs_require_grad,
        nondiff_outputs=mark.nondiff_outputs,
        kernels=jit_kernels(tree, imported),
        has_reference="reference" in functions,
        has_surrogate="surrogate" in functions,
        has_backward="backward" in functions and mark.function.name != "backward",
    )


def _read_pair(source: str, path: Path) -> FileFacts:
    meta = read_meta(source)
    without = without_backward(source)
    tree = parse(without, path)
    imported = ImportedNames(tree)
    check_imports(tree, path)
    functions = defined_functions(tree)
    forward = functions.get("forward")
    if forward is None:
        raise InputError(
            "the forward section defines no function `forward`",
            remedy="It is forward(*args, **kwargs) -> (outputs, saved).",
            path=path,
        )
    _check_sweep(tree, path)
    check_module_work(tree, imported, path)
    parameters = tuple(name for name in parameter_names(forward) if name != "ctx")
    unknown = [name for name in meta.grads if name not in parameters]
    if unknown and forward.args.vararg is None and forward.args.kwarg is None:
        raise InputError(
            f'META["grads"] names `{unknown[0]}`, but `forward` takes {", ".join(parameters) or "nothing"}',
            remedy="Name parameters of `forward`.",
            path=path,
            line=forward.lineno,
        )
    if meta.gradient is Gradient.CUSTOM and "surrogate" not in functions:
        raise InputError(
            'META["gradient"] is "custom", but there is no `surrogate`',
            remedy="Add surrogate(*args, **kwargs) to the check section: PyTorch whose autograd is the gradient meant.",
            path=path,
        )
    return FileFacts(
        path=path,
        source=source,
        is_pair=True,
        stub="forward",
        stub_line=forward.lineno,
        parameters=parameters,
        inputs_require_grad=meta.grads,
        nondiff_outputs=meta.nondiff_outputs,
        kernels=jit_kernels(tree, imported),
        has_reference="reference" in functions,
        has_surrogate=meta.gradient is Gradient.CUSTOM,
        has_backward=True,
        bench=read_bench(tree, path),
    )


def _check_sweep(tree: ast.Module, path: Path) -> None:
    values = assigned_values(tree, "SWEEP")
    if not values:
        raise InputError("the file has no SWEEP", remedy=_SWEEP_REMEDY, path=path, line=_last_line(tree))
    if len(values) == 1 and isinstance(values[0], (ast.List, ast.Tuple)) and not values[0].elts and not _grows(tree):
        raise InputError("SWEEP is empty", remedy=_SWEEP_REMEDY, path=path, line=values[0].lineno)
    if "make_args" not in defined_functions(tree) and not assigned_values(tree, "make_args"):
        raise InputError("the file has no make_args", remedy=_MAKE_ARGS_REMEDY, path=path, line=_last_line(tree))


def _last_line(tree: ast.Module) -> int:
    """Where what is missing would be added."""
    return max((node.end_lineno or 1 for node in tree.body), default=1)


def _grows(tree: ast.Module) -> bool:
    """Whether SWEEP is used again at module level: `SWEEP += ...`, `SWEEP.append(...)`."""
    return sum(isinstance(n, ast.Name) and n.id == "SWEEP" for s in tree.body for n in ast.walk(s)) > 1


def read_text(path: Path) -> str:
    """The text of a file that a user named. Raises `InputError` where there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Python takes a byte order mark too
    except FileNotFoundError:
        raise InputError("there is no such file", remedy="Check the path.", path=path) from None
    except IsADirectoryError:
        raise InputError("this is a folder", remedy="Give the path of one Python file.", path=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file cannot be read: {error}", remedy="Give a readable UTF-8 file.", path=path) from None
