"""Footprints against the same lanes written out one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernel_agent.ir.cost import intervals
from kernel_agent.ir.cost.footprint import Footprint
from kernel_agent.ir.cost.intervals import ElementSet
from kernel_agent.ir.cost.sampling import different, halves, strata


def by_hand(f: Footprint, offsets: list[Tensor], masks: list[Tensor], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Lanes, elements and sectors of the same access."""
    offset = sum((term.expand(shape) for term in offsets), torch.zeros(shape, dtype=torch.int64))
    valid = (offset >= 0) & (offset < f.size)
    for mask in masks:
        valid = valid & mask
    sectors = sum(int((o[v] * f.itemsize // 32).unique().numel()) for o, v in zip(offset, valid, strict=True))
    return int(valid.sum()), int(offset[valid].unique().numel()), sectors


def some_terms(rng: random.Random, programs: int, tile: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Random offsets and masks; many of them ranges and prefixes, as kernels have them."""

    def shape(dims: list[int]) -> list[int]:
        return [rng.choice([1, programs]), *[size if dim in dims else 1 for dim, size in enumerate(tile)]]

    offsets, masks = [], []
    for _ in range(rng.randint(1, 4)):
        dims = rng.sample(range(len(tile)), rng.randint(0, len(tile)))
        if len(dims) == 1 and rng.random() < 0.6:
            line = torch.arange(tile[dims[0]]) * rng.choice([1, 1, 1, -1, 3, tile[-1]])
            offsets.append(line.view([1, *shape(dims)[1:]]))
        else:
            offsets.append(torch.randint(rng.choice([-5, 0, 0]), 150, shape(dims)))
    for _ in range(rng.randint(0, 2)):
        dims = rng.sample(range(len(tile)), rng.randint(0, len(tile)))
        if len(dims) == 1 and rng.random() < 0.6:
            ends = torch.randint(0, tile[dims[0]] + 1, (rng.choice([1, programs]), 1))
            masks.append((torch.arange(tile[dims[0]]) < ends).view([ends.size(0), *shape(dims)[1:]]))
        else:
            masks.append(torch.randint(0, 4, shape(dims)) > 0)
    return offsets, masks


@pytest.mark.parametrize("seed", range(20))
def test_lanes_elements_and_sectors_are_those_of_the_lanes_written_out(seed: int):
    # Ranges, prefixes, strides, repeated programs, negative offsets and lanes past the end in all mixtures: any
    # shortcut (products of groups, equal programs, runs) that is wrong somewhere shows as a difference.
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(30):
        tile = tuple(rng.choice([1, 2, 4, 8, 16]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
        programs = rng.choice([1, 2, 5, 9])
        offsets, masks = some_terms(rng, programs, tile)
        footprint = Footprint(rng.choice([50, 300, 2000]), rng.choice([1, 2, 4, 8]))
        footprint.add(offsets, masks, tile, programs)
        found = (footprint.lanes, footprint.elements, footprint.sectors)
        assert found == by_hand(footprint, offsets, masks, (programs, *tile))


def test_an_access_that_comes_again_adds_lanes_and_sectors_but_no_elements():
    footprint = Footprint(4096, 4)
    rows, columns = torch.arange(32).view(1, 32, 1) * 64, torch.arange(32).view(1, 1, 32)
    for _ in range(3):
        footprint.add([rows, columns], [], (32, 32), 5)
    assert (footprint.lanes, footprint.elements) == (3 * 5 * 1024, 1024)
    assert footprint.sectors == 3 * 5 * 32 * 4  # 32 rows of 128 bytes


@pytest.mark.parametrize("pending", [0, 1 << 20], ids=["marked", "as intervals"])
def test_single_elements_and_runs_of_one_set_do_not_count_twice(pending: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intervals, "_PENDING", pending)
    elements = ElementSet(2000)
    elements.add_runs(torch.tensor([0, 8, 40, 1000]), torch.tensor([10, 10, 5, 600]))  # 0-17, 40-44 and 1000-1599
    elements.add(torch.tensor([3, 17, 18, 44, 99, 1200]))
    assert len(elements) == 18 + 5 + 600 + 2
    elements.add_runs(torch.tensor([99]), torch.tensor([2]))
    assert len(elements) == 18 + 5 + 600 + 3
    other = ElementSet(2000)
    other.add(torch.tensor([98, 99]))
    assert len(elements | other) == 18 + 5 + 600 + 4


@pytest.mark.parametrize("grid", [(1000, 1, 1), (37, 5, 3), (1, 1, 1), (2, 600, 1)])
def test_strata_stand_for_every_program_of_the_grid_once(grid: tuple[int, int, int]):
    parts = strata(grid, 64)
    assert sum(part.weight * part.programs.numel() for part in parts) == pytest.approx(grid[0] * grid[1] * grid[2])
    ids = torch.cat([part.programs for part in parts])
    assert ids.unique().numel() == ids.numel(), "a program stands in two strata"
    assert int(ids.max()) == grid[0] * grid[1] * grid[2] - 1, "the last program, which has all tails, is not there"


@pytest.mark.parametrize("readers", [1, 4, 32])
def test_a_random_sample_tells_how_many_elements_all_programs_share(readers: int):
    # 4096 programs, each reads 16 elements, each element is read by `readers` of them. Programs that happen to share
    # elements tell of `readers`: a quarter of the programs has enough of such pairs for 5 %.
    first, second = halves(4096, 1024)
    seen = torch.cat([first, second]).div(readers, rounding_mode="floor").unique().numel() * 16
    estimate = different(seen, 1024 / 4096, 4096 * 16, 10**9)
    assert estimate == pytest.approx(4096 * 16 / readers, rel=0.05)
