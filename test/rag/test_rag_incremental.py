"""An index changes by the pair: the result is the one a whole build gives, and nothing known is done again."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import rag.build
from kernel_agent.errors import InputError
from rag import IndexProblem, Query, add_pairs, build_index, join_indexes, load_index, remove_pairs, search
from rag.index import MANIFEST
from rag.storage import ENTRIES, FEATURES, VECTORS

PAIRS = Path(__file__).parent / "pairs"
SOFTMAX, ATTENTION = Path("softmax/softmax_one_row.py"), Path("attention/attention_one_tile.py")


@pytest.fixture
def folder(tmp_path):
    """A copy of the small pairs."""
    shutil.copytree(PAIRS, tmp_path / "pairs", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "pairs"


@pytest.fixture
def described(monkeypatch):
    """Paths that were described, in order."""
    seen, real = [], rag.build.describe_pairs

    def watched(pairs, sources, *, verified=None):
        seen.extend(sources)
        return real(pairs, sources, verified=verified)

    monkeypatch.setattr(rag.build, "describe_pairs", watched)
    return seen


def same_files(left, right, names=(MANIFEST, ENTRIES, FEATURES)):
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def test_pairs_added_one_by_one_in_any_order_give_the_bytes_of_a_whole_build(folder):
    whole = build_index(folder, folder / "whole", dense=False)
    for entry in reversed(whole.entries):
        add_pairs(folder / "grown", folder, [Path(entry.path)], dense=False)
    same_files(folder / "grown", folder / "whole")


@pytest.mark.usefixtures("embedding_model")
def test_vectors_grow_with_the_pairs_and_equal_those_of_a_whole_build(folder):
    build_index(folder, folder / "whole")
    (folder / SOFTMAX).rename(folder / "aside.txt")
    build_index(folder, folder / "grown")
    (folder / "aside.txt").rename(folder / SOFTMAX)
    index = add_pairs(folder / "grown", folder, [SOFTMAX])
    same_files(folder / "grown", folder / "whole", (ENTRIES, FEATURES, VECTORS))
    np.testing.assert_array_equal(load_index(folder / "grown").vectors, index.vectors)


def test_removed_pairs_leave_the_bytes_of_an_index_that_never_had_them(folder):
    build_index(folder, folder / "grown", dense=False)
    remove_pairs(folder / "grown", [SOFTMAX, ATTENTION])
    (folder / SOFTMAX).unlink()
    (folder / ATTENTION).unlink()
    build_index(folder, folder / "whole", dense=False)
    same_files(folder / "grown", folder / "whole")


def test_a_rebuild_describes_only_what_changed(folder, described):
    build_index(folder, folder / "index", dense=False)
    described.clear()
    path = folder / SOFTMAX
    path.write_text(path.read_text().replace("Softmax of", "Row softmax of"))
    index = build_index(folder, folder / "index", dense=False)
    assert described == [SOFTMAX.as_posix()]
    assert next(entry for entry in index.entries if entry.path == SOFTMAX.as_posix()).docstring.startswith(
        "Row softmax"
    )
    assert not index.staleness()


def test_a_rebuild_forgets_files_that_are_gone(folder):
    build_index(folder, folder / "index", dense=False)
    (folder / SOFTMAX).unlink()
    assert SOFTMAX.as_posix() not in {e.path for e in build_index(folder, folder / "index", dense=False).entries}


def test_an_index_of_another_kind_is_not_built_upon(folder, described):
    build_index(folder, folder / "index", dense=False)
    (folder / "index" / ENTRIES).write_text("damaged")
    described.clear()
    build_index(folder, folder / "index", dense=False)
    assert len(described) == 7


def test_what_no_gate_has_passed_is_marked_until_it_is_added_again(folder, pair_source):
    build_index(folder, folder / "index", dense=False)
    query = Query(pair_source("softmax_one_row"))
    first = search(query, add_pairs(folder / "index", folder, [SOFTMAX], verified=False)).hits[0].pair
    assert (first.slug, first.verified) == ("softmax_one_row", False)
    assert search(query, add_pairs(folder / "index", folder, [SOFTMAX])).hits[0].pair.verified


def test_a_pair_added_twice_counts_once(folder):
    build_index(folder, folder / "index", dense=False)
    assert len(add_pairs(folder / "index", folder, [SOFTMAX, folder / SOFTMAX]).entries) == 7


def test_a_file_elsewhere_is_refused_by_name(folder, tmp_path):
    shutil.copy(PAIRS / SOFTMAX, tmp_path / "elsewhere.py")
    with pytest.raises(InputError, match=r"elsewhere\.py: it is no pair file below"):
        add_pairs(folder / "index", folder, [tmp_path / "elsewhere.py"], dense=False)


def test_an_index_over_another_folder_is_not_added_to(folder, tmp_path):
    build_index(folder, folder / "index", dense=False)
    shutil.copytree(PAIRS, tmp_path / "others")
    with pytest.raises(IndexProblem, match="is one over"):
        add_pairs(folder / "index", tmp_path / "others", [SOFTMAX])


def test_removing_what_is_not_indexed_is_refused(folder):
    build_index(folder, folder / "index", dense=False)
    with pytest.raises(InputError, match=r"holds no softmax/other\.py"):
        remove_pairs(folder / "index", [Path("softmax/other.py")])


def test_the_last_pair_can_be_removed(folder):
    add_pairs(folder / "index", folder, [SOFTMAX], dense=False)
    remove_pairs(folder / "index", [SOFTMAX])
    assert load_index(folder / "index").entries == ()


def test_joined_indexes_answer_as_one_and_read_from_both_folders(folder, tmp_path, pair_source):
    own = tmp_path / "own"
    (own / "mine").mkdir(parents=True)
    (folder / SOFTMAX).rename(own / "mine" / "softmax_one_row.py")
    shipped = build_index(folder, folder / "index", dense=False)
    mine = build_index(own, own / "index", dense=False)
    result = search(Query(pair_source("softmax_one_row")), join_indexes(shipped, mine))
    assert result.hits[0].pair.path == Path("mine/softmax_one_row.py")
    assert "def forward" in result.hits[0].pair.forward
    attention = search(Query(pair_source("attention_one_tile")), join_indexes(shipped, mine)).hits[0].pair
    assert attention.path == ATTENTION


def test_a_joined_index_notices_a_change_in_either_folder(folder, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(PAIRS / SOFTMAX, own / "mine.py")
    joined = join_indexes(build_index(folder, folder / "index", dense=False), build_index(own, own / "i", dense=False))
    assert not joined.staleness()
    (own / "mine.py").unlink()
    assert joined.staleness().missing == ("mine.py",)


@pytest.mark.usefixtures("embedding_model")
def test_vectors_of_another_model_are_not_compared_when_indexes_are_joined(index, lexical_index):
    joined = join_indexes(index, lexical_index)
    assert joined.vectors.shape == (14, 384)
    assert not joined.vectors[7:].any()


def test_a_build_proves_no_harvested_pair(folder):
    # A whole build over one's own pairs, with another model say, knows no verdict: it must not make one up.
    path = folder / SOFTMAX
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("META = {", 'META = {"repository": "some_library", ', 1), encoding="utf-8")
    assert "some_library" in path.read_text(encoding="utf-8")
    verified = {entry.path: entry.verified for entry in build_index(folder, folder / "index", dense=False).entries}
    assert verified.pop(SOFTMAX.as_posix()) is False
    assert all(verified.values()), "nobody else's"
