"""The index that ships belongs to the pairs that ship, and finds for each example what a person would look up."""

from pathlib import Path

import numpy as np
import pytest

from kernel_agent.data import pairs_root
from rag import Query, load_index, search
from rag.build import describe_pairs
from rag.counts import Counts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Any of these families first is what a reader of the example would call the nearest pair.
NEAREST = {
    "layernorm": {"norm_row"},
    "rmsnorm": {"norm_row"},
    "softmax": {"softmax"},
    "swiglu": {"glu"},
    "cross_entropy": {"loss_ce"},
    "rotary": {"rope_position"},
    "attention": {"attention"},
    "attention_block_ptr": {"attention"},
    "matmul": {"matmul"},
    "grouped_gemm": {"moe"},
    "gated_recurrence": {"linear_attention"},
}


@pytest.fixture(scope="module")
def shipped():
    return load_index()


def test_shipped_index_is_fresh(shipped):
    # Red after a pair was added or changed; rebuild:
    # kernel-agent rag build datasets/kernel_pairs --output datasets/kernel_pairs/index
    staleness = shipped.staleness()
    assert staleness.changed == ()
    assert staleness.missing == ()
    assert staleness.added == ()


def test_shipped_entries_are_what_this_version_would_write(shipped):
    sources = {entry.path: (pairs_root() / entry.path).read_text(encoding="utf-8") for entry in shipped.entries}
    described = describe_pairs(pairs_root(), sources)
    assert tuple(one.entry for one in described) == shipped.entries
    for name, counts in (("terms", shipped.terms), ("shape", shipped.shape)):
        expected = Counts.of([getattr(one.description, name) for one in described])
        np.testing.assert_array_equal(counts.keys, expected.keys, err_msg=name)
        np.testing.assert_array_equal(counts.rows, expected.rows, err_msg=name)
        np.testing.assert_array_equal(counts.values, expected.values, err_msg=name)


def test_shipped_index_has_vectors(shipped):
    assert shipped.manifest.embedding is not None
    assert shipped.pairs == pairs_root().resolve()


def test_measured_speeds_belong_to_shipped_pairs(shipped):
    if not shipped.speeds.measured:
        pytest.skip("nothing was measured yet: kernel-agent dataset bench writes datasets/results")
    assert shipped.speeds.notice == "", "every line is a measurement"
    slugs = {entry.slug for entry in shipped.entries}
    assert {slug for slug, _ in shipped.speeds.measured} <= slugs


@pytest.mark.parametrize("name", NEAREST)
def test_example_finds_its_family_first(shipped, name):
    path = EXAMPLES / f"{name}.py"
    result = search(Query(path.read_text(encoding="utf-8"), path), shipped)
    assert result.chosen, result.notice
    assert result.chosen[0].pair.family in NEAREST[name]
