"""`@autodiff(backward=PATH)`: the user's own decorated stub trains through a delivered pair."""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from kernel_agent.autodiff import AutodiffMark
from kernel_agent.deliver.fingerprint import forward_fingerprint
from kernel_agent.errors import InputError

Stub = TypeVar("Stub", bound=Callable[..., Any])


class ForwardChanged(UserWarning):
    """The forward was edited after its backward was delivered: the delivered copy of the forward is what runs."""


def train_through(stub: Stub, mark: AutodiffMark) -> Stub:
    """Return a function with the stub's signature whose outputs carry the delivered backward.

    The delivered file is found relative to the stub's own file and loaded at the first call.
    Raises `InputError` when it is missing or was made for another stub.
    """
    home = Path(stub.__code__.co_filename).parent
    path = home / str(mark.backward)
    operator: Callable[..., Any] | None = None

    @functools.wraps(stub)
    def trained(*args: Any, **kwargs: Any) -> Any:
        nonlocal operator
        if operator is None:
            operator = _load_operator(path, stub)
        return operator(*args, **kwargs)

    return cast(Stub, trained)


def _load_operator(path: Path, stub: Callable[..., Any]) -> Callable[..., Any]:
    if not path.is_file():
        raise InputError(
            f"@autodiff(backward=...) of {stub.__name__} names a file that is not there",
            path=path,
            remedy="run kernel-agent --file-path on this file first, or correct the path (it is relative to this file)",
        )
    module = _load_module(path)
    operator = getattr(module, f"{stub.__name__}_autograd", None)
    if operator is None:
        raise InputError(
            f"the delivered file has no {stub.__name__}_autograd",
            path=path,
            remedy=f"deliver a backward for the stub {stub.__name__} and name that file",
        )
    delivered = getattr(module, "FORWARD_FINGERPRINT", "")
    if delivered and forward_fingerprint(Path(stub.__code__.co_filename).read_text()) != delivered:
        warnings.warn(
            f"{stub.__name__} was edited after its backward was delivered; {path.name} runs the forward it was "
            "proven with. Run kernel-agent again to bring both together.",
            ForwardChanged,
            stacklevel=3,
        )
    return cast(Callable[..., Any], operator)


def _load_module(path: Path) -> ModuleType:
    name = f"kernel_agent_delivered_{path.stem}_{abs(hash(path.resolve()))}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module
