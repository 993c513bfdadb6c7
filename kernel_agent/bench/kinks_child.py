"""What runs in a second truth child, where a gradient is refused: exact gradients at inputs moved by very little.

No candidate is near. `kernel_agent.bench.kinks` says what the moved truths are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.bench.kinks import moves
from kernel_agent.bench.realdevice import begin, load_stub, on_gpu, unpacked
from kernel_agent.bench.taped import tape_of_gradients
from kernel_agent.ir import declared_dtype
from kernel_agent.ir.capture.images import declare
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import Arguments
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def moved(call: Call) -> None:
    """Payload: `device`, `spec`, `seed`, `arguments` (see `packed`), `cotangents` (tensor keys or None).

    Sends one message per direction, with the exact gradients as tensors by name; or `refusal`.
    """
    begin(call, threads=4)
    stub = load_stub(KernelSpec.model_validate(call.payload["spec"]), call.scratch)
    arguments = unpacked(call.payload["arguments"], call.tensors)
    cotangents = [None if key is None else on_gpu(call.tensors[key]) for key in call.payload["cotangents"]]
    for sign in (1, -1):
        try:
            grads = moved_gradients(stub, arguments, cotangents, call.payload["seed"], sign)
        except Exception as error:  # no memory, or inputs that the forward refuses
            call.send({"refusal": f"{type(error).__name__}: {first_line(error)}"[:2000]})
            return
        call.send({"sign": sign}, {name: grad.cpu() for name, grad in grads.items()})
        del grads
        torch.cuda.empty_cache()


def moved_gradients(
    stub: Stub, arguments: Arguments, cotangents: Sequence[Tensor | None], seed: int, sign: int
) -> dict[str, Tensor]:
    """Exact gradients, float64, with every differentiable input moved one way (`sign` 1) or the other (-1).

    Moved inputs are float64 and still report the dtypes of the call: nothing is rounded on the way.
    """
    places = stub.leaves(arguments.args, arguments.kwargs)
    generator = torch.Generator().manual_seed(seed)
    args: list[Any] = list(arguments.args)
    kwargs = dict(arguments.kwargs)
    for place in places.values():
        x: Tensor = args[place] if isinstance(place, int) else kwargs[place]
        other = declare(x.detach().to(torch.float64) + sign * moves(x, generator), declared_dtype(x))
        if isinstance(place, int):
            args[place] = other
        else:
            kwargs[place] = other
    return tape_of_gradients(stub, Arguments(tuple(args), kwargs), places).gradients(cotangents)
