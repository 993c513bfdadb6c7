"""Own pairs: what is harvested or delivered lies in the user's folder, apart from shipped pairs, and can be proven."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernel_agent.collection.own import OwnPairs, with_slug
from kernel_agent.collection.verdicts import PairVerdict
from kernel_agent.data import own_root, pairs_root
from kernel_agent.deliver import Provenance, deliver
from kernel_agent.errors import InputError
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.oracle import describe
from kernel_agent.pairs.assemble import handwritten
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.spec import content_hash
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox
from rag import Exclusion, Index, Query, Wanted, load_index, open_index, search, search_techniques

sys.path.append(str(Path(__file__).parents[1] / "rag"))
from planted_checkouts import MIT, plant

SHAPES = """

SWEEP = [{"M": 3, "N": 40}]


def make_args(M, N, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(device) for shape in ((M, N), (M,)))
"""

FORWARD = '''
"""Doubles."""
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff

SWEEP = [{"N": 40}]


def make_args(N, device="cpu", seed=0):
    return (torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(device),)


@triton.jit
def double_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) * 2, mask=at < N)


@autodiff
def double(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


def backward(saved, dy):
    dx, dy = torch.empty(dy.shape, device=dy.device), dy.contiguous()
    double_kernel[(triton.cdiv(dx.numel(), 64),)](dy, dx, dx.numel(), BLOCK=64)
    return dx
'''


@pytest.fixture
def own(tmp_path: Path) -> OwnPairs:
    """An empty folder of own pairs."""
    return OwnPairs(tmp_path / "own")


@pytest.fixture
def few_shipped_pairs(monkeypatch: pytest.MonkeyPatch, pair_index: Index) -> None:
    """Thirty shipped pairs and no embedding model: these tests ask what is found, not how well."""
    monkeypatch.setattr("kernel_agent.collection.own.missing_packages", lambda: ("faiss-cpu",))
    monkeypatch.setattr("rag.together.load_index", lambda path=None: pair_index if path is None else load_index(path))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A checkout under MIT."""
    root = plant("relative_imports", tmp_path)
    (root / "LICENSE").write_text(MIT)
    return root


@pytest.fixture(scope="session")
def delivered(tmp_path_factory: pytest.TempPathFactory, sandbox: Sandbox) -> Path:
    """A result folder as a run leaves it."""
    folder = tmp_path_factory.mktemp("delivered")
    (folder / "double.py").write_text(FORWARD)
    spec = describe(read_file(folder / "double.py"), sandbox)
    green = Verdict(
        status=Status.GREEN, cases=(CaseResult(case="N=40", required=True, status=Status.GREEN),), cases_planned=1
    )
    provenance = Provenance(backend="manual", model="none", asks=1)
    deliver(spec, handwritten(spec), green, provenance, folder / "double-0123abcd")
    return folder / "double-0123abcd"


pytestmark = pytest.mark.usefixtures("few_shipped_pairs")


def found_slugs(own: OwnPairs, source: str, **wanted: object) -> list[str]:
    """Slugs of what a search for this forward comes up with, in order."""
    result = search(Query(source, Path("query.py"), **wanted), open_index(own.folder))  # type: ignore[arg-type]
    return [hit.pair.slug for hit in result.hits]


def test_own_pairs_lie_outside_of_the_repository() -> None:
    assert not own_root().is_relative_to(pairs_root().parent.parent)


def test_harvested_pairs_are_found_beside_the_shipped_ones(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    source = (own.pairs / "relative_imports" / "row_scale.py").read_text()
    result = search(Query(source, Path("query.py"), k=8), open_index(own.folder))
    nearest = result.hits[0].pair
    assert (nearest.slug, nearest.own, nearest.verified) == ("row_scale", True, False)
    assert any(not hit.pair.own for hit in result.hits)


def test_a_harvested_pair_says_whose_it_is_and_its_licence(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    source = (own.pairs / "relative_imports" / "row_scale.py").read_text()
    nearest = search(Query(source, Path("query.py")), open_index(own.folder)).hits[0].pair
    assert nearest.standing == "own, unverified, from relative_imports, MIT"


def test_a_pair_without_a_licence_is_found_and_not_shown_unless_allowed(own: OwnPairs, library: Path) -> None:
    (library / "LICENSE").unlink()
    own.add_harvest(library)
    source = (own.pairs / "relative_imports" / "row_scale.py").read_text()
    kept_back = search(Query(source, Path("query.py")), open_index(own.folder)).hits[0]
    assert (kept_back.pair.slug, kept_back.excluded) == ("row_scale", Exclusion.UNLICENSED)
    assert "no licence found" in kept_back.reason
    allowed = search(Query(source, Path("query.py"), unlicensed=True), open_index(own.folder)).hits[0]
    assert allowed.chosen
    assert "no licence found" in allowed.pair.standing  # what is shown says so


def test_a_search_by_technique_keeps_back_what_has_no_licence_too(own: OwnPairs, library: Path) -> None:
    (library / "LICENSE").unlink()
    own.add_harvest(library)
    path = own.pairs / "relative_imports" / "row_scale.py"
    path.write_text(path.read_text().replace("techniques=()", 'techniques=("spin-lock",)'))
    own.settle([path])
    query = Query(path.read_text(), Path("query.py"))
    wanted = [Wanted("x", ("spin-lock",))]
    hidden = search_techniques(wanted, query, index=open_index(own.folder))
    assert "row_scale" not in [match.pair.slug for match in hidden]
    allowed = Query(path.read_text(), Path("query.py"), unlicensed=True)
    assert "row_scale" in [m.pair.slug for m in search_techniques(wanted, allowed, index=open_index(own.folder))]


def test_a_harvested_pair_is_unverified_until_the_gate_has_passed_this_very_text(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    path = own.pairs / "relative_imports" / "row_scale.py"
    green = PairVerdict(
        slug="row_scale", hash=content_hash(path.read_text()), rule="1.1", status=Status.GREEN, right=1, planned=1
    )
    own.book.record(path, green)
    own.settle([path])
    assert {entry.slug for entry in open_index(own.folder).entries if entry.verified} >= {"row_scale"}
    path.write_text(path.read_text() + "\n# another text\n")
    own.settle([path])
    assert "row_scale" not in {entry.slug for entry in open_index(own.folder).entries if entry.verified}


def test_a_red_verdict_does_not_verify(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    path = own.pairs / "relative_imports" / "row_scale.py"
    hashed = content_hash(path.read_text())
    own.book.record(path, PairVerdict(slug="row_scale", hash=hashed, rule="1.1", status=Status.WRONG_GRADIENT))
    own.settle([path])
    assert not next(entry for entry in open_index(own.folder).entries if entry.slug == "row_scale").verified


def test_harvesting_again_keeps_the_shapes_that_the_user_has_written(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    path = own.pairs / "relative_imports" / "row_scale.py"
    path.write_text(path.read_text() + SHAPES)
    kernel = library / "rowlib" / "kernels" / "scale.py"
    kernel.write_text(kernel.read_text().replace("tl.sum(x * dy, axis=0)", "tl.sum(dy * x, axis=0)"))
    own.add_harvest(library)
    text = path.read_text()
    assert "tl.sum(dy * x, axis=0)" in text  # the checkout's present code
    assert 'SWEEP = [{"M": 3, "N": 40}]' in text


def test_what_a_checkout_no_longer_has_goes_with_the_next_harvest(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    (library / "rowlib" / "functions" / "product.py").unlink()
    own.add_harvest(library)
    assert sorted(path.stem for path in own.files()) == ["row_scale", "shift"]
    assert sorted(entry.path for entry in open_index(own.folder).entries if "relative_imports" in entry.path) == [
        "relative_imports/row_scale.py",
        "relative_imports/shift.py",
    ]


def test_two_checkouts_of_one_name_do_not_overwrite_each_other(own: OwnPairs, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = plant("couples", tmp_path / "one")
    second = plant("operators", tmp_path / "two").rename(tmp_path / "two" / "couples")
    assert own.add_harvest(first).family == "couples"
    assert own.add_harvest(second).family == "couples_2"
    assert {path.parent.name for path in own.files()} == {"couples", "couples_2"}


def test_no_own_pair_has_a_shipped_pair_s_name(own: OwnPairs, tmp_path: Path) -> None:
    # A run tells pairs by their names: two of one name would be taken for each other.
    root = plant("couples", tmp_path)
    path = root / "functional" / "used.py"
    path.write_text(path.read_text().replace("class Abs", "class SoftmaxRow"))
    own.add_harvest(root)
    assert "softmax_row" in {path.stem for path in pairs_root().glob("*/*.py")}
    assert "used_softmax_row" in {path.stem for path in own.files()}


def test_a_harvested_function_can_be_proven(own: OwnPairs, library: Path, sandbox: Sandbox) -> None:
    from kernel_agent.collection.proof import judge

    own.add_harvest(library)
    path = own.pairs / "relative_imports" / "row_scale.py"
    path.write_text(path.read_text() + SHAPES)
    verdict = judge(path, sandbox, quick=True)
    assert verdict.status is Status.GREEN, verdict.message
    assert verdict.right == 2


def test_a_harvested_operator_runs_without_registering_itself(own: OwnPairs, tmp_path: Path, sandbox: Sandbox) -> None:
    from kernel_agent.collection.proof import judge

    own.add_harvest(plant("operators", tmp_path))
    path = own.pairs / "operators" / "sine.py"
    shapes = (
        '\n\nSWEEP = [{"N": 40}]\n\n\ndef make_args(N, device="cuda"):\n    return (torch.randn(N, device=device),)\n'
    )
    path.write_text(path.read_text() + shapes)
    verdict = judge(path, sandbox, quick=True)
    assert verdict.status is Status.GREEN, verdict.message


def test_a_delivered_pair_is_proven_by_its_certificate(own: OwnPairs, delivered: Path) -> None:
    path = own.add_delivered(delivered)
    assert path.parent.name == "user"
    entry = next(entry for entry in open_index(own.folder).entries if entry.slug == path.stem)
    assert entry.verified
    assert read_meta(path.read_text()).slug == path.stem == "double_0123abcd"


def test_a_delivered_pair_may_be_shown_whatever_its_licence(own: OwnPairs, delivered: Path) -> None:
    path = own.add_delivered(delivered)  # it is the user's own code
    hit = search(Query(path.read_text(), Path("query.py")), open_index(own.folder)).hits[0]
    assert (hit.pair.slug, hit.chosen, hit.pair.standing) == (path.stem, True, "own, proven")


def test_adding_a_folder_again_replaces_its_pair(own: OwnPairs, delivered: Path) -> None:
    assert own.add_delivered(delivered) == own.add_delivered(delivered)
    assert len(own.files()) == 1


def test_a_delivered_file_that_was_changed_is_not_taken(own: OwnPairs, delivered: Path, tmp_path: Path) -> None:
    changed = tmp_path / delivered.name
    changed.mkdir()
    for path in delivered.iterdir():
        (changed / path.name).write_text(path.read_text())
    (changed / "double_backward.py").write_text((delivered / "double_backward.py").read_text() + "\n")
    with pytest.raises(InputError, match="is not the file that was proven"):
        own.add_delivered(changed)
    assert not own.files()


def test_a_red_certificate_proves_nothing(own: OwnPairs, delivered: Path, tmp_path: Path) -> None:
    red = tmp_path / delivered.name
    red.mkdir()
    for path in delivered.iterdir():
        (red / path.name).write_text(path.read_text().replace('"GREEN"', '"WRONG_GRADIENT"'))
    with pytest.raises(InputError, match="not green"):
        own.add_delivered(red)


def test_a_folder_without_a_certificate_is_the_user_s_mistake(own: OwnPairs, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no certificate"):
        own.add_delivered(tmp_path)


def test_removed_pairs_are_gone_from_disk_and_search(own: OwnPairs, library: Path) -> None:
    own.add_harvest(library)
    path = own.find("row_scale")
    assert path is not None
    source = path.read_text()
    own.remove([path])
    assert not path.exists()
    assert "row_scale" not in found_slugs(own, source)


def test_the_index_can_be_made_again_with_what_is_proven(own: OwnPairs, library: Path, delivered: Path) -> None:
    own.add_harvest(library)
    added = own.add_delivered(delivered)
    before = open_index(own.folder).entries
    assert own.reindex() == 4
    assert open_index(own.folder).entries == before  # standings included
    assert [entry.slug for entry in before if entry.verified and entry.path.startswith("user/")] == [added.stem]


def test_the_report_of_a_harvest_is_kept_beside_the_pairs(own: OwnPairs, library: Path) -> None:
    report = own.add_harvest(library)
    kept = json.loads(own.report_path(report.family).read_text())
    assert [found["name"] for found in kept["found"]] == ["Product", "RowScale", "Shift"]
    assert [left["reason"] for left in kept["skipped"]] == ["a helper cannot be found"]


def test_a_record_that_was_overwritten_is_told_with_its_place(own: OwnPairs) -> None:
    own.folder.mkdir()
    (own.folder / "own.json").write_text("{}x")
    with pytest.raises(InputError, match=r"own\.json"):
        own.state()


def test_a_new_name_leaves_the_rest_of_a_pair_as_it_is() -> None:
    source = 'META = dict(\n    slug="é", grads=("x",),\n)\nslug = "é"\n'
    assert with_slug(source, "b") == 'META = dict(\n    slug="b", grads=("x",),\n)\nslug = "é"\n'
