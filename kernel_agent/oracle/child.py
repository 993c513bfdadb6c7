"""What runs in the truth child: the user's file without any backward, and nothing of a candidate.

Entries for `kernel_agent.sandbox.Job`. The parent imports this module for nothing but its entries' names.
A refusal (the forward itself fails somewhere) is an answer; any other failure ends the child, for the parent to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.errors import EnvironmentProblem, InputError, KernelAgentError
from kernel_agent.ir import (
    ExecOptions,
    Execution,
    FindingKind,
    IRError,
    LoweringError,
    Numerics,
    OutOfDeviceMemory,
    UnsupportedOp,
    declared_dtype,
    execute,
    made_on_host,
    standin,
)
from kernel_agent.ir.lower import know, lowered
from kernel_agent.oracle.digest import arguments_digest
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.oracle.leaves import LeafCall, leaf_call
from kernel_agent.oracle.plainform import plain_form
from kernel_agent.oracle.records import Point, Refusal, RefusalKind, error_form
from kernel_agent.oracle.values import other_number, redistribute, spaced, without_constants
from kernel_agent.oracle.wire import pack
from kernel_agent.pairs.arguments import argument_places, build_arguments
from kernel_agent.pairs.blame import blame, essence, first_line, line_in, module_path
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import holds_tensors, observe
from kernel_agent.pairs.spec import FileFacts, KernelSpec, ShapeEntry
from kernel_agent.pairs.values import Values

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


_OF_DEVICES = (FindingKind.FALSE_PROMISE,)
"""Findings that change nothing of what a forward computes in exact arithmetic: shapes that have them are asked."""


@dataclass(frozen=True)
class Stub:
    """The user's forward, imported and ready to call."""

    spec: KernelSpec
    module: ModuleType
    function: Callable[..., Any]

    def outputs(self, result: Any) -> tuple[Any, ...]:
        """The outputs among what the forward returned: a pair's forward also returns what it saves."""
        if self.spec.facts.is_pair:
            result = result[0]
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int | str]:
        """Where the arguments of a call stand, by their names."""
        return argument_places([fact.name for fact in self.spec.inputs], args, kwargs)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int | str]:
        """Where the floating tensor arguments that need gradients stand in a call, by their names in `spec.grads`."""
        places = self.places(args, kwargs)
        values = {name: args[place] if isinstance(place, int) else kwargs[place] for name, place in places.items()}
        return {
            name: places[name]
            for name in (fact.name for fact in self.spec.inputs)
            if name in self.spec.grads and isinstance(values.get(name), Tensor) and values[name].is_floating_point()
        }


def observed(call: Call) -> None:
    """Payload: `facts`, and `beside` as `observe` takes it. Sends one message with the `KernelSpec`."""
    torch.set_num_threads(1)
    with answered(call):
        facts = FileFacts.model_validate(call.payload["facts"])
        call.send({"spec": observe(facts, beside=call.payload["beside"]).model_dump(mode="json")})


def fitted(call: Call) -> None:
    """Payload: `spec`, `entries`, `max_elements`, `max_volume`. Sends one message with a `Fit` per entry."""
    with answered(call), standin():
        stub = load(call)
        for form in call.payload["entries"]:
            fit = fit_entry(
                ShapeEntry.model_validate(form),
                lambda entry: build_arguments(stub.module, entry, device="cpu", seed=0),
                max_elements=call.payload["max_elements"],
                max_volume=call.payload["max_volume"],
            )
            call.send({"fit": fit.model_dump(mode="json")})


def forwards(call: Call) -> None:
    """Payload: `spec`, `points`. Sends one message per point: a refusal, or arguments, outputs, `lowered` kernels."""
    known: set[str] = set()
    with answered(call), standin():
        stub = load(call)
        for form in call.payload["points"]:
            point = Point.model_validate(form)
            try:
                record, tensors = _forward(stub, point)
            except Refused as refused:
                call.send({"refusal": refused.refusal.model_dump(mode="json")})
            else:
                fresh = lowered(known)
                known.update(fresh)
                call.send({**record, "lowered": fresh}, tensors)


def gradients(call: Call) -> None:
    """Payload: `spec`, `lowered` kernels, `requests`: each a `point` and `sets`, lists of cotangent tensor keys (or
    None) per output.

    Sends one message per set, in order.
    """
    know(call.payload["lowered"])
    with answered(call), standin():
        stub = load(call)
        for request in call.payload["requests"]:
            try:
                start = time.perf_counter()
                found = _differentiable(stub, Point.model_validate(request["point"]))
                forward_s = time.perf_counter() - start
            except Refused as refused:
                for _ in request["sets"]:
                    call.send({"refusal": refused.refusal.model_dump(mode="json")})
                continue
            for keys in request["sets"]:
                cotangents = [None if key is None else call.tensors[key] for key in keys]
                start = time.perf_counter()
                grads = _backward(stub, found, cotangents)
                record = {
                    "names": list(grads),
                    "arguments": found.arguments,
                    "launches": list(found.launches),
                    "seconds": forward_s + time.perf_counter() - start,
                }
                call.send(record, {f"grad.{name}": grad for name, grad in grads.items()})


class Refused(Exception):
    """Carries a `Refusal` out of an evaluation."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@contextmanager
def answered(call: Call) -> Iterator[None]:
    """Send our own errors as records, so that the parent raises the same error with its place and remedy."""
    torch.set_num_threads(1)
    try:
        yield
    except Refused as refused:
        call.send({"refusal": refused.refusal.model_dump(mode="json")})
    except KernelAgentError as error:
        call.send({"error": error_form(error)})


def load(call: Call) -> Stub:
    """Import the truth source of the payload's spec."""
    spec = KernelSpec.model_validate(call.payload["spec"])
    module = load_truth(spec.facts, call.scratch)
    return Stub(spec, module, getattr(module, spec.facts.stub))


def arguments_at(stub: Stub, point: Point) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments at a point; raises `Refused` when make_args does, or where other values can stand for none of them."""
    try:
        built = build_arguments(stub.module, point.entry, device="cpu", seed=point.seed)
    except InputError as error:
        raise Refused(Refusal(kind=RefusalKind.ARGUMENTS, message=error.message, line=error.line)) from error
    args, kwargs = tuple(built.args), dict(built.kwargs)
    if point.values is not Values.AS_MADE:
        places = stub.leaves(args, kwargs).values()
        leaves = [args[place] if isinstance(place, int) else kwargs[place] for place in places]
        if point.values is Values.SPACED:
            return _spaced(args, kwargs, dict(zip(places, leaves, strict=True)))
        if point.values is Values.NUMBERS:
            return _with_other_numbers(stub, args, kwargs, without_constants((v.detach() for v in leaves), point.seed))
        if not redistribute((leaf.detach() for leaf in leaves), point.values):
            raise Refused(Refusal(kind=RefusalKind.VALUES, message="no argument is plain random numbers"))
    return args, kwargs


def _with_other_numbers(
    stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any], changed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other floats and seeds among them: scales, probabilities. Raises `Refused` without any,
    where no tensor was `changed` either.
    """
    names = {place: name for name, place in stub.places(args, kwargs).items()}
    positional = tuple(other_number(value, names.get(place, "")) for place, value in enumerate(args))
    named = {name: other_number(value, name) for name, value in kwargs.items()}
    given, made = (*args, *kwargs.values()), (*positional, *named.values())
    if not changed and all(one is other for one, other in zip(given, made, strict=True)):
        message = "no argument is a float, a seed or one number throughout"
        raise Refused(Refusal(kind=RefusalKind.VALUES, message=message))
    return positional, named


def _spaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: dict[int | str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those that get a gradient in rows apart. Raises `Refused` where none has rows."""
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    apart = dict(zip(map(id, others), spaced([other.detach() for other in others]), strict=True))
    made = {place: apart[id(leaf)] for place, leaf in leaves.items()}
    if all(made[place].stride() == leaf.stride() for place, leaf in leaves.items()):
        raise Refused(Refusal(kind=RefusalKind.VALUES, message="no argument has rows that could stand apart"))
    positional = tuple(made.get(place, value) for place, value in enumerate(args))
    return positional, {name: made.get(name, value) for name, value in kwargs.items()}


def run(
    stub: Stub,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: tuple[int | str, ...] = (),
    *,
    sanitize: bool = True,
    numerics: Numerics = Numerics.EXACT,
) -> Execution:
    """Execute the forward; raises `Refused` when it fails."""
    try:
        options = ExecOptions(sanitize=sanitize, numerics=numerics)
        return execute(stub.function, args, kwargs, leaves=leaves, options=options)
    except (InputError, EnvironmentProblem):
        raise
    except (MemoryError, torch.OutOfMemoryError, OutOfDeviceMemory) as error:
        raise Refused(Refusal(kind=RefusalKind.RESOURCES, message=first_line(error))) from error
    except UnsupportedOp as error:
        raise Refused(Refusal(kind=RefusalKind.UNSUPPORTED, message=error.message, line=error.line)) from error
    except LoweringError as error:
        raise Refused(Refusal(kind=RefusalKind.COMPILE, message=essence(error.message), line=error.line)) from error
    except IRError as error:
        raise Refused(Refusal(kind=RefusalKind.STUB, message=error.message, line=error.line)) from error
    except Exception as error:  # the user's code again
        raise Refused(
            Refusal(kind=RefusalKind.STUB, message=first_line(error), line=line_in(error, module_path(stub.module)))
        ) from error


def _forward(stub: Stub, point: Point) -> tuple[dict[str, Any], dict[str, Tensor]]:
    args, kwargs = arguments_at(stub, point)
    start = time.perf_counter()
    execution = run(stub, args, kwargs)
    seconds = time.perf_counter() - start
    outputs = stub.outputs(execution.result)
    nested = [i for i, output in enumerate(outputs) if holds_tensors(output)]
    if nested:
        message = f"output {nested[0]} is a {type(outputs[nested[0]]).__name__} that holds tensors"
        raise Refused(Refusal(kind=RefusalKind.STUB, message=message, line=stub.spec.facts.stub_line))
    told = tuple(output if isinstance(output, Tensor) else plain_form(output) for output in outputs)
    tensors: dict[str, Tensor] = {}
    arguments = [pack(args, tensors, "args"), pack(kwargs, tensors, "kwargs")]
    record = {
        "args": arguments[0],
        "kwargs": arguments[1],
        "arguments": arguments_digest(arguments, tensors),
        "outputs": pack(told, tensors, "outputs", tensor=plain),
        "forms": [_form(stub, i, output, execution, outputs[:i]) for i, output in enumerate(outputs)],
        "launches": [launch.kernel for launch in execution.launches],
        "torch_ops": list(execution.torch_ops),
        "findings": [
            *(finding.message for finding in execution.findings if finding.kind not in _OF_DEVICES),
            *execution.unpromised,
        ],
        "mutated": list(execution.mutated),
        "seconds": seconds,
    }
    return record, tensors


def plain(image: Tensor) -> Tensor:
    """An image as an ordinary dense tensor of its float64 values."""
    return image.detach().as_subclass(Tensor).contiguous()


def _share(output: Tensor, others: Iterable[Any]) -> bool:
    """Whether an output lies in the memory of one of the others."""
    mine = output.untyped_storage()._cdata
    return any(isinstance(other, Tensor) and other.untyped_storage()._cdata == mine for other in others)


def _form(
    stub: Stub, position: int, output: Any, execution: Execution, earlier: tuple[Any, ...]
) -> dict[str, Any] | None:
    if not isinstance(output, Tensor):
        return None
    dtype = declared_dtype(output)
    observed_fact = stub.spec.outputs[position] if position < len(stub.spec.outputs) else None
    return {
        "shape": list(output.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "differentiable": dtype.is_floating_point and observed_fact is not None and observed_fact.needs_grad,
        "strides": list(output.stride()),
        "on_host": made_on_host(output),
        "shares": _share(output, (*execution.arguments.values(), *earlier)),
    }


@dataclass(frozen=True)
class Differentiable:
    """One execution that gradients can be taken of."""

    leaves: dict[str, Tensor]
    """By gradient name, float64."""
    outputs: tuple[Any, ...]
    """Connected to the leaves; floating ones float64."""
    arguments: str
    """See `arguments_digest`."""
    launches: tuple[str, ...] = ()


def _differentiable(stub: Stub, point: Point) -> Differentiable:
    args, kwargs = arguments_at(stub, point)
    tensors: dict[str, Tensor] = {}
    digest = arguments_digest([pack(args, tensors, "args"), pack(kwargs, tensors, "kwargs")], tensors)
    places = stub.leaves(args, kwargs)
    if stub.spec.custom_gradient:
        prepared = leaf_call(args, kwargs, places)
        return Differentiable(prepared.leaves, _surrogate(stub, prepared), digest)
    execution = run(stub, args, kwargs, tuple(places.values()))
    leaves = {name: execution.leaves[place] for name, place in places.items()}
    launches = tuple(launch.kernel for launch in execution.launches)
    return Differentiable(leaves, stub.outputs(execution.result), digest, launches)


def _surrogate(stub: Stub, prepared: LeafCall) -> tuple[Any, ...]:
    """Outputs of the declared gradient: autograd of `surrogate` in float64 on the same values."""
    try:
        with torch.enable_grad():
            result = stub.module.surrogate(*prepared.args, **prepared.kwargs)
    except Exception as error:  # the user's code
        raise blame(error, stub.module, "`surrogate` fails", "It takes the stub's arguments, as float64.") from error
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(outputs) != len(stub.spec.outputs):
        raise _unlike_the_stub(stub, f"{len(outputs)} outputs instead of {len(stub.spec.outputs)}")
    return outputs


def _unlike_the_stub(stub: Stub, what: str) -> InputError:
    remedy = "Return one value per output of the stub, of the same shape."
    return InputError(f"`surrogate` returns {what}", remedy=remedy, path=stub.spec.facts.path)


def _backward(stub: Stub, call: Differentiable, cotangents: list[Tensor | None]) -> dict[str, Tensor]:
    """Exact gradients for one set of cotangents; zeros where nothing connects a leaf with an output."""
    leaves, outputs = call.leaves, call.outputs
    chosen = [
        (output, cotangent.to(torch.float64))
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if cotangent is not None and isinstance(output, Tensor) and output.requires_grad
    ]
    for output, cotangent in chosen:
        if output.shape != cotangent.shape:
            raise _unlike_the_stub(stub, f"shape {tuple(output.shape)} instead of {tuple(cotangent.shape)}")
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if chosen and leaves:
        found = torch.autograd.grad(
            [output for output, _ in chosen],
            list(leaves.values()),
            [cotangent for _, cotangent in chosen],
            retain_graph=True,
            allow_unused=True,
        )
    return {
        name: plain(torch.zeros_like(leaf) if grad is None else grad)
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
