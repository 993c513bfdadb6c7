"""What runs in the baseline child: the user's own reference, differentiated by torch, eager and compiled.

The user's file is trusted to be timed: a baseline that cheats only makes its own author's kernels look bad.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.bench.clock import Clock
from kernel_agent.bench.launches import TF32_BITS
from kernel_agent.bench.realdevice import (
    begin,
    load_stub,
    on_gpu,
    outputs_of,
    unpacked,
)
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.leaves import leaf_call
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.generated import saved_layout
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.timelimit import TimeUp, time_limit

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def baselines(call: Call) -> None:
    """Payload: `device`, `spec`, `flush_bytes`, `budget_s`, `ways` that are wanted, `way_s` for each in seconds of
    processor time, `entries`: each with `arguments`, `cotangents`, `dot_bits`.

    Sends per entry and way the `times`, or `failed` with a reason: of the stub itself (`forward`), and of one backward
    alone by the file's own function (`own`) and by autograd of `reference`, or of the `surrogate` that declares the
    gradient (`eager`, `compiled`).
    """
    begin(call)
    with call.alone():
        clock = Clock(call.payload["flush_bytes"])
    stub = load_stub(KernelSpec.model_validate(call.payload["spec"]), call.scratch)
    _prepare_compiler()
    limit: float = call.payload["way_s"]
    for way in [way for way in _ways(stub) if way in call.payload["ways"]]:
        for number, entry in enumerate(call.payload["entries"]):
            # tl.dot cuts fp32 operands to tf32 unless told otherwise; torch may do the same then, for a fair race
            torch.backends.cuda.matmul.allow_tf32 = entry["dot_bits"] == TF32_BITS
            try:
                with time_limit(limit):
                    times = _times(call, clock, stub, way, entry)
            except TimeUp:
                call.send({"entry": number, "way": way, "failed": f"more than {limit:.0f} s to compile and to time"})
            except Exception as error:  # the user's code, or a compiler that gives up
                call.send(
                    {"entry": number, "way": way, "failed": f"{type(error).__name__}: {first_line(error)}"[:2000]}
                )
            else:
                call.send({"entry": number, "way": way, "times": times})
            torch.cuda.empty_cache()


def _prepare_compiler() -> None:
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # workers of its own would outlive a time limit
    # The same graph is walked many times, which compiled backwards only allow when they keep their buffers.
    torch._functorch.config.donated_buffer = False


def _ways(stub: Stub) -> list[str]:
    facts = stub.spec.facts
    own = ["own"] if facts.has_backward and not facts.is_pair else []
    differentiable = facts.has_reference or stub.spec.custom_gradient
    return ["forward", *own, *(["eager", "compiled"] if differentiable else [])]


def _differentiable(stub: Stub) -> Callable[..., object]:
    """What autograd walks: `surrogate` where it declares the gradient, since `reference` has another one then."""
    function: Callable[..., object] = stub.module.surrogate if stub.spec.custom_gradient else stub.module.reference
    return function


def _times(call: Call, clock: Clock, stub: Stub, way: str, entry: dict[str, Any]) -> list[float]:
    arguments = unpacked(entry["arguments"], call.tensors)
    cotangents = [None if key is None else on_gpu(call.tensors[key]) for key in entry["cotangents"]]
    call_of = {"forward": _forward, "own": _own_backward}.get(way, functools.partial(_autograd, way))
    work = call_of(stub, arguments.args, arguments.kwargs, cotangents)
    work()  # what is compiled at the first call
    clock.synchronize()
    with call.alone():
        return clock.times(work, clock.pace(work, call.payload["budget_s"]))


def _forward(
    stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any], _cotangents: list[Tensor | None]
) -> Callable[[], object]:
    def work() -> object:
        with torch.no_grad():
            return stub.function(*args, **kwargs)

    return work


def _autograd(
    way: str, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any], cotangents: list[Tensor | None]
) -> Callable[[], object]:
    function = _differentiable(stub)
    name = function.__name__
    if way == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False)
    prepared = leaf_call(args, kwargs, stub.leaves(args, kwargs), None)
    outputs = outputs_of(function(*prepared.args, **prepared.kwargs))
    chosen = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=False)
        if cotangent is not None and isinstance(output, Tensor) and output.requires_grad
    ]
    if not chosen:
        raise ValueError(f"no output of `{name}` is connected with an input")
    outs = [output for output, _ in chosen]
    given = [cotangent.to(output.dtype).reshape(output.shape) for output, cotangent in chosen]
    leaves = list(prepared.leaves.values())
    return lambda: torch.autograd.grad(outs, leaves, given, retain_graph=True, allow_unused=True)


def _own_backward(
    stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any], cotangents: list[Tensor | None]
) -> Callable[[], object]:
    """The user's hand-written `backward(saved, *grad_outputs)`, with `saved` as `saved_layout` says."""
    with torch.no_grad():
        outputs = stub.outputs(stub.function(*args, **kwargs))
    bound = inspect.signature(stub.function).bind(*args, **kwargs)
    bound.apply_defaults()
    known = {**bound.arguments, **dict(zip([fact.name for fact in stub.spec.outputs], outputs, strict=False))}
    saved = tuple(known[name] for name in saved_layout(stub.spec))
    backward = stub.module.backward

    def work() -> object:
        with torch.no_grad():
            return backward(saved, *cotangents)

    return work
