"""`observe`: run a file's stub once, at its smallest SWEEP entry, and write down what it takes, launches and returns.

Imports and runs the user's code, so it belongs into a child process; the parent only ever sees the `KernelSpec`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kernel_agent.errors import InputError
from kernel_agent.ir import Execution, IRError, LaunchError, LoweringError, declared_dtype, execute, standin
from kernel_agent.pairs.arguments import Arguments, argument_names, build_arguments
from kernel_agent.pairs.blame import blame, module_path, refused_kernel
from kernel_agent.pairs.generality import Look, general, too_many
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.outputnames import output_names
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, FileFacts, KernelSpec, ShapeEntry
from kernel_agent.pairs.sweep import read_sweep, smallest
from kernel_agent.pairs.syntax import assigned_values, parse

_BESIDE = 1 << 29
"""Bytes of address space that looks beside the smallest entry may add."""


def observe(facts: FileFacts, *, beside: bool = True) -> KernelSpec:
    """Import the file under the stand-in device, make the smallest arguments, call the stub once and describe it.

    `beside` runs it at other small sizes as well, to tell which sizes of tensors follow which dims.

    Raises `InputError` with the place in the user's file for what only a run shows: an import, make_args or stub that
    raises; a kernel that Triton refuses; a gradient asked of an argument that is no floating tensor; no launch; no
    differentiable output.
    Raises `IRError` for a kernel that the executor cannot run.
    """
    with tempfile.TemporaryDirectory(prefix="kernel_agent_") as scratch:
        folder = Path(scratch)
        try:
            return _observe(facts, folder, beside)
        except InputError as error:
            if error.path is None or error.path.parent != folder:
                raise
            raise InputError(error.message, remedy=error.remedy, path=facts.path, line=error.line) from error


def _observe(facts: FileFacts, folder: Path, beside: bool) -> KernelSpec:
    module = load_truth(facts, folder, compiles=False)
    sweep = read_sweep(module.SWEEP, facts.path, sweep_node(facts))
    entry = smallest(sweep)
    stub = getattr(module, facts.stub)
    with standin():
        arguments = build_arguments(module, entry, device="cpu", seed=0)
        inputs = _inputs(facts, stub, arguments)
        optional = _given_elsewhere(module, facts, sweep, entry, inputs)
        execution = _run(module, stub, arguments, _places(inputs, arguments))
        left_out = (name for name in optional if name not in {item.name for item in inputs})
        inputs += tuple(describe_value(name, None) for name in left_out)
        grads = _grads(facts, inputs, optional)
    _refuse_empty(facts, entry, inputs, execution)
    if not execution.launches:
        raise InputError(
            f"the stub `{facts.stub}` launches no Triton kernel at {entry.label}",
            remedy="Mark the function that launches: `kernel[grid](...)`. Where that stands in a loop, have every "
            "entry of SWEEP give the loop a trip.",
            path=facts.path,
            line=facts.stub_line,
        )
    seen = Look(entry, inputs, _outputs(facts, _returned(facts, execution)))
    if beside:
        with standin(), _little_memory():
            seen = general(seen, sweep, lambda other: _look(module, facts, other))
    return KernelSpec(
        facts=facts,
        sweep=sweep,
        inputs=seen.inputs,
        outputs=seen.outputs,
        returns_tuple=isinstance(_result(facts, execution), (tuple, list)),
        grads=grads,
        launches=tuple(launch.kernel for launch in execution.launches),
        mutated=execution.mutated,
        custom_gradient=facts.has_surrogate,
        torch_ops=tuple(execution.torch_ops),
    )


def _refuse_empty(facts: FileFacts, entry: ShapeEntry, inputs: tuple[ArgumentFacts, ...], execution: Execution) -> None:
    """Where an input has no elements, a stub that is right launches nothing, or nothing that gives a gradient."""
    empty = next((item for item in inputs if item.needs_grad and 0 in item.shape), None)
    if empty is None:
        return
    depends = any(isinstance(value, torch.Tensor) and value.requires_grad for value in _returned(facts, execution))
    if execution.launches and (depends or facts.has_surrogate):
        return
    node = sweep_node(facts)
    raise InputError(
        f"`{empty.name}` has no elements (shape {empty.shape}) at {entry.label}, the smallest entry of SWEEP: "
        "no output depends on it there",
        remedy="Let the smallest entry give every tensor at least one element: there gradients are looked for first.",
        path=facts.path,
        line=None if node is None else node.lineno,
    )


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Sizes of our own choosing may mean anything: what asks for more than `_BESIDE` fails and fills no memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    modest = pages * resource.getpagesize() + _BESIDE
    resource.setrlimit(resource.RLIMIT_AS, (modest if soft == resource.RLIM_INFINITY else min(soft, modest), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _look(module: ModuleType, facts: FileFacts, entry: ShapeEntry) -> Look:
    """What arguments and outputs look like at another entry. Raises whatever the user's code raises there, and
    `InputError` where the arguments are many."""
    stub = getattr(module, facts.stub)
    arguments = build_arguments(module, entry, device="cpu", seed=0)
    inputs = _inputs(facts, stub, arguments)
    if too_many(inputs):
        raise InputError(f"the stub would run long at {entry.label}", remedy="Look at smaller sizes.", path=facts.path)
    execution = _run(module, stub, arguments, _places(inputs, arguments))
    return Look(entry, inputs, _outputs(facts, _returned(facts, execution)))


def _result(facts: FileFacts, execution: Execution) -> Any:
    return _pair_outputs(execution.result, facts) if facts.is_pair else execution.result


def _returned(facts: FileFacts, execution: Execution) -> tuple[Any, ...]:
    """The outputs in position."""
    result = _result(facts, execution)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def sweep_node(facts: FileFacts) -> ast.expr | None:
    """The syntax of SWEEP, for the lines of messages."""
    values = assigned_values(parse(facts.source), "SWEEP")
    return values[-1] if values else None


def _inputs(facts: FileFacts, stub: Callable[..., Any], arguments: Arguments) -> tuple[ArgumentFacts, ...]:
    """Describe the arguments; raises when a wanted gradient cannot be."""
    try:
        names = argument_names(stub, arguments)
    except TypeError as error:
        raise InputError(
            f"make_args does not fit the stub: `{facts.stub}` got {error}",
            remedy="Write `ctx=None`, after the other parameters: `ctx` is never filled."
            if _wants_ctx(stub)
            else "Return the stub's arguments in order, or (args, kwargs).",
            path=facts.path,
            line=facts.stub_line,
        ) from None
    values = dict(zip(names, (*arguments.args, *arguments.kwargs.values()), strict=True))
    wanted = _wanted(facts, names)
    for name in wanted or ():
        _check_wanted(name, values, facts)
    inputs = tuple(
        describe_value(name, value, _floating(value) and (wanted is None or name in wanted))
        for name, value in values.items()
    )
    if not any(item.needs_grad for item in inputs):
        if wanted:
            raise _not_given(wanted[0], names, facts)
        nested = [name for name, value in values.items() if holds_tensors(value)]
        if nested:
            raise _nested_argument(nested[0], values[nested[0]], facts)
        raise InputError(
            f"nothing is differentiable: `{facts.stub}` gets no floating tensor",
            remedy="Let make_args return a floating point tensor for at least one argument.",
            path=facts.path,
            line=facts.stub_line,
        )
    return inputs


def _wants_ctx(stub: Callable[..., Any]) -> bool:
    ctx = inspect.signature(stub).parameters.get("ctx")
    return ctx is not None and ctx.default is inspect.Parameter.empty


def _wanted(facts: FileFacts, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """The wanted arguments by name; None: all floating tensors. Positions count the stub's parameters without `ctx`."""
    if facts.inputs_require_grad is None:
        return None
    positional = list(facts.parameters)
    starred = [name for name in names if "[" in name]
    if starred:  # what `*args` takes in stands in its place
        place = positional.index(starred[0].partition("[")[0])
        positional[place : place + 1] = starred
    for item in facts.inputs_require_grad:
        if isinstance(item, int) and item >= len(positional):
            raise InputError(
                f"inputs_require_grad names argument {item}, but `{facts.stub}` gets {len(positional)}",
                remedy="Correct the position, or let make_args pass the argument.",
                path=facts.path,
                line=facts.stub_line,
            )
    return tuple(item if isinstance(item, str) else positional[item] for item in facts.inputs_require_grad)


def _check_wanted(name: str, values: dict[str, Any], facts: FileFacts) -> None:
    value = values.get(name)
    if _floating(value) or value is None:  # another entry may give it
        return
    if holds_tensors(value):
        raise _nested_argument(name, value, facts)
    if isinstance(value, torch.Tensor):
        dtype = str(declared_dtype(value)).removeprefix("torch.")
        problem, remedy = f"a tensor of {dtype}", "Only floating point tensors have gradients; take it out."
    else:
        problem, remedy = f"which is no tensor but {value!r:.60}", "Only tensors have gradients; take it out."
    raise InputError(
        f"a gradient is wanted of `{name}`, {problem}", remedy=remedy, path=facts.path, line=facts.stub_line
    )


def _given_elsewhere(
    module: ModuleType,
    facts: FileFacts,
    sweep: tuple[ShapeEntry, ...],
    first: ShapeEntry,
    inputs: tuple[ArgumentFacts, ...],
) -> tuple[str, ...]:
    """Floating tensors of other entries that the first one gives None for, or does not give. The others are looked at
    in the sizes of the first, where that can be."""
    given = {item.name for item in inputs if item.kind is not ArgumentKind.NONE}
    stub, found = getattr(module, facts.stub), dict[str, None]()
    sizes = {name: value for name, value in first.dims.items() if type(value) is int}
    for other in sweep:
        if other is first or given.union(found).issuperset(facts.parameters):
            continue
        dims = {name: sizes.get(name, value) if type(value) is int else value for name, value in other.dims.items()}
        for entry in (other.model_copy(update={"dims": dims}), other):
            try:
                with _little_memory():
                    arguments = build_arguments(module, entry, device="cpu", seed=0)
                names = argument_names(stub, arguments)
            except Exception:  # the sizes of one entry with the flags of another need not fit; the gate says what fails
                continue
            values = dict(zip(names, (*arguments.args, *arguments.kwargs.values()), strict=True))
            tensors = [name for name, value in values.items() if _floating(value) and name in facts.parameters]
            found.update(dict.fromkeys(name for name in tensors if name not in given))
            break
    return tuple(found)


def _not_given(name: str, names: Sequence[str], facts: FileFacts) -> InputError:
    """`names`: the arguments of a call."""
    problem = "which is None at every SWEEP entry" if name in names else "which make_args does not pass"
    return InputError(
        f"a gradient is wanted of `{name}`, {problem}",
        remedy="Pass a tensor at one entry or more, or take it out of inputs_require_grad.",
        path=facts.path,
        line=facts.stub_line,
    )


def _grads(facts: FileFacts, inputs: tuple[ArgumentFacts, ...], optional: tuple[str, ...]) -> tuple[str, ...]:
    """Gradient names in argument order; a pair's META says its own order. `optional`: as of `_given_elsewhere`."""
    names = [item.name for item in inputs]
    wanted = _wanted(facts, tuple(names))
    given = {*optional, *(item.name for item in inputs if item.needs_grad)}
    for name in wanted or ():
        if name not in given:
            raise _not_given(name, names, facts)
    if facts.is_pair and facts.inputs_require_grad is not None:
        return tuple(str(name) for name in facts.inputs_require_grad)
    return tuple(name for name in names if name in given and (wanted is None or name in wanted))


def _places(inputs: tuple[ArgumentFacts, ...], arguments: Arguments) -> tuple[int | str, ...]:
    places: list[int | str] = [*range(len(arguments.args)), *arguments.kwargs]
    return tuple(place for item, place in zip(inputs, places, strict=True) if item.needs_grad)


def _run(
    module: ModuleType, stub: Callable[..., Any], arguments: Arguments, leaves: tuple[int | str, ...]
) -> Execution:
    try:
        return execute(stub, arguments.args, arguments.kwargs, leaves=leaves)
    except (LoweringError, LaunchError) as error:
        raise refused_kernel(error, module_path(module)) from error
    except IRError:
        raise
    except Exception as error:
        raise blame(error, module, f"the stub `{stub.__name__}` fails", "Correct the stub or make_args.") from error


def _pair_outputs(result: Any, facts: FileFacts) -> Any:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], (tuple, list)):
        raise InputError(
            "`forward` does not return (outputs, saved)",
            remedy="Return a tuple of two: the outputs (one value or a tuple), and the flat tuple that backward gets.",
            path=facts.path,
            line=facts.stub_line,
        )
    return result[0]


def _outputs(facts: FileFacts, values: tuple[Any, ...]) -> tuple[ArgumentFacts, ...]:
    beyond = [position for position in facts.nondiff_outputs if position >= len(values)]
    if beyond:
        raise InputError(
            f"nondiff_outputs names output {beyond[0]}, but `{facts.stub}` returns {len(values)} output(s)",
            remedy=f"Positions run from 0 to {len(values) - 1}.",
            path=facts.path,
            line=facts.stub_line,
        )
    for value in values:
        if holds_tensors(value):
            raise InputError(
                f"`{facts.stub}` returns a {type(value).__name__} that holds tensors, which is not supported",
                remedy="Return every tensor by itself: one, or several in a flat tuple, such as `return y, stats`.",
                path=facts.path,
                line=facts.stub_line,
            )
    if all(value is None for value in values):
        raise InputError(
            f"`{facts.stub}` returns nothing",
            remedy="Return the tensors that its kernels write: `return y`.",
            path=facts.path,
            line=facts.stub_line,
        )
    names = output_names(facts, len(values))
    outputs = tuple(
        describe_value(
            name,
            value,
            _floating(value) and position not in facts.nondiff_outputs and (value.requires_grad or facts.has_surrogate),
        )
        for position, (name, value) in enumerate(zip(names, values, strict=True))
    )
    if not any(item.needs_grad for item in outputs):
        raise InputError(
            f"nothing is differentiable: no output of `{facts.stub}` depends on an input whose gradient is wanted",
            remedy="Return the result, floating and not detached; `nondiff_outputs` must leave at least one.",
            path=facts.path,
            line=facts.stub_line,
        )
    return outputs


def _nested_argument(name: str, value: Any, facts: FileFacts) -> InputError:
    return InputError(
        f"`{name}` is a {type(value).__name__} of tensors, and gradients of tensors inside of one are not supported",
        remedy=f"Pass each tensor as an argument of its own, as in `def {facts.stub}(*{name})`, or one stacked tensor.",
        path=facts.path,
        line=facts.stub_line,
    )


def holds_tensors(value: Any) -> bool:
    """Whether tensors lie inside a tuple, list or dict: such a value has no plain form that says their content."""
    return not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def describe_value(name: str, value: Any, needs_grad: bool = False) -> ArgumentFacts:
    """Facts of one argument or output as it is: kind, declared dtype, shape."""
    if isinstance(value, torch.Tensor):
        dtype = str(declared_dtype(value)).removeprefix("torch.")
        kind = ArgumentKind.TENSOR
        shape, dense = tuple(value.shape), value.is_contiguous()
        return ArgumentFacts(name=name, kind=kind, dtype=dtype, shape=shape, needs_grad=needs_grad, dense=dense)
    if value is None:
        return ArgumentFacts(name=name, kind=ArgumentKind.NONE)
    return ArgumentFacts(name=name, kind=ArgumentKind.OTHER, text=repr(value)[:200])


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and declared_dtype(value).is_floating_point
