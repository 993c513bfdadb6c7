"""Shrinking an entry to what a CPU holds."""

from __future__ import annotations

import torch

from kernel_agent.oracle.fit import fit_entry
from kernel_agent.pairs.arguments import Arguments
from kernel_agent.pairs.spec import ShapeEntry


def build(entry: ShapeEntry) -> Arguments:
    sizes = [value for value in entry.dims.values() if type(value) is int]
    return Arguments((torch.empty(sizes, device="meta"), 3, None))


def fit(build_arguments=build, max_elements=10_000, max_volume=1 << 40, **dims):
    return fit_entry(ShapeEntry(dims=dims), build_arguments, max_elements=max_elements, max_volume=max_volume)


def test_what_fits_stays_as_it_is():
    result = fit(M=100, N=100, causal=True)
    assert not result.shrunk
    assert result.elements == 10_000


def test_the_longest_dim_is_halved_first_and_flags_are_kept():
    assert fit(M=4096, N=32, causal=True).entry.dims == {"M": 256, "N": 32, "causal": True}


def test_counts_shrink_before_a_long_dim_loses_its_second_tile():
    # T=2048 down to 16 would fit too, but leave a single tile: loops over tiles would never run twice.
    dims = fit(B=4, H=16, T=2048, D=64, max_elements=100_000).entry.dims
    assert dims["T"] == 128
    assert dims["D"] == 64


def test_the_volume_is_bounded_before_make_args_is_called():
    called = []

    def counting(entry: ShapeEntry) -> Arguments:
        called.append(entry.dims["M"])
        return build(entry)

    fit(counting, max_volume=1 << 12, M=1 << 30)
    assert called == [1 << 12], "a huge entry is never built"


def test_a_refused_size_is_passed_over():
    def even_only(entry: ShapeEntry) -> Arguments:
        if entry.dims["N"] != 1000:
            raise ValueError("N must be 1000")
        return build(entry)

    result = fit(even_only, M=800, N=1000)
    assert result.entry.dims["N"] == 1000
    assert result.elements <= 10_000


def test_what_is_always_refused_is_said():
    def never(entry: ShapeEntry) -> Arguments:
        raise ValueError("no such size")

    assert "no such size" in fit(never, M=10).refusal
