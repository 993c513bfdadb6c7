"""What runs in a second truth child, where a gradient is refused by little: honest arithmetic, drawn more often.

No candidate is near. `kernel_agent.bench.narrow` says what a draw is, `kernel_agent.bench.second_look` when they are
made.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING

import torch

from kernel_agent.bench.draws import Draws, drawn_errors
from kernel_agent.bench.realdevice import begin, load_stub, on_gpu, unpacked
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def drawn(call: Call) -> None:
    """Payload: `device`, `spec`, `arguments` (see `packed`), `cotangents` (tensor keys or None), `dot_bits`, `draws`
    (first, behind the last), `dtypes` by gradient; the truth of each gradient is the tensor `truth.NAME`.

    Sends one message: `errors` by gradient, with their tiles as tensors `honest.NAME`; or `refusal`.
    """
    begin(call, threads=4)
    stub = load_stub(KernelSpec.model_validate(call.payload["spec"]), call.scratch)
    arguments = unpacked(call.payload["arguments"], call.tensors)
    cotangents = [None if key is None else on_gpu(call.tensors[key]) for key in call.payload["cotangents"]]
    dtypes = {name: getattr(torch, dtype) for name, dtype in call.payload["dtypes"].items()}
    truth = {name: on_gpu(call.tensors[f"truth.{name}"]) for name in dtypes}
    try:
        draws = Draws(stub, arguments, cotangents, truth, call.payload["dot_bits"])
        errors = drawn_errors(draws, dtypes, range(*call.payload["draws"]))
    except Exception as error:  # no memory: what was drawn before has to do
        call.send({"refusal": f"{type(error).__name__}: {first_line(error)}"[:2000]})
        return
    tensors = [error.tensors(name) for name, error in errors.items()]
    call.send({"errors": {name: error.form for name, error in errors.items()}}, dict(ChainMap(*tensors)))
