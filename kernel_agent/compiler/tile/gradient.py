"""`grad`: the adjoint of a tile function, as a function that kernels call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton.language as tl
from triton import JITFunction

from kernel_agent import __version__
from kernel_agent.compiler.emit.layout import bracketed
from kernel_agent.compiler.free_names import free_name
from kernel_agent.compiler.tile.derivation import Wanted, derived, named, result_count, result_names
from kernel_agent.compiler.tile.modules import defined
from kernel_agent.compiler.tile.signature import ELEMENTS, Constant, Signature, Tile, signature_of
from kernel_agent.compiler.tile.wrapper import flat
from kernel_agent.errors import InputError


def grad(fn: Any, wrt: Wanted = None, shapes: str | Mapping[str, Any] | None = None, *, name: str | None = None) -> Any:
    """The adjoint of a `@triton.jit` function of tiles and scalars, itself a `@triton.jit` function.

    It takes what `fn` takes and one cotangent for each result that is a float, in order. It returns the adjoint of each
    parameter in `wrt` (positions or names; all floats by default), in that order: with the parameter's extents, in
    float32 where its elements are narrower. `name` is what it is called, `{fn}_grad` by default. `fn` neither loads nor
    stores.

    `shapes` says what it is called with, such as `"x=[M, N] fp16, w=[N], eps=fp32, CAUSAL=True"`: elements are fp32
    where none is named, numbers are extents, and names stand for any from 2 to 4096 that make no difference to what
    `fn` does. The function's `source` is the text, which asserts all of this when it is compiled. Without `shapes` it
    is derived for what each call gives it, when the calling kernel is compiled: `source` only calls the compiler then,
    and `sources` has the texts by signature.

    Raises InputError for what is no tile function or has no such parameter, CannotDerive where there is no rule for
    what it does, or the adjoint would need memory.
    """
    if not isinstance(fn, JITFunction):
        raise InputError(
            f"{getattr(fn, '__name__', fn)!s} is no @triton.jit function",
            remedy="kernel_agent.gradients differentiates functions that launch kernels.",
        )
    called = name or f"{fn.fn.__name__}_grad"
    if shapes is None:
        return _lazy(fn, wrt, called)
    return _function(fn, signature_of(fn, shapes), wrt, called)


def _function(fn: Any, signature: Signature, wrt: Wanted, name: str) -> Any:
    source = derived(fn, signature, wrt, name)
    found = defined("\n".join((*source.imports, "", "", source.text)), {}, f"kernel_agent.grad of {fn.fn.__name__}")[
        name
    ]
    found.source = source.module_text
    return found


def _lazy(fn: Any, wrt: Wanted, name: str) -> Any:
    count = result_count(fn)
    if not count:
        raise InputError(
            f"how many tiles {fn.fn.__name__} returns is not seen from its text",
            remedy="Give shapes, as in grad(fn, shapes='x=[M, N]'), or return variables at one place.",
        )
    own = [parameter.name for parameter in fn.params]
    taken = set(own)
    results = result_names(fn) or ([f"out_{place}" for place in range(count)] if count > 1 else ["out"])
    cotangents = [free_name(f"d_{result}", taken) for result in results]
    head = [*(f"{p.name}: tl.constexpr" if p.is_constexpr else p.name for p in fn.params), *cotangents]
    lines = ["@triton.jit", *bracketed(f"def {name}", head, ":", 0)]
    said = f"Adjoints of `{fn.fn.__name__}`, derived by kernel-agent {__version__} for what a call gives it."
    lines.append(f'    """{said}"""')
    asked = "None" if wrt is None else f'"{", ".join(named(fn, wrt))}"'
    function = free_name(fn.fn.__name__, taken)
    lines += bracketed("return derived_adjoints", [function, asked, *own, *cotangents], "", 1)
    sources: dict[str, str] = {}
    names = {function: fn, "derived_adjoints": _deriving(name, sources)}
    found = defined("\n".join(lines) + "\n", names, f"kernel_agent.grad of {fn.fn.__name__}")[name]
    found.sources = sources
    found.source = "\n".join(("import triton", "import triton.language as tl", "", "", *lines, ""))
    return found


def _deriving(name: str, sources: dict[str, str]) -> Any:
    """What a kernel calls, when it is compiled, on a tile function and arguments of its adjoint. It notes `sources`."""
    known: dict[str, Any] = {}

    def derived_adjoints(
        function: Any, wrt: Any, *arguments: Any, _semantic: Any = None, _generator: Any = None
    ) -> Any:
        given: dict[str, Tile | Constant] = {}
        values = list(arguments)
        for place, parameter in enumerate(function.params):
            if parameter.is_constexpr:
                given[parameter.name] = Constant(tl.core._unwrap_if_constexpr(values[place]))
            else:
                values[place] = _semantic.to_tensor(values[place])
                given[parameter.name] = _tile(function, parameter.name, values[place])
        values[len(given) :] = flat(tuple(values[len(given) :]))
        asked = tl.core._unwrap_if_constexpr(wrt)
        wanted = None if asked is None else asked.split(", ")
        signature = Signature(given)
        key = f"{signature}|{wanted}"
        if key not in known:
            known[key] = _function(function, signature, wanted, name)
            sources[str(signature)] = known[key].source
        if len(known[key].params) != len(values):
            raise InputError(
                f"{function.fn.__name__} returns {len(values) - len(given)} values, not all of them floats",
                remedy=f"Give shapes, as in grad(fn, shapes='{signature}'): there are cotangents of floats alone then.",
            )
        return _generator.call_JitFunction(known[key], values, {})

    return tl.core.builtin(derived_adjoints)


def _tile(function: Any, name: str, value: Any) -> Tile:
    element = ELEMENTS.get(str(value.type.scalar)) if isinstance(value, tl.tensor) else None
    if element is None:
        raise InputError(
            f"{function.fn.__name__} is given {value.type} for `{name}`",
            remedy="A tile function is differentiated by tiles and scalars of floats and signed integers.",
        )
    shape = value.type.get_block_shapes() if value.type.is_block() else ()
    return Tile(tuple(int(extent) for extent in shape), element)
