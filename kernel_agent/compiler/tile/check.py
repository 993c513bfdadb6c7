"""`check_tile`: whether a tile function and its adjoint are those of a torch function, in exact arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.tile.cases import INTEGERS, Inputs, concrete, cotangents_of, inputs_of
from kernel_agent.compiler.tile.derivation import Wanted, chosen, result_names
from kernel_agent.compiler.tile.signature import Constant, Signature, Tile, signature_of
from kernel_agent.compiler.tile.verdict import TileProblem, TileVerdict, difference, other_shape
from kernel_agent.compiler.tile.wrapper import Wrapped, wrapped
from kernel_agent.errors import InputError
from kernel_agent.ir.capture.images import as_image
from kernel_agent.ir.types import STORED_FLOATS
from kernel_agent.library import gradients, outputs

Reference = Callable[..., Tensor | tuple[Tensor, ...]]


def check_tile(
    fn: Any,
    grad_fn: Any,
    torch_fn: Reference | None = None,
    *,
    shapes: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    wrt: Wanted = None,
    seeds: Sequence[int] = (0, 1),
    inputs: Inputs | None = None,
) -> TileVerdict:
    """Compare a forward and backward pair of `@triton.jit` tile functions with a torch function and its autograd.

    `grad_fn` takes what `fn` takes and a cotangent for each result that is a float, and returns the adjoints of `wrt`
    in that order (positions or names; all floats by default). `torch_fn` takes the tensors and scalars of `fn` in
    order, float64, and constexprs by name where it has them, and returns what `fn` returns; without one, what `fn`
    computes is taken for right, and its derivative by the executor for the truth. `shapes` is written as for `grad`, or
    several of them in a list. Inputs are normal, those of scalars from 0.5 to 1.5, tiles too where the truth is not
    finite else; `inputs` maps names to functions that make other ones of them.

    Both functions run in float64 from their Triton IR, without a GPU: what rounding does is not seen. The rule is that
    of `kernel_agent.gate.rule`, relative 1e-5. Raises InputError for what does not fit, IRError for what cannot be run.
    """
    listed = [shapes] if isinstance(shapes, (str, Mapping)) else list(shapes)
    found: dict[str, TileProblem] = {}
    cases = 0
    for signature in (one for text in listed for one in concrete(fn, signature_of(fn, text))):
        names = chosen(fn, signature, wrt)
        pair = _Pair.of(fn, grad_fn, signature, names)
        for name, message in pair.misfits():
            found.setdefault(name, TileProblem(name, message, str(signature)))
        for seed in seeds:
            truth = _truth(pair, torch_fn, seed, inputs or {})
            cases += _compare(pair, truth, f"{signature}, seed {seed}", seed, found)
    against = "the executor's derivative" if torch_fn is None else getattr(torch_fn, "__name__", "torch")
    return TileVerdict(tuple(found.values()), cases, against)


@dataclass(frozen=True)
class _Pair:
    """Kernels around a function and its adjoint, at one signature."""

    forward: Wrapped
    backward: Wrapped
    wrt: tuple[str, ...]

    @classmethod
    def of(cls, fn: Any, grad_fn: Any, signature: Signature, wrt: tuple[str, ...]) -> _Pair:
        forward = wrapped(fn, signature, result_names(fn), loads_scalars=True)
        own = [parameter.name for parameter in fn.params]
        theirs = [parameter.name for parameter in grad_fn.params]
        pulled = [tile for tile in forward.results.values() if tile.is_float]
        if len(theirs) != len(own) + len(pulled):
            raise InputError(
                f"{grad_fn.fn.__name__} takes {len(theirs)} arguments instead of {len(own) + len(pulled)}",
                remedy=f"It takes those of {fn.fn.__name__} ({', '.join(own)}), then {len(pulled)} cotangent(s).",
            )
        given: dict[str, Tile | Constant] = dict(
            zip(theirs, [*(signature.parameters[name] for name in own), *pulled], strict=True)
        )
        backward = wrapped(grad_fn, Signature(given), loads_scalars=True)
        if len(backward.results) != len(wrt):
            raise InputError(
                f"{grad_fn.fn.__name__} returns {len(backward.results)} adjoints instead of {len(wrt)}",
                remedy=f"Return those of {', '.join(wrt)}, or name in wrt what it returns.",
            )
        return cls(forward, backward, wrt)

    def misfits(self) -> list[tuple[str, str]]:
        """Parameters whose adjoint has other extents than they have, and what to say of it."""
        found = []
        for name, adjoint in zip(self.wrt, self.backward.results.values(), strict=True):
            shape, wanted = adjoint.shape({}), self.forward.signature.tiles[name].shape({})
            if shape != wanted:
                found.append((name, other_shape(name, shape, wanted)))
        return found


@dataclass(frozen=True)
class _Truth:
    """What both functions ought to give for some inputs."""

    values: dict[str, Tensor]
    """Inputs, float64 where they are floats."""
    results: tuple[Tensor, ...]
    """Of all results."""
    pull: Callable[[Sequence[Tensor]], list[Tensor]]
    """From cotangents of the results that are floats to the adjoints of `wrt`."""


def _truth(pair: _Pair, reference: Reference | None, seed: int, made: Inputs) -> _Truth:
    """At normal inputs, or at positive ones where it is not finite there. Raises InputError where neither will do."""
    for positive in (False, True):
        values = inputs_of(pair.forward.signature, seed, made, positive=positive)
        found = _by_executor(pair, values) if reference is None else _by_torch(pair, reference, values)
        ones = [torch.ones_like(result) for result in found.results if result.is_floating_point()]
        if all(bool(tensor.isfinite().all()) for tensor in (*found.results, *found.pull(ones))):
            return found
    raise InputError(
        "the truth has no finite value at random inputs",
        remedy="Say in inputs what to make of them: inputs={'x': lambda x: 0.1 * x}.",
    )


def _by_executor(pair: _Pair, values: dict[str, Tensor]) -> _Truth:
    stub, tensors = _stub(pair.forward, values), _declared(pair.forward, values)

    def pull(cotangents: Sequence[Tensor]) -> list[Tensor]:
        given = iter(cotangents)
        every = [next(given) if tile.is_float else None for tile in pair.forward.results.values()]
        places = sorted(list(values).index(name) for name in pair.wrt)
        found = dict(zip(places, gradients(stub, *tensors, cotangents=every, wrt=places).values(), strict=True))
        return [found[list(values).index(name)] for name in pair.wrt]

    return _Truth(values, outputs(stub, *tensors), pull)


def _by_torch(pair: _Pair, reference: Reference, values: dict[str, Tensor]) -> _Truth:
    tiles = pair.forward.signature.tiles
    leaves = {name: value.bool() if tiles[name].element == "i1" else value.clone().requires_grad_(name in pair.wrt)
              for name, value in values.items()}  # fmt: skip
    found = reference(*leaves.values(), **_accepted(reference, pair.forward.signature.constants))
    results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    shapes = [tile.shape({}) for tile in pair.forward.results.values()]
    if [tuple(result.shape) for result in results] != shapes:
        raise InputError(
            f"the torch function returns {[list(result.shape) for result in results]}, "
            f"the tile function {[list(shape) for shape in shapes]}",
            remedy="Both must return the same tiles, in the same order.",
        )

    def pull(cotangents: Sequence[Tensor]) -> list[Tensor]:
        floats = [result for result in results if result.is_floating_point()]
        pairs = [(r, g) for r, g in zip(floats, cotangents, strict=True) if r.requires_grad]
        wanted = [leaves[name] for name in pair.wrt]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad(
                [r for r, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True, allow_unused=True
            )
        return [torch.zeros_like(w) if g is None else g.detach() for g, w in zip(found, wanted, strict=True)]

    return _Truth(values, tuple(result.detach() for result in results), pull)


def _accepted(reference: Reference, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The constexprs that a function has parameters for; functions of C tell none."""
    try:
        names = set(inspect.signature(reference).parameters)
    except ValueError:
        return {}
    return {name: value for name, value in constants.items() if name in names}


def _compare(pair: _Pair, truth: _Truth, case: str, seed: int, found: dict[str, TileProblem]) -> int:
    """Compare a pair at some inputs; what is wrong goes to `found`. Returns how many cotangents were pulled back."""
    forward = outputs(_stub(pair.forward, truth.values), *_declared(pair.forward, truth.values))
    for name, given, wanted in zip(pair.forward.results, forward, truth.results, strict=True):
        wanted = wanted.double()
        problem = difference(f"the result `{name}`", given.double(), wanted, _rms(wanted))
        if problem is not None and name not in found:
            found[name] = TileProblem(name, problem, case)
    shapes = [tile.shape({}) for tile in pair.forward.results.values() if tile.is_float]
    scales: list[float] = []
    count = 0
    for cotangents in cotangents_of(shapes, seed):
        wanted_all = truth.pull(cotangents.tensors)
        scales = scales or [_rms(wanted) for wanted in wanted_all]
        names = list(pair.backward.signature.tiles)[len(truth.values) :]
        values = dict(zip(pair.backward.signature.tiles, truth.values.values(), strict=False))
        values.update(zip(names, cotangents.tensors, strict=True))
        adjoints = outputs(_stub(pair.backward, values), *_declared(pair.backward, values))
        size = max((_rms(tensor) for tensor in cotangents.tensors), default=0.0)
        for name, given, wanted, scale in zip(pair.wrt, adjoints, wanted_all, scales, strict=True):
            if name in found:  # which has other extents perhaps
                continue
            problem = difference(f"the adjoint of `{name}`", given, wanted, scale * size)
            if problem is not None:
                found[name] = TileProblem(name, problem, f"{case}, {cotangents.label}")
        count += 1
    return count


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _declared(around: Wrapped, values: Mapping[str, Tensor]) -> list[Tensor]:
    """Arguments of a stub: not rounded, but of the dtypes that the signature says."""
    tiles = around.signature.tiles
    return [as_image(value, _memory(tiles[name])) for name, value in values.items()]


def _memory(tile: Tile) -> torch.dtype:
    return STORED_FLOATS[tile.element] if tile.is_float else INTEGERS[tile.element]


def _stub(around: Wrapped, values: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """What launches a kernel around a tile function. It takes tiles and scalars in the order of `values`."""

    def stub(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = {name: torch.empty(tile.shape({}), dtype=_memory(tile)) for name, tile in around.results.items()}
        given = {**around.signature.constants, **dict(zip(values, tensors, strict=True)), **results}
        around.kernel[(1,)](*(given[parameter.name.removesuffix("_ptr")] for parameter in around.kernel.params))
        return tuple(results.values())

    return stub
