"""What runs in the truth child of the faithful tier: exact gradients, and what honest arithmetic misses.

As `native_truth_child` on a GPU, here on any machine; no candidate is near.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernel_agent.bench.launches import TF32_BITS
from kernel_agent.bench.native_truth_child import truth_of
from kernel_agent.ir import ExecOptions, execute, standin
from kernel_agent.ir.operations.faithful import InputPrecision
from kernel_agent.ir.program import Module
from kernel_agent.oracle.child import answered, load
from kernel_agent.oracle.wire import unpack
from kernel_agent.pairs.arguments import Arguments

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

_BITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8E4M3FN": 4, "f8E5M2": 3, "f8E4M3FNUZ": 4, "f8E5M2FNUZ": 3}
_SCALED_BITS = 3


def prepared(call: Call) -> None:
    """Payload: `spec`, `cases`: packed `args` and `kwargs`, `cotangents` as tensor keys or None, `seed`.

    Sends per case the `dot_bits` of the forward's coarsest product, and `grads` with names, dtypes, S and honest
    errors; the truths and the honest errors per tile as tensors. Or a `refusal`.
    """
    torch.set_num_threads(1)
    with answered(call), standin():
        stub = load(call)
        for form in call.payload["cases"]:
            args, kwargs = unpack(form["args"], call.tensors), unpack(form["kwargs"], call.tensors)
            cotangents = [None if key is None else call.tensors[key] for key in form["cotangents"]]
            arguments = Arguments(tuple(args), dict(kwargs))
            done = execute(stub.function, arguments.args, arguments.kwargs, options=ExecOptions(sanitize=False))
            bits = coarsest_product([launch.module for launch in done.launches])
            found = truth_of(stub, arguments, cotangents, form["seed"], bits)
            tensors = {f"truth.{grad.name}": grad.truth for grad in found.grads}
            for grad in found.grads:
                tensors |= grad.honest.tensors(grad.name)
            record: dict[str, Any] = {"dot_bits": bits, "grads": [grad.form for grad in found.grads]}
            call.send({**record, "notes": list(found.notes)}, tensors)


def coarsest_product(modules: list[Module]) -> int | None:
    """Significant bits of the operands of the coarsest product in kernels, as `launches.dot_bits` reads of text."""
    found: list[int] = []
    for op in (op for module in modules for op in module.all_ops):
        if op.name == "tt.dot_scaled":
            found.append(_SCALED_BITS)
        elif op.name == "tt.dot":
            bits = max(_BITS.get(value.type.scalar.name, 0) for value in op.operands[:2])
            cut = op.attributes.get("inputPrecision", InputPrecision.IEEE) == InputPrecision.TF32
            found += [TF32_BITS if cut and bits == _BITS["f32"] else bits] if bits else []
    return min(found, default=None)
