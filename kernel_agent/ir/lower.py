"""Triton source -> Triton IR text in MLIR's generic form, on any machine: no GPU and no driver are asked.

MLIR prints a module that fails verification in the generic form, which has one grammar for all operations. So after
the passes one attribute without a dialect prefix is set on the module: that is invalid, and changes nothing else.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir as mlir
from triton._C.libtriton import passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.ir.errors import LoweringError, ParseError
from kernel_agent.ir.program import Module
from kernel_agent.ir.syntax import parse

TARGET = GPUTarget("cuda", 90, 32)
"""What kernels are lowered for: sm_90 with 32 threads in a warp."""

_BACKEND = CUDABackend(TARGET)
_MODULES: dict[str, Module] = {}
_TEXTS: dict[str, str] = {}
"""IR that was lowered here by what it is made of, wherever the kernel's file lies."""
_KNOWN: dict[str, str] = {}
"""The same of processes before; see `know`."""
_PLACE = '"the file of the kernel":'
"""Stands in kept IR where the file is named."""
_MOST_BYTES = 1 << 20
"""Of the texts that are kept for other processes."""
_LOWERING = threading.RLock()
"""Triton's code generator and Python's warning filters know one thread at a time. A function that is derived when it is
compiled is lowered while its kernel is."""

Path = tuple[int, ...]
"""Place of an argument: its position, then positions within nested tuples."""


def lower(kernel: Any, signature: Mapping[str, Any], constexprs: Mapping[Path, Any]) -> Module:
    """The parsed IR of one specialisation of a kernel, kept by content for the life of the process.

    `kernel` is a `triton.JITFunction`; `signature` maps every parameter to Triton's type string (`*fp32`, `i32`,
    `constexpr`); `constexprs` maps paths to constant values. Raises `LoweringError` when Triton refuses the kernel.
    """
    self_test()
    constants = sorted((path, _constant_key(value)) for path, value in constexprs.items())
    content = f"{kernel.cache_key}|{sorted(signature.items())}|{constants}"
    # The same text in another file has other source lines to show.
    place = f'"{kernel.fn.__code__.co_filename}":'
    key = place + content
    with _LOWERING:
        if key not in _MODULES:
            text = _KNOWN.get(content)
            if text is None:
                # Lowered for each file: a function that is derived when it is called learns of its calls so.
                text = _TEXTS[content] = generic_text(kernel, signature, constexprs).replace(place, _PLACE)
            _MODULES[key] = parse(text.replace(_PLACE, place))
        return _MODULES[key]


def lowered(known: Collection[str]) -> dict[str, str]:
    """What this process has lowered, for `know` in another one, without what is known there; nothing of too much."""
    if sum(len(text) for text in _TEXTS.values()) > _MOST_BYTES:
        return {}
    return {content: text for content, text in _TEXTS.items() if content not in known}


def know(texts: Mapping[str, str]) -> None:
    """Take the IR of kernels from a process that ran no other code than their own file's."""
    _KNOWN.update(texts)


def lower_whole(
    kernel: Any, signature: Mapping[str, Any], constexprs: Mapping[Path, Any], kept: Collection[str]
) -> Module:
    """As `lower`, for a reader of programs: device functions in `kept` (`triton.language.random.rand`) are called, not
    inlined, and what is computed twice stands there twice, so that other constants give the same operations.
    """
    self_test()
    with _LOWERING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse(_printed(kernel, signature, constexprs, whole=frozenset(kept)))


def _constant_key(value: Any) -> str:
    return str(value.cache_key) if hasattr(value, "cache_key") else f"{type(value).__name__}:{value!r}"


def generic_text(kernel: Any, signature: Mapping[str, Any], constexprs: Mapping[Path, Any]) -> str:
    """Inlined, canonical Triton IR of the kernel as generic-form text. Raises `LoweringError`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Triton deprecates in its language is not ours to raise on
        return _printed(kernel, signature, constexprs)


def _printed(
    kernel: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[Path, Any],
    whole: frozenset[str] | None = None,
) -> str:
    source = ASTSource(kernel, dict(signature), dict(constexprs))
    # assertions are lowered in debug mode only; the overflow checks that come with it are not the user's
    options = _BACKEND.parse_options({"debug": True, "sanitize_overflow": False})
    context = _context()
    helpers = (options, _BACKEND.get_codegen_implementation(options), _BACKEND.get_module_map(), context)
    try:
        module = source.make_ir(TARGET, *helpers)
    except CompilationError as error:
        raise _lowering_error(kernel, error) from error
    except RuntimeError as error:  # the verifier has printed the operation and its line by now
        name = kernel.fn.__name__
        raise LoweringError(
            f"Triton builds no valid IR from kernel {name}: {error}",
            remedy="Look for the operation that Triton names on stderr.",
            kernel=name,
            file=kernel.fn.__code__.co_filename,
        ) from error
    if whole:
        _keep(module, whole)
    manager = mlir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    passes.common.add_canonicalizer(manager)
    if whole is None:
        passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    try:
        manager.run(module, "kernel_agent")
    except RuntimeError as error:
        name = kernel.fn.__name__
        raise LoweringError(f"Triton's passes fail on kernel {name}: {error}", kernel=name) from error
    module.set_attr("generic", mlir.builder(context).get_int32_attr(1))
    return str(module)


@lru_cache(maxsize=1)
def _context() -> Any:
    """Of all kernels that this process lowers: MLIR takes longer to load dialects than to lower a small kernel."""
    context = mlir.context()
    mlir.load_dialects(context)
    _BACKEND.load_dialects(context)
    return context


def _keep(module: Any, functions: frozenset[str]) -> None:
    """Forbid to inline device functions. Their names in the module go on behind two underscores."""
    names: list[str] = []

    def note(op: Any) -> None:
        if op.get_name() == "tt.func":
            names.append(op.get_str_attr("sym_name"))

    module.walk(note)
    yes = mlir.builder(module.context).get_bool_attr(True)
    for name in names:
        if name.partition("__")[0] in functions:
            module.get_function(name).set_attr("noinline", yes)


def _lowering_error(kernel: Any, error: CompilationError) -> LoweringError:
    """Triton's innermost message, at the line of the user's file."""
    inner: BaseException = error
    while isinstance(inner.__cause__, CompilationError):
        inner = inner.__cause__
    line = getattr(getattr(error, "node", None), "lineno", None)
    _, start = _source_start(kernel)
    line = None if line is None else start + line - 1
    name = kernel.fn.__name__
    said, remedy = str(inner), "Fix the kernel so that Triton accepts it."
    if untaken := _untaken(inner.__cause__):
        said = f"the library function that it calls takes no {untaken}"
        remedy = "Convert what it is given, as by `.to(tl.float32)`."
    return LoweringError(
        f"Triton cannot compile kernel {name}" + (f" (line {line})" if line else "") + f": {said}".rstrip(),
        remedy=remedy,
        kernel=name,
        file=kernel.fn.__code__.co_filename,
        line=line,
        column=getattr(getattr(error, "node", None), "col_offset", None),
    )


def _untaken(error: BaseException | None) -> str:
    """Elements of arguments that a library function has no version for: Triton looks it up by them."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    parts = list(key) if isinstance(key, (tuple, tl.tuple)) else []
    return ", ".join(map(str, parts)) if parts and all(isinstance(part, tl.dtype) for part in parts) else ""


def _source_start(kernel: Any) -> tuple[str, int]:
    """File and first line of the `def` of a kernel: Triton counts lines from there."""
    start = int(kernel.starting_line_number)
    lines = kernel.raw_src if isinstance(kernel.raw_src, list) else str(kernel.raw_src).split("\n")
    offset = next((k for k, text in enumerate(lines) if str(text).lstrip().startswith("def ")), 0)
    return kernel.fn.__code__.co_filename, start + offset


def _probe_kernel(pointer, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    value = tl.load(pointer + offsets, mask=offsets < size, other=0.0)
    if size > 3:
        tl.store(pointer + offsets, value + tl.sum(value, 0), mask=offsets < size)


@lru_cache(maxsize=1)
def self_test() -> None:
    """Lower and read one small kernel. Raises `EnvironmentProblem` when this Triton prints IR we cannot read."""
    wanted = {"tt.load", "tt.store", "tt.reduce", "scf.if", "tt.make_range"}
    try:
        kernel = triton.JITFunction(_probe_kernel)
        text = generic_text(kernel, {"pointer": "*fp32", "size": "i32", "BLOCK": "constexpr"}, {(2,): 16})
        module = parse(text)
        missing = wanted - {op.name for op in module.all_ops}
        if not missing and all(module.place(op) for op in module.all_ops if op.name == "tt.store"):
            return
        reason = f"operations not found: {', '.join(sorted(missing)) or 'source lines'}"
    except (LoweringError, ParseError, TypeError, AttributeError) as error:
        reason = str(error)
    raise EnvironmentProblem(
        f"Triton {triton.__version__} does not print IR as expected: {reason}",
        remedy="Install a supported Triton: 3.6 (torch 2.11), 3.7 (torch 2.13), 3.8 or 3.9 (torch 2.15).",
    )
