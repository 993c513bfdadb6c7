"""Every pair's `reference` is its forward: what the gate, which takes its truth from the kernels, cannot see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_agent.data import pairs_root
from kernel_agent.ir import declared_dtype, execute, import_module, standin
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import read_sweep

PAIRS = sorted(pairs_root().glob("*/*.py"))
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, FP8: 2**-4}
"""The forward is executed in float64 and the reference in the declared dtype, whose rounding this allows for. For fp8
that is half an ulp: a cast to it rounds in the reference alone."""

every_pair = pytest.mark.parametrize("path", PAIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")


def _module(path: Path) -> Any:
    return import_module(path, f"pair_{path.parent.name}_{path.stem}")


def _arguments(module: Any, entry: ShapeEntry) -> tuple[Any, ...]:
    with standin():
        made = build_arguments(module, entry, device="cpu", seed=0)
    return (*made.args, *made.kwargs.values())


@every_pair
def test_reference_computes_what_the_forward_computes_at_every_entry(path):
    # The gate takes its truth from the forward: a forward that computes something else than its description is only
    # seen here. Saved tensors beyond the inputs are counted, since retrieval and cost tables read them off META.
    module, meta = _module(path), read_meta(path.read_text())
    for entry in read_sweep(module.SWEEP, path):
        args = _arguments(module, entry)
        run = execute(lambda *images: (images, module.forward(*images)), args)
        images, (outputs, saved) = run.result
        expected = module.reference(*args)
        dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        dtypes |= {declared_dtype(tensor) for tensor in saved if isinstance(tensor, torch.Tensor)} & {FP8}
        worst = max(TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE)
        assert run.findings == ()
        assert isinstance(outputs, tuple) == isinstance(expected, tuple)
        pairs = zip(outputs, expected, strict=True) if isinstance(outputs, tuple) else [(outputs, expected)]
        for place, (output, value) in enumerate(pairs):
            if output is None or value is None:
                assert output is value, f"output {place} at {entry.label}"
                continue
            assert declared_dtype(output) is value.dtype, f"output {place} at {entry.label}"
            error = (output.double() - value.double()).norm() / value.double().norm().clamp(min=1e-6)
            assert error < worst, f"output {place} at {entry.label}"
        inputs = {image.data_ptr() for image in images if isinstance(image, torch.Tensor)}
        kept = [tensor for tensor in saved if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in inputs]
        assert len(kept) == len(meta.saves), f"META says {meta.saves}"
