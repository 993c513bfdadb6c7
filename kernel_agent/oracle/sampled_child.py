"""Truth-child half of a look at the size that was asked for: a few programs of the forward, beside the reference.

Entries for `kernel_agent.sandbox.Job`, as in `child`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.ir import IRError, OutOfDeviceMemory, standin
from kernel_agent.ir.sampled import Sampled, execute_sampled
from kernel_agent.oracle.child import Refused, Stub, answered, arguments_at, load, plain
from kernel_agent.oracle.leaves import leaf_call
from kernel_agent.oracle.records import Point, Refusal, RefusalKind
from kernel_agent.oracle.reference import called
from kernel_agent.pairs.blame import first_line

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def sampled(call: Call) -> None:
    """Payload: `spec`, `points`, `programs`, `max_elements`, `max_reference_elements`.

    Sends one message per point, a refusal or a `Look`.
    """
    with answered(call), standin():
        stub = load(call)
        for form in call.payload["points"]:
            try:
                record = _look(stub, Point.model_validate(form), call.payload)
            except Refused as refused:
                call.send({"refusal": refused.refusal.model_dump(mode="json")})
            else:
                call.send({"look": record})


def _look(stub: Stub, point: Point, payload: Mapping[str, Any]) -> dict[str, Any]:
    args, kwargs = arguments_at(stub, point)
    elements = sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    if elements > payload["max_elements"]:
        raise Refused(Refusal(kind=RefusalKind.RESOURCES, message=f"its arguments have {elements} elements"))
    places = stub.leaves(args, kwargs)
    seen = _run(stub, (args, kwargs), tuple(places.values()), payload["programs"])
    outputs = stub.outputs(seen.execution.result)
    known = _by_output(outputs, seen)
    parts = {
        stub.spec.outputs[i].name: [int(mask.sum()), mask.numel()]
        for i, mask in known.items()
        if i < len(stub.spec.outputs)
    }
    record: dict[str, Any] = {
        "shares": [str(share) for share in seen.shares],
        "parts": parts,
        "findings": [finding.message for finding in seen.execution.findings],
    }
    if stub.spec.facts.has_reference and elements > payload["max_reference_elements"]:
        record["reference"] = "too much work for a CPU"
    elif stub.spec.facts.has_reference:
        record |= _beside_reference(stub, (args, kwargs), places, seen, known)
    return record


def _run(stub: Stub, arguments: Arguments, leaves: tuple[int | str, ...], programs: int) -> Sampled:
    try:
        return execute_sampled(stub.function, *arguments, leaves=leaves, programs=programs)
    except (InputError, EnvironmentProblem):
        raise
    except (MemoryError, torch.OutOfMemoryError, OutOfDeviceMemory) as error:
        raise Refused(Refusal(kind=RefusalKind.RESOURCES, message=first_line(error))) from error
    except IRError as error:
        raise Refused(Refusal(kind=RefusalKind.UNSUPPORTED, message=error.message, line=error.line)) from error
    except Exception as error:  # the user's code
        raise Refused(Refusal(kind=RefusalKind.STUB, message=first_line(error))) from error


def _by_output(outputs: tuple[Any, ...], seen: Sampled) -> dict[int, Tensor]:
    """Which elements of each output are exact, by its position."""
    leaves = tree_leaves(seen.execution.result)
    found = {}
    for position, output in enumerate(outputs):
        for leaf, mask in zip(leaves, seen.known, strict=True):
            if leaf is output and mask is not None:
                found[position] = mask
    return found


def _beside_reference(
    stub: Stub, arguments: Arguments, places: dict[str, int | str], seen: Sampled, known: dict[int, Tensor]
) -> dict[str, Any]:
    """Worst errors on what is known, relative to the RMS of the reference there; gradients of those elements alone."""
    reference = called(stub.module.reference, lambda dtype: leaf_call(*arguments, places, dtype))
    if reference.failed:
        return {"reference": reference.failed}
    outputs = stub.outputs(seen.execution.result)
    errors = {
        f"`{stub.spec.outputs[i].name}`": _error(plain(outputs[i])[mask], plain(reference.outputs[i])[mask])
        for i, mask in known.items()
        if i < len(reference.outputs) and isinstance(reference.outputs[i], Tensor)
    }
    if not stub.spec.custom_gradient:
        errors |= _gradient_errors(places, seen, known, outputs, reference.outputs, reference.leaves)
    dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in reference.dtypes)
    return {"reference": "", "dtypes": dtypes, "errors": errors}


def _gradient_errors(
    places: dict[str, int | str],
    seen: Sampled,
    known: dict[int, Tensor],
    outputs: tuple[Any, ...],
    expected: tuple[Any, ...],
    leaves: dict[str, Tensor],
) -> dict[str, float]:
    by_leaf = {
        id(leaf): c
        for leaf, c in zip(tree_leaves(seen.execution.result), seen.cotangents(), strict=True)
        if c is not None
    }
    chosen = [
        i
        for i in known
        if id(outputs[i]) in by_leaf and i < len(expected) and getattr(expected[i], "requires_grad", False)
    ]
    if not chosen or not leaves:
        return {}
    cotangents = [by_leaf[id(outputs[i])] for i in chosen]
    mine = [seen.execution.leaves[places[name]] for name in leaves]
    exact = torch.autograd.grad(
        [outputs[i] for i in chosen], mine, cotangents, allow_unused=True, materialize_grads=True
    )
    theirs = torch.autograd.grad(
        [expected[i] for i in chosen],
        list(leaves.values()),
        [cotangent.to(expected[i].dtype) for i, cotangent in zip(chosen, cotangents, strict=True)],
        allow_unused=True,
        materialize_grads=True,
    )
    return {
        f"the gradient of `{name}`": _error(plain(a), plain(b))
        for name, a, b in zip(leaves, exact, theirs, strict=True)
    }


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the RMS of the elements wanted that are not zero."""
    got, want = got.to(torch.float64), want.to(torch.float64)
    same = (got == want) | (got.isnan() & want.isnan())
    worst = torch.where(same, 0.0, (got - want).abs().nan_to_num(nan=float("inf")))
    size = want[want.isfinite() & (want != 0)].square().mean().sqrt()
    largest = float(worst.max()) if worst.numel() else 0.0
    return largest / float(size) if largest and float(size) > 0 else largest
