"""The embedding model is verified, quiet, offline and frugal; without it, search still works."""

import importlib.metadata
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from kernel_agent.errors import EnvironmentProblem
from rag.embed import embed, missing_packages, verify_weights


def installed() -> bool:
    """Whether kernel-agent itself is installed, which brings its dependencies along."""
    try:
        importlib.metadata.distribution("kernel-agent")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_rag_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'faiss', 'sentence_transformers', 'transformers', 'openai', 'pydantic', 'triton'}"
    assert run(f"import sys, rag; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_lexical_search_loads_no_model(lexical_index, layernorm):
    code = (
        "import sys; from pathlib import Path; from rag import Query, load_index, search\n"
        "print(search(Query(sys.argv[2]), load_index(Path(sys.argv[1]))).hits[0].pair.slug)\n"
        "print(sorted({'torch', 'faiss', 'sentence_transformers'} & set(sys.modules)))"
    )
    assert run(code, str(lexical_index.folder), layernorm).split("\n")[:2] == ["rmsnorm_one_row", "[]"]


def test_search_is_lexical_when_a_package_is_not_installed(index, layernorm):
    # None in sys.modules is how Python itself says that a module cannot be imported.
    code = (
        "import sys; sys.modules['sentence_transformers'] = None\n"
        "from pathlib import Path; from rag import Query, load_index, search\n"
        "result = search(Query(sys.argv[2]), load_index(Path(sys.argv[1])))\n"
        "print(result.judged_by.value, result.hits[0].pair.slug, result.notice)"
    )
    answer = run(code, str(index.folder), layernorm).strip()
    assert answer.startswith("lexical rmsnorm_one_row no embedding model (sentence-transformers not installed)")


def test_building_vectors_without_the_model_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['faiss'] = None\n"
        "from rag.embed import embed\n"
        "try: embed(['x'])\n"
        "except Exception as error: print(error)"
    )
    assert "pip install faiss-cpu" in run(code)


@pytest.mark.skipif(not installed(), reason="run from a bare checkout: no dependency is promised there")
def test_nothing_is_missing_here():
    # Other tests skip without the model: this one keeps them from skipping where it belongs.
    assert missing_packages() == ()


@pytest.mark.usefixtures("embedding_model")
def test_embedding_is_normalised_quiet_and_independent_of_its_neighbours(capfd):
    texts = ["rms norm row", "causal attention of queries, keys and values " * 20]
    vectors = embed(texts)
    assert vectors.shape == (2, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(embed(texts[:1])[0], vectors[0])
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("embedding_model")
def test_embedding_nothing_is_empty():
    assert embed([]).shape == (0, 384)


@pytest.mark.usefixtures("embedding_model")
def test_threads_of_the_process_are_left_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        embed(["softmax"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_other_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not the weights")
    with pytest.raises(EnvironmentProblem, match=r"(?s)not those of all-MiniLM-L6-v2.*--force-reinstall"):
        verify_weights(tmp_path / "model.safetensors")


def test_queries_after_the_first_are_fast(index, layernorm):
    from rag import Query, search

    search(Query(layernorm), index)
    start = time.perf_counter()
    search(Query(layernorm), index)
    assert time.perf_counter() - start < 1.0
