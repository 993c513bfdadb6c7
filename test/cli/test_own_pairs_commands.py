"""Own pairs from the command line: harvest, list, show, prove, remove."""

import json
import sys
from pathlib import Path

import pytest
from command_line import kernel_agent

sys.path.append(str(Path(__file__).parents[1] / "rag"))
from planted_checkouts import MIT, plant


@pytest.fixture(scope="module")
def harvested(tmp_path_factory):
    """A folder of own pairs with one harvested checkout, and what the command said."""
    place = tmp_path_factory.mktemp("own_commands")
    root = plant("traps", place)
    (root / "LICENSE").write_text(MIT)
    return place, kernel_agent("dataset", "harvest", "traps", "--index", "own", cwd=place)


def test_a_harvest_tells_what_it_found_and_why_it_left_the_rest(harvested):
    _, done = harvested
    assert done.code == 0, done.err
    assert "traps/copy\tautograd.Function\ttrap/original.py:6\tx\tMIT\tyes" in done.out
    assert "NotYet\ttrap/torch_only.py:81\tno backward\tits backward raises" in done.out


def test_a_harvest_as_json_is_one_object(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "harvest", "traps", "--index", "own", "--json", cwd=place)
    report = json.loads(done.out)
    assert [found["slug"] for found in report["found"]] == ["copy"]
    assert {left["reason"] for left in report["skipped"]} >= {"no backward", "same code as another"}


def test_own_pairs_are_listed_with_their_standing(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "list", "--own", "--index", "own", cwd=place)
    assert done.out.splitlines()[1:] == ["traps\tcopy\tx\t\town, unverified, MIT"]


def test_a_pair_is_shown_with_where_it_comes_from(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "show", "copy", "--index", "own", cwd=place)
    assert "class CopyBackward(Copy):" in done.out
    assert "trap/original.py:6" in done.err


def test_a_shipped_pair_is_shown_too(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "show", "norm_row/layernorm_row", "--index", "own", cwd=place)
    assert "shipped, proven" in done.err
    assert done.out.startswith('"""')


def test_a_misspelt_pair_names_the_nearest(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "show", "layernorm_rows", "--index", "own", cwd=place)
    assert done.code == 2
    assert "layernorm_row" in done.err


def test_a_pair_without_shapes_cannot_be_judged_yet(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "check", "--own", "--index", "own", cwd=place)
    assert done.code == 2
    assert "SWEEP and make_args" in done.err


def test_a_shipped_pair_cannot_be_removed(harvested):
    place, _ = harvested
    done = kernel_agent("dataset", "remove", "layernorm_row", "--index", "own", cwd=place)
    assert done.code == 2
    assert "none of your own pairs" in done.err


def test_a_family_is_removed_at_once(tmp_path):
    plant("couples", tmp_path)
    kernel_agent("dataset", "harvest", "couples", "--index", "own", cwd=tmp_path)
    done = kernel_agent("dataset", "remove", "--family", "couples", "--index", "own", cwd=tmp_path)
    assert "removed 3 pairs" in done.err
    assert not list((tmp_path / "own").rglob("couples/*.py"))
