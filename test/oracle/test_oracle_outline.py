"""Arguments of real work, counted without their numbers."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.ir import import_module, standin
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.oracle.outline import NoOutline, Outline
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry

DRAWS = """
import torch

def make_args(N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(N, N, generator=g).to(device=device, dtype=torch.bfloat16),)
"""
COUNTS = """
import torch

def make_args(N, device="cpu", seed=0):
    chosen = torch.arange(N, device=device) % 3 == 0
    return (chosen.nonzero(),)
"""
KEEPS = """
import functools
import torch

@functools.cache
def table():
    return torch.ones(3)

def make_args(N, device="cpu", seed=0):
    return torch.ones(N, device=device), table()
"""
REGISTERS = (
    "import torch\n\n\n"
    '@torch.library.custom_op("kernel_agent_outlined::double", mutates_args=())\n'
    "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
) + DRAWS


def imported(folder, text):
    path = folder / "given.py"
    path.write_text(text)
    return import_module(path, "given_for_an_outline")


def entry(size):
    return ShapeEntry(dims={"N": size})


def test_a_terabyte_of_random_numbers_is_counted(tmp_path):
    # With numbers this would end for want of memory.
    module = imported(tmp_path, DRAWS)
    with standin():
        (drawn,) = Outline(module)(entry(1 << 20)).args
    assert drawn.shape == (1 << 20, 1 << 20)
    assert drawn.dtype is torch.bfloat16


def test_an_entry_shrinks_as_it_does_with_numbers(tmp_path):
    module = imported(tmp_path, DRAWS)

    def build(one):
        return build_arguments(module, one, device="cpu", seed=0)

    with standin():
        asked = fit_entry(entry(1000), build, max_elements=5000, max_volume=1 << 20)
        outlined = fit_entry(entry(1000), build, max_elements=5000, max_volume=1 << 20, outline=Outline(module))
    assert outlined == asked
    assert outlined.entry.dims["N"] == 62


def test_sizes_that_follow_from_numbers_are_counted_with_them(tmp_path):
    module = imported(tmp_path, COUNTS)
    with standin():
        fit = fit_entry(
            entry(30),
            lambda one: build_arguments(module, one, device="cpu", seed=0),
            max_elements=100,
            max_volume=100,
            outline=Outline(module),
        )
    assert (fit.elements, fit.refusal) == (10, "")


def test_who_asks_for_numbers_is_not_asked_at_other_sizes(tmp_path):
    outline = Outline(imported(tmp_path, COUNTS))
    with standin():
        with pytest.raises(Exception, match="make_args fails"):
            outline(entry(30))
        with pytest.raises(NoOutline):
            outline(entry(15))


def test_a_table_that_make_args_keeps_has_its_numbers_later(tmp_path):
    # In the same module the first call would have left a table without numbers in the cache.
    module = imported(tmp_path, KEEPS)
    with standin():
        Outline(module)(entry(4))
        _, kept = build_arguments(module, entry(4), device="cpu", seed=0).args
    assert kept.device.type == "cpu"


def test_a_file_that_speaks_of_a_library_has_an_outline_all_the_same(tmp_path):
    # It took seconds and gigabytes, since a comment had the word in it.
    module = imported(tmp_path, "# after the library's own\n" + DRAWS)
    with standin():
        assert Outline(module)(entry(1 << 20)).args[0].shape == (1 << 20, 1 << 20)


def test_a_file_that_may_register_operators_is_imported_once(tmp_path):
    # A second import would put its own functions in the place of those that are followed.
    with standin(), pytest.raises(NoOutline, match="register"):
        Outline(imported(tmp_path, REGISTERS))(entry(4))
