"""What runs in the truth child on the GPU: the user's forward at real sizes, executed exactly and differentiated.

No candidate is near, and the child is gone before one starts. What is sent is the truth of every gradient, its size S,
and the error of honest computations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.bench.draws import Draws, drawn_errors, error_beside_jumps
from kernel_agent.bench.gpu import seen_gpu
from kernel_agent.bench.honest import DRAWS, HonestError, honest_error
from kernel_agent.bench.launches import TF32_BITS, coarsest_dot
from kernel_agent.bench.narrow import FLOAT32_BITS, NarrowArithmetic
from kernel_agent.bench.realdevice import (
    arguments_on_gpu,
    begin,
    load_stub,
    on_gpu,
    on_host,
    output_forms,
    outputs_of,
    packed,
    unpacked,
)
from kernel_agent.bench.taped import Tape, exact_tape, tape_of_gradients
from kernel_agent.ir import OutOfDeviceMemory
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.cotangents import CotangentKind, make_cotangents, rms, unit_cotangents
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.oracle.leaves import leaf_call
from kernel_agent.pairs.arguments import Arguments
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

_CLOSE = 4.0
"""The reference is honest when its error is at most so many times what the narrow tape's is, or the dtype's own."""
_SIZES = (1 << 27, 1 << 23, 1 << 20)
"""Elements of the arguments to try, one after the other, where memory is short."""


def limits(most: int | None) -> tuple[int | None, ...]:
    """Elements of the arguments to try, one after the other: no limit for None, then less where memory is short."""
    return (most, *(size for size in _SIZES if most is None or size < most))


def prepared(call: Call) -> None:
    """Payload: `device`, `spec`, `seed`, `entries`, `proof_elements` (of the arguments of a proof at most; or None).

    Sends the `gpu`; then per entry the inputs: `arguments` (see `packed`), random `cotangents` (tensor keys or None)
    and the `dot_bits` of the stub's kernels; then per entry `grads` and `outputs` with names, dtypes, S and honest
    errors, and the truths as tensors, with `arguments` and `cotangents` of its own where the entry had to be shrunk
    (`label` says to what, `chosen` whether by `proof_elements` alone). Instead of either: `refusal`.
    """
    begin(call, threads=4)
    call.send({"gpu": seen_gpu().model_dump(mode="json")})
    stub = load_stub(KernelSpec.model_validate(call.payload["spec"]), call.scratch)
    entries = [ShapeEntry.model_validate(form) for form in call.payload["entries"]]
    answered: dict[int, Prepared] = {}
    for number, entry in enumerate(entries):
        try:
            answered[number] = _inputs(call, stub, number, entry)
        except Exception as error:  # the user's code, or a shape that does not fit on this device
            call.send({"inputs": number, "refusal": _said(error)})
        torch.cuda.empty_cache()
    for number, inputs in answered.items():
        try:
            _truth(call, stub, number, inputs)
        except Exception as error:  # the user's code, an operation nobody executes, or no memory
            call.send({"truth": number, "refusal": _said(error)})
        torch.cuda.empty_cache()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:2000]


@dataclass(frozen=True)
class Prepared:
    """The inputs of one entry."""

    entry: ShapeEntry
    arguments: dict[str, Any]
    """See `packed`."""
    tensors: dict[str, Tensor]
    """On the CPU."""
    cotangents: list[Tensor | None]
    dot_bits: int | None


def _inputs(call: Call, stub: Stub, number: int, entry: ShapeEntry) -> Prepared:
    seed = call.payload["seed"]
    tensors: dict[str, Tensor] = {}
    arguments = arguments_on_gpu(stub, entry, seed)
    form = packed(arguments, tensors, f"i{number}")
    tensors = {name: on_host(tensor) for name, tensor in tensors.items()}  # before the stub may write into them
    results: list[Any] = []
    with torch.no_grad():
        bits = coarsest_dot(lambda: results.append(stub.function(*arguments.args, **arguments.kwargs)))
    torch.cuda.synchronize()
    cotangents = list(make_cotangents(CotangentKind.RANDOM, output_forms(stub, stub.outputs(results[0])), seed))
    keys = [None if c is None else f"i{number}.c{place}" for place, c in enumerate(cotangents)]
    sent = {key: c for key, c in zip(keys, cotangents, strict=True) if key is not None and c is not None}
    call.send({"inputs": number, "arguments": form, "cotangents": keys, "dot_bits": bits}, tensors | sent)
    return Prepared(entry, form, tensors, cotangents, bits)


def _truth(call: Call, stub: Stub, number: int, inputs: Prepared) -> None:
    asked = inputs.entry
    arguments = unpacked(inputs.arguments, inputs.tensors)
    cotangents: list[Tensor | None] | None = [None if c is None else on_gpu(c) for c in inputs.cotangents]
    seed: int = call.payload["seed"]
    tensors: dict[str, Tensor] = {}
    record: dict[str, Any] = {"truth": number, "label": asked.label, "shrunk": False, "chosen": False}
    tried, chosen = asked, False
    before = None
    for limit in limits(call.payload["proof_elements"]):
        if limit is not None:
            tried = fit_entry(
                asked, lambda entry: arguments_on_gpu(stub, entry, seed), max_elements=limit, max_volume=1 << 62
            ).entry
            if before is not None and tried.dims == before.dims:
                continue
            if tried.dims != asked.dims:
                arguments, cotangents = arguments_on_gpu(stub, tried, seed), None
        chosen, before = before is None, tried
        try:
            found = truth_of(stub, arguments, cotangents, seed, inputs.dot_bits)
        except (OutOfDeviceMemory, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            continue
        break
    else:
        raise MemoryError("the exact execution needs more memory than this GPU has, even at a shrunk size")
    if tried.dims != asked.dims:
        own = packed(arguments, tensors, f"n{number}")
        keys = [None if c is None else f"n{number}.c{place}" for place, c in enumerate(found.cotangents)]
        tensors |= {key: c.cpu() for key, c in zip(keys, found.cotangents, strict=True) if key and c is not None}
        record |= {"label": tried.label, "shrunk": True, "chosen": chosen, "arguments": own, "cotangents": keys}
    record |= {"seconds": found.seconds, "grads": [grad.form for grad in found.grads], "notes": list(found.notes)}
    for grad in found.grads:
        tensors |= {f"truth.{grad.name}": grad.truth.cpu(), **grad.honest.tensors(grad.name)}
    outputs = outputs_of_the_stub(stub, arguments, found)
    record["outputs"] = [output.form for output in outputs]
    for output in outputs:
        tensors |= {f"truth.out.{output.name}": output.truth.cpu(), **output.honest.tensors(f"out.{output.name}")}
    call.send(record, tensors)


@dataclass(frozen=True)
class Gradient:
    """One gradient or output, exact and honest."""

    name: str
    """Of the input; of an output, its position."""
    truth: Tensor
    dtype: torch.dtype
    scale: float
    honest: HonestError

    @property
    def form(self) -> dict[str, Any]:
        """What travels in the record."""
        return {
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "scale": self.scale,
            **self.honest.form,
        }


@dataclass(frozen=True)
class Truth:
    """All gradients at one entry."""

    grads: tuple[Gradient, ...]
    outputs: tuple[Any, ...]
    """As the stub returns them, exact; floating ones float64."""
    cotangents: Sequence[Tensor | None]
    seconds: float
    notes: tuple[str, ...]


def truth_of(
    stub: Stub, arguments: Arguments, cotangents: Sequence[Tensor | None] | None, seed: int, dot_bits: int | None
) -> Truth:
    """Exact gradients, their sizes and honest errors; random cotangents of `seed` where none are given."""
    start = time.perf_counter()
    places = stub.leaves(arguments.args, arguments.kwargs)
    dtypes = {
        name: (arguments.args[place] if isinstance(place, int) else arguments.kwargs[place]).dtype
        for name, place in places.items()
    }
    tape = exact_tape(stub, arguments, places)
    if cotangents is None:
        made = make_cotangents(CotangentKind.RANDOM, tape.forms, seed)
        cotangents = [None if c is None else c.to(tape.device) for c in made]
    truth = tape.gradients(cotangents)
    scales = _scales(tape, cotangents, seed)
    notes: list[str] = []
    outputs = tuple(o.detach().as_subclass(Tensor) if isinstance(o, Tensor) else o for o in tape.exact_outputs)
    del tape
    torch.cuda.empty_cache()
    with NarrowArithmetic(dot_bits, narrow=True):  # of the forward, too: its statistics are rounded on a device
        narrow = tape_of_gradients(stub, arguments, places).gradients(cotangents)
    honest = {name: honest_error(narrow[name], truth[name], dtypes[name]) for name in truth}
    if dot_bits == TF32_BITS:
        with NarrowArithmetic(dot_bits, narrow=True, dropped=True):
            narrow = tape_of_gradients(stub, arguments, places).gradients(cotangents)
        for name, exact in truth.items():
            error = error_beside_jumps(narrow[name], exact, dtypes[name], dot_bits)
            honest[name] = honest[name].joined(error)
    del narrow
    torch.cuda.empty_cache()
    fine = {name: dtype for name, dtype in dtypes.items() if dtype is torch.float32}
    if fine:
        draws = Draws(stub, arguments, cotangents, truth, dot_bits)
        for name, error in drawn_errors(draws, fine, range(DRAWS)).items():
            honest[name] = honest[name].joined(error)
    if stub.spec.facts.has_reference and not stub.spec.custom_gradient:
        honest, note = _with_reference(stub, arguments, places, cotangents, dot_bits, truth, honest, dtypes)
        notes += [note] if note else []
    grads = tuple(Gradient(name, truth[name], dtypes[name], scales[name], honest[name]) for name in truth)
    return Truth(grads, outputs, cotangents, time.perf_counter() - start, tuple(notes))


def outputs_of_the_stub(stub: Stub, arguments: Arguments, found: Truth) -> list[Gradient]:
    """Exact floating outputs, with the errors of the user's own kernels: what a forward that replaces them may miss."""
    copies: dict[str, Tensor] = {}
    own = unpacked(packed(arguments, copies, "f"), copies)  # the stub may write into them
    with torch.no_grad():
        real = stub.outputs(stub.function(*own.args, **own.kwargs))
    seen = []
    for place, (output, exact) in enumerate(zip(real, found.outputs, strict=True)):
        if isinstance(output, Tensor) and output.is_floating_point() and isinstance(exact, Tensor):
            size = exact.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt() if exact.numel() else exact.new_zeros(())
            honest = honest_error(output, exact, output.dtype)
            seen.append(Gradient(str(place), exact, output.dtype, float(size), honest))
    return seen


def _scales(tape: Tape, cotangents: Sequence[Tensor | None], seed: int) -> dict[str, float]:
    """S per element and gradient: see `GradientTruth.scale`."""
    total = dict.fromkeys(tape.leaves, 0.0)
    for position, form in enumerate(tape.forms):
        if form is None or not form.differentiable or cotangents[position] is None:
            continue
        units = [None if c is None else c.to(tape.device) for c in unit_cotangents(tape.forms, position, seed)]
        size = rms(cotangents[position])
        for name, grad in tape.gradients(units).items():
            clean = grad.nan_to_num(0.0, 0.0, 0.0)
            unit = float(clean.square().mean().sqrt()) if clean.numel() else 0.0
            total[name] += (unit * size) ** 2
    return {name: value**0.5 for name, value in total.items()}


def _with_reference(
    stub: Stub,
    arguments: Arguments,
    places: dict[str, int | str],
    cotangents: Sequence[Tensor | None],
    dot_bits: int | None,
    truth: dict[str, Tensor],
    honest: dict[str, HonestError],
    dtypes: dict[str, torch.dtype],
) -> tuple[dict[str, HonestError], str]:
    """Honest errors with those of `reference` joined, as far as it computes what the forward does."""
    try:
        prepared = leaf_call(arguments.args, arguments.kwargs, places, None)
        with torch.enable_grad(), NarrowArithmetic(dot_bits, narrow=False):
            outputs = outputs_of(stub.module.reference(*prepared.args, **prepared.kwargs))
            found = Tape(prepared.leaves, outputs).gradients(cotangents)
    except Exception as error:  # the user's code: the narrow tape is enough
        return honest, f"`reference` does not serve as honest arithmetic: {first_line(error)}"
    joined = {}
    for name, exact in truth.items():
        seen = honest_error(found[name], exact, dtypes[name])
        bits = min(dot_bits or FLOAT32_BITS, FLOAT32_BITS)
        coarse = max(torch.finfo(dtypes[name]).eps, 2.0 ** (1 - bits))
        if seen.relative > _CLOSE * max(honest[name].relative, coarse):
            return honest, "`reference` does not serve as honest arithmetic: it computes something else"
        joined[name] = honest[name].joined(seen)
    return joined, ""
