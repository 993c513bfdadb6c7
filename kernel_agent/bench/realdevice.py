"""Files and tensors on the real device, in a child: no stand-in, kernels are launched by Triton itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.autodiff import MARK, AutodiffMark
from kernel_agent.bench.gpu import GPU_SHARE
from kernel_agent.ir import declared_dtype
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.records import OutputForm
from kernel_agent.oracle.wire import pack, unpack
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.sections import truth_source
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

DEVICE = "cuda"


def import_file(path: Path, name: str) -> ModuleType:
    """Import a Python file as it is. It must stay on disk: Triton reads the source of kernels from it."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file", path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_stub(spec: KernelSpec, folder: Path) -> Stub:
    """Import everything but a pair's backward section; a delivered operator in front of the stub is taken off."""
    path = folder / f"{spec.facts.stem}.py"
    path.write_text(truth_source(spec.facts.source), encoding="utf-8")
    module = import_file(path, f"kernel_agent_native_{spec.hash8}")
    stub = getattr(module, spec.facts.stub)
    mark = getattr(stub, MARK, None)
    if isinstance(mark, AutodiffMark) and mark.backward is not None:
        stub = stub.__wrapped__
        setattr(module, spec.facts.stub, stub)
    return Stub(spec, module, stub)


def arguments_on_gpu(stub: Stub, entry: ShapeEntry, seed: int) -> Arguments:
    """What make_args gives for the GPU; where it knows no device, all its tensors are moved there."""
    built = build_arguments(stub.module, entry, device=DEVICE, seed=seed)
    tensors = [leaf for leaf in tree_leaves((built.args, built.kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.is_cuda for tensor in tensors):
        return built
    args, kwargs = tree_map(lambda leaf: on_gpu(leaf) if isinstance(leaf, Tensor) else leaf, (built.args, built.kwargs))
    return Arguments(tuple(args), kwargs)


def packed(arguments: Arguments, tensors: dict[str, Tensor], path: str) -> dict[str, Any]:
    """The JSON form of arguments; `cuda` names the tensors that live on the GPU."""
    own: dict[str, Tensor] = {}
    form = {"args": pack(arguments.args, own, f"{path}.a"), "kwargs": pack(arguments.kwargs, own, f"{path}.k")}
    tensors |= own
    return {**form, "cuda": [name for name, tensor in own.items() if tensor.is_cuda]}


def unpacked(form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Arguments:
    """Fresh tensors of the arguments that `packed` wrote, where they belong."""
    placed = Placed(tensors, form["cuda"])
    return Arguments(tuple(unpack(form["args"], placed)), unpack(form["kwargs"], placed))


class Placed(dict[str, Tensor]):
    """Tensors by name, copied to the device they belong to when they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], cuda: Collection[str]) -> None:
        super().__init__(tensors)
        self._cuda = frozenset(cuda)

    def __getitem__(self, name: str) -> Tensor:
        """A copy of its own."""
        tensor = super().__getitem__(name)
        return on_gpu(tensor) if name in self._cuda else tensor.clone()


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy on the GPU with the same strides, gaps and overlaps included."""
    if tensor.numel() == 0:
        return tensor.to(DEVICE)
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span,), (1,)).to(DEVICE, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride())


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU with the same strides, gaps and overlaps included."""
    if tensor.numel() == 0:
        return tensor.to("cpu", copy=True)
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((span,), (1,)).to("cpu", copy=True)
    return flat.as_strided(tensor.shape, tensor.stride())


def outputs_of(result: Any) -> tuple[Any, ...]:
    """A returned value as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def begin(call: Call, threads: int = 1) -> None:
    """What every child on the GPU begins with: its device, its share of that, and numerics as in a fresh program.

    Payload: `device`, the number of the GPU.
    """
    torch.set_num_threads(threads)
    torch.cuda.set_device(call.payload["device"])
    torch.cuda.set_per_process_memory_fraction(GPU_SHARE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def output_forms(stub: Stub, outputs: tuple[Any, ...]) -> tuple[OutputForm | None, ...]:
    """Shapes and dtypes of a call's outputs, and which of them carry a gradient."""
    facts = stub.spec.outputs
    return tuple(
        OutputForm(
            tuple(output.shape),
            declared_dtype(output),
            declared_dtype(output).is_floating_point and place < len(facts) and facts[place].needs_grad,
        )
        if isinstance(output, Tensor)
        else None
        for place, output in enumerate(outputs)
    )
