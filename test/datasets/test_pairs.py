"""Every pair of the dataset: one style, a reference that is its forward, and a backward that the gate proves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_agent.data import pairs_root
from kernel_agent.gate import GateOptions, check
from kernel_agent.ir import declared_dtype, execute, import_module, standin
from kernel_agent.oracle import describe
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.lint import lint
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import read_sweep
from kernel_agent.pairs.techniques import TECHNIQUES
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
PAIRS = sorted(pairs_root().glob("*/*.py"))

QUICK = GateOptions(seeds=(0,), odd_sizes=1, max_cases=10)
"""All of SWEEP, one odd size, each kind of cotangent. `kernel-agent dataset check` runs the standard suite."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The forward is executed in float64 and the reference in the declared dtype, whose rounding this allows for."""

every_pair = pytest.mark.parametrize("path", PAIRS, ids=lambda path: f"{path.parent.name}-{path.stem}")


def _module(path: Path) -> Any:
    return import_module(path, f"pair_{path.parent.name}_{path.stem}")


def _arguments(module: Any, entry: ShapeEntry) -> tuple[Any, ...]:
    with standin():
        made = build_arguments(module, entry, device="cpu", seed=0)
    return (*made.args, *made.kwargs.values())


def test_dataset_has_at_least_thirty_pairs_over_fifteen_families():
    assert len(PAIRS) >= 30
    assert len({path.parent.name for path in PAIRS}) >= 15


def test_slugs_are_unique_across_families():
    # Retrieval, ledgers and results name a pair by its slug alone.
    repeated = [slug for slug, count in Counter(path.stem for path in PAIRS).items() if count > 1]
    assert not repeated


def test_no_package_shadows_the_library_of_the_same_name():
    # With an __init__.py, `import datasets` in the checkout would find this folder instead of the library.
    assert not list((ROOT / "datasets").rglob("__init__.py"))


def test_readme_explains_exactly_the_closed_list_of_techniques():
    rows = [line.split("|") for line in (ROOT / "datasets" / "README.md").read_text().splitlines()]
    explained = {row[1].strip(" `"): row[2].strip() for row in rows if len(row) == 4 and row[1].startswith(" `")}
    assert explained == TECHNIQUES


@every_pair
def test_pair_follows_the_rules_of_the_collection(path):
    assert [str(complaint) for complaint in lint(path)] == []
    sections = split_sections(path.read_text())
    assert "def forward(" in sections.forward
    assert "def backward(" in sections.backward
    assert "def reference(" in sections.check
    assert len(path.read_text().splitlines()) < 400


@every_pair
def test_some_entry_has_sizes_off_the_block_borders(path):
    # Masks that are wrong only show where a size is no multiple of its block.
    entries = read_sweep(_module(path).SWEEP, path)
    sizes = [size for entry in entries for size in entry.dims.values() if type(size) is int and size > 8]
    assert any(size % 16 for size in sizes)


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
        assert run.findings == ()
        assert isinstance(outputs, tuple) == isinstance(expected, tuple)
        pairs = zip(outputs, expected, strict=True) if isinstance(outputs, tuple) else [(outputs, expected)]
        for place, (output, value) in enumerate(pairs):
            if output is None or value is None:
                assert output is value, f"output {place} at {entry.label}"
                continue
            assert declared_dtype(output) is value.dtype, f"output {place} at {entry.label}"
            error = (output.double() - value.double()).norm() / value.double().norm().clamp(min=1e-6)
            worst = max(
                TOLERANCE[arg.dtype] for arg in args if isinstance(arg, torch.Tensor) and arg.dtype in TOLERANCE
            )
            assert error < worst, f"output {place} at {entry.label}"
        inputs = {image.data_ptr() for image in images if isinstance(image, torch.Tensor)}
        kept = [tensor for tensor in saved if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in inputs]
        assert len(kept) == len(meta.saves), f"META says {meta.saves}"


@every_pair
def test_backward_is_green_in_the_exact_tier(path, sandbox: Sandbox):
    facts = read_file(path)
    verdict = check(describe(facts, sandbox), facts.source, sandbox, QUICK)
    assert verdict.green, f"{verdict.status.value}: {verdict.message}\n{verdict.details}"
