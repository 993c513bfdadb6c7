"""The search of a run: pairs for each gradient, none twice, within what a prompt can hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import scripted

import rag
from kernel_agent.agent.plan import GradientPlan, Plan, Reduction, Wanted
from kernel_agent.agent.retrieval import HIT_TOKENS, HITS, retrieve, retrieve_techniques, wanted_by
from kernel_agent.agent.runs import run
from kernel_agent.config import RunConfig
from kernel_agent.models.tokens import estimate_tokens
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def config(pair_index: rag.Index) -> RunConfig:
    """A run on layernorm that searches a few pairs."""
    return RunConfig(file=EXAMPLES / "layernorm.py", rag_index=pair_index.folder)


@pytest.fixture
def spec(config: RunConfig) -> KernelSpec:
    facts = read_file(config.file)
    return KernelSpec(
        facts=facts, sweep=(), inputs=(), outputs=(), returns_tuple=True, grads=("x", "weight"), launches=()
    )


def planned(grad: str, reduction: Reduction, *techniques: str) -> GradientPlan:
    return GradientPlan(grad=grad, owner="a row", reduction=reduction, techniques=techniques)


def test_retrieved_pairs_carry_their_techniques(spec: KernelSpec, config: RunConfig) -> None:
    first = next(pair for pair in retrieve(spec, config).pairs if pair.slug == "layernorm_row")
    assert "two-stage-partials" in first.techniques
    assert first.speed == "", "nothing is measured beside these pairs"


def test_a_plan_wants_its_reduction_before_its_techniques() -> None:
    gradients = (planned("x", Reduction.PLAIN_STORE, "two-pass"), planned("weight", Reduction.ATOMICS, "atomics"))
    plan = Plan(pairs=(), anchor=None, gradients=gradients)
    assert wanted_by(plan) == (
        Wanted(grad="x", techniques=("two-pass",)),
        Wanted(grad="weight", techniques=("atomics",)),
    )


def test_a_planned_technique_brings_a_pair_whole(spec: KernelSpec, config: RunConfig) -> None:
    wanted = (Wanted(grad="weight", techniques=("column-owner",)),)
    (hit,) = retrieve_techniques(spec, config, wanted, ("layernorm_row",))
    assert (hit.grad, hit.technique, hit.pair.slug) == ("weight", "column-owner", "batchnorm_train_2d")
    assert "def backward" in hit.pair.backward


def test_a_technique_that_only_foreign_pairs_have_brings_none(spec: KernelSpec, config: RunConfig) -> None:
    assert retrieve_techniques(spec, config, (Wanted(grad="weight", techniques=("atomics",)),), ()) == ()


def test_a_vector_that_is_known_is_not_embedded_again(
    spec: KernelSpec, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every process that goes on with a run would load the embedding model, for seconds.
    vectors = np.eye(2, 384, dtype=np.float32)[[0] * 30]
    vectors[7] = np.eye(2, 384, dtype=np.float32)[1]
    index = dataclasses.replace(rag.load_index(config.rag_index), vectors=vectors)
    monkeypatch.setattr(rag, "open_index", lambda path=None: index)
    vector = rag.QueryVector(index.embedding.identity, tuple(float(number) for number in vectors[7]))
    pytest.importorskip("faiss")
    found = retrieve(spec, config, lambda spec, config: vector)
    assert max(found.pairs, key=lambda pair: pair.similarity or 0.0).slug == index.entries[7].slug


def test_a_red_gradient_gets_another_pair_than_the_one_that_did_not_help(spec: KernelSpec, config: RunConfig) -> None:
    wanted = Wanted(grad="weight", techniques=("two-stage-partials",))
    assert retrieve_techniques(spec, config, (wanted,), ("layernorm_row",)) == ()
    red = wanted.model_copy(update={"red": True})
    (hit,) = retrieve_techniques(spec, config, (red,), ("layernorm_row",))
    assert hit.pair.slug != "layernorm_row"
    assert "two-stage-partials" in hit.pair.techniques


def test_a_red_gradient_without_a_plan_wants_what_the_best_pair_does(spec: KernelSpec, config: RunConfig) -> None:
    hits = retrieve_techniques(spec, config, (Wanted(grad="weight", red=True),), ("layernorm_persistent",))
    assert hits
    assert hits[0].technique in ("persistent-grid", "two-stage-partials", "saved-statistics")


def test_hits_fit_the_prompt(spec: KernelSpec, config: RunConfig) -> None:
    wanted = (
        Wanted(grad="x", techniques=("checkpointed-states", "two-pass"), red=True),
        Wanted(grad="weight", techniques=("sorted-segments", "atomics", "persistent-grid")),
    )
    hits = retrieve_techniques(spec, config, wanted, ())
    assert 0 < len(hits) <= HITS
    assert sum(estimate_tokens(hit.pair.backward) for hit in hits) <= HIT_TOKENS


def test_without_retrieval_nothing_is_searched(spec: KernelSpec, config: RunConfig) -> None:
    off = config.model_copy(update={"rag": False})
    assert retrieve_techniques(spec, off, (Wanted(grad="x", techniques=("atomics",)),), ()) == ()


def test_the_index_of_a_run_is_stored_relative_to_its_folder(tmp_path: Path) -> None:
    # An absolute path in the ledger would name nothing once run and index have moved together.
    stored = tmp_path / "index"
    script = scripted.Script(scripted.reply_text(scripted.BACKWARD))
    finished = run(scripted.config(tmp_path / "out", rag_index=stored), tools=script.tools, model=script.model)
    assert finished.state.config is not None
    kept = finished.state.config.rag_index
    assert kept is not None
    assert not kept.is_absolute()
    assert (finished.folder.path / kept).resolve() == stored


def test_a_replay_sees_the_pairs_that_its_replies_name(config: RunConfig, spec: KernelSpec, tmp_path: Path):
    # A search of today's collection finds other pairs than the recorded plan speaks of: that plan would be refused.
    recorded = EXAMPLES.parent / "LOGS" / "layernorm"
    found = retrieve(spec, config.model_copy(update={"replay": recorded, "rag_index": tmp_path / "no index"}))
    lines = (recorded / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    event = json.loads(next(line for line in lines if '"pairs_retrieved"' in line))["event"]
    assert [pair.slug for pair in found.pairs] == [pair["slug"] for pair in event["pairs"]]
    assert all(pair.backward for pair in found.pairs if pair.chosen)
    assert "recorded run" in found.notice
