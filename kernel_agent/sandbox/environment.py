"""The environment variables a child sees: a short list of harmless ones, and places inside its scratch folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# An allow-list: a deny-list of secrets (keys, proxies with passwords, cloud tokens) is never complete.
KEPT = (
    *("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("CC", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
    *("TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "TRITON_CUDART_PATH"),
)

_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
"""What a tensor leaves free is used for the next instead of being given back: a new page costs a fault and zeros, which
was half of the time of arithmetic on large tensors."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """What is left of the caller's environment, with every numeric library told to use one thread."""
    kept = {name: environ[name] for name in KEPT if name in environ}
    return {
        **kept,
        **_MEMORY,
        **dict.fromkeys(_ONE_THREAD, "1"),
        "HOME": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def in_scratch(scratch: Path) -> dict[str, str]:
    """Variables that keep everything a library wants to write inside the scratch folder."""
    return {
        "HOME": str(scratch),
        "TMPDIR": str(scratch / "tmp"),
        "TRITON_HOME": str(scratch),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "CUDA_CACHE_PATH": str(scratch / "cuda"),
        "XDG_CACHE_HOME": str(scratch / "cache"),
    }
