"""`Outline`: what make_args returns without its numbers, so that full sizes are counted in no time and no memory.

Arguments of real work have gigabytes: random numbers for them took eight seconds, only to learn that they are too many.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

import torch

from kernel_agent.ir import import_module
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.load import disabling_nothing
from kernel_agent.pairs.operators import registers_operators
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.syntax import parse

META = torch.device("meta")


class NoOutline(Exception):
    """Arguments have no outline, or none that may be looked for."""


class Outline:
    """Arguments of entries, on torch's device for tensors that have shapes alone.

    The file is imported afresh for them: tables that make_args or the stub keeps from one call to the next would have
    no numbers for those who need them.
    """

    def __init__(self, module: ModuleType) -> None:
        self._imported = module
        self._gave_up = False

    @functools.cached_property
    def _module(self) -> ModuleType:
        path = Path(self._imported.__file__ or "")
        if registers_operators(parse(path.read_text(encoding="utf-8"), path)):
            raise NoOutline(f"{path.name} may register operators")
        with disabling_nothing():
            return import_module(path, f"{self._imported.__name__}_outline")

    def __call__(self, entry: ShapeEntry) -> Arguments:
        """The arguments of an entry. Raises `NoOutline` where the user's code raises, as it does where it asks a tensor
        for its numbers: it would ask again at other sizes."""
        if self._gave_up:
            raise NoOutline("the first arguments had none")
        self._gave_up = True
        module = self._module
        with META:
            found = build_arguments(module, entry, device=META, seed=0)
        self._gave_up = False
        return found
