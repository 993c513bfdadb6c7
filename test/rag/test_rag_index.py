"""An index is reproducible, refers to the pairs beside it, and is never used silently when it does not fit."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kernel_agent.errors import InputError
from rag import IndexProblem, Query, build_index, load_index, search
from rag.build import describe_pairs
from rag.index import MANIFEST, pair_files
from rag.storage import ENTRIES, FEATURES, VECTORS

PAIRS = Path(__file__).parent / "pairs"


@pytest.fixture
def copied(tmp_path):
    """A lexical index inside its own copy of the pairs."""
    pairs = tmp_path / "pairs"
    shutil.copytree(PAIRS, pairs, ignore=shutil.ignore_patterns("__pycache__"))
    return build_index(pairs, pairs / "index", dense=False)


def test_rebuild_gives_the_same_bytes(index, tmp_path):
    again = build_index(PAIRS, tmp_path)
    for name in (ENTRIES, FEATURES, VECTORS):
        assert (again.folder / name).read_bytes() == (index.folder / name).read_bytes(), name


def test_vectors_are_normalised_float32(index):
    assert index.vectors.dtype == np.float32
    assert index.vectors.shape == (7, 384)
    np.testing.assert_allclose(np.linalg.norm(index.vectors, axis=1), 1.0, atol=1e-6)


def test_loaded_index_equals_the_built_one(index):
    loaded = load_index(index.folder)
    assert loaded.entries == index.entries
    assert loaded.manifest == index.manifest
    assert (loaded.vectors == index.vectors).all()
    np.testing.assert_array_equal(loaded.lexical.cosines({"softmax": 1}), index.lexical.cosines({"softmax": 1}))


def test_index_and_pairs_can_move_together(copied, tmp_path, layernorm):
    # An absolute path in the index would break a wheel, which is built elsewhere than it is installed.
    moved = tmp_path / "elsewhere"
    copied.pairs.rename(moved)
    assert search(Query(layernorm), load_index(moved / "index")).hits[0].pair.slug == "rmsnorm_one_row"


def test_fresh_index_is_not_stale(copied):
    assert not load_index(copied.folder).staleness()


def test_line_ends_and_trailing_blanks_do_not_make_an_index_stale(copied):
    path = copied.pairs / "softmax/softmax_one_row.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"  \r\n"))
    assert not copied.staleness()


def test_of_a_large_index_only_files_written_after_it_are_read(copied, monkeypatch):
    # Reading 100,000 files again before every answer would take longer than finding it.
    monkeypatch.setattr("rag.index.READ_UP_TO", 0)
    older, newer = (copied.pairs / path for path in ("norm_row/rmsnorm_one_row.py", "matmul/matmul_one_tile_k.py"))
    made = (copied.folder / MANIFEST).stat().st_mtime
    for path, when in ((older, made - 10), (newer, made + 10)):
        path.write_text(path.read_text().replace("tl.", "tl . "))
        os.utime(path, (when, when))
    index = load_index(copied.folder)
    assert index.staleness().changed == ("matmul/matmul_one_tile_k.py",)
    # What the walk passes over is still not shown.
    assert all(index.read(row) is None for row, e in enumerate(index.entries) if e.slug == "rmsnorm_one_row")


def test_many_new_pairs_are_described_by_several_processes_alike(copied, monkeypatch):
    sources = dict(pair_files(copied.pairs))
    alone = describe_pairs(copied.pairs, sources)
    monkeypatch.setattr("rag.build.MANY", 0)
    assert describe_pairs(copied.pairs, sources) == alone
    # An error has to come across whole, with the file it is about.
    with pytest.raises(InputError, match="broken"):
        describe_pairs(copied.pairs, {**sources, "softmax/broken.py": "META = {}\n# --- forward ---\n"})


def test_changed_missing_and_new_pairs_are_noticed_and_left_out(copied, layernorm):
    changed = copied.pairs / "norm_row/rmsnorm_one_row.py"
    changed.write_text(changed.read_text().replace("1e-6", "1e-5"))
    (copied.pairs / "matmul/matmul_one_tile_k.py").unlink()
    shutil.copy(PAIRS / "softmax/softmax_one_row.py", copied.pairs / "softmax/copy.py")
    staleness = copied.staleness()
    assert staleness.changed == ("norm_row/rmsnorm_one_row.py",)
    assert staleness.missing == ("matmul/matmul_one_tile_k.py",)
    assert staleness.added == ("softmax/copy.py",)
    result = search(Query(layernorm), copied)
    assert not {"rmsnorm_one_row", "matmul_one_tile_k"} & {hit.pair.slug for hit in result.hits}
    assert "1 changed, 1 gone, 1 new" in result.notice


def test_files_that_are_no_pairs_are_passed_over(copied):
    (copied.pairs / "notes.py").write_text("raise SystemExit('never executed')")
    assert len(build_index(copied.pairs, copied.folder, dense=False).entries) == 7


def test_indexing_executes_no_pair(copied, tmp_path):
    victim = tmp_path / "executed"
    path = copied.pairs / "softmax/softmax_one_row.py"
    path.write_text(path.read_text().replace("import torch", f"open({str(victim)!r}, 'w')", 1))
    build_index(copied.pairs, copied.folder, dense=False)
    assert not victim.exists()


def test_pair_with_broken_meta_is_named(copied):
    path = copied.pairs / "softmax/softmax_one_row.py"
    path.write_text(path.read_text().replace('"softmax_one_row"', "str(1)"))
    with pytest.raises(InputError, match=r"softmax_one_row\.py:\d+: META"):
        build_index(copied.pairs, copied.folder, dense=False)


def test_folder_without_pairs_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no pair files below"):
        build_index(tmp_path, tmp_path / "index", dense=False)


def test_missing_index_says_how_to_build_one(tmp_path):
    with pytest.raises(IndexProblem, match=r"(?s)there is no retrieval index here.*kernel-agent rag build"):
        load_index(tmp_path)


def test_damaged_entries_are_refused(copied):
    entries = copied.folder / ENTRIES
    entries.write_text(entries.read_text()[:-40])
    with pytest.raises(IndexProblem, match="cannot be read"):
        load_index(copied.folder)


def test_lost_entry_is_refused(copied):
    # One line less would shift every vector to the wrong pair.
    entries = copied.folder / ENTRIES
    entries.write_text("".join(entries.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(IndexProblem, match="do not belong together"):
        load_index(copied.folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("description", 0, "another version of kernel-agent"),
        ("schema", 99, "another version of kernel-agent"),
        ("embedding", {"model": "all-MiniLM-L6-v2", "sha256": "0" * 64, "dimensions": 384}, "other weights"),
    ],
)
def test_index_of_another_make_is_refused(copied, key, value, message):
    manifest = json.loads((copied.folder / MANIFEST).read_text())
    (copied.folder / MANIFEST).write_text(json.dumps({**manifest, key: value}))
    np.save(copied.folder / VECTORS, np.zeros((7, 384), np.float32))
    with pytest.raises(IndexProblem, match=message):
        load_index(copied.folder)
