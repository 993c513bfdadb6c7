"""What the package of the gate offers is what its name says, in whatever order things are imported."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import kernel_agent.gate


def test_no_public_name_of_the_gate_is_that_of_one_of_its_files():
    # With a file `check.py`, an import of it put the module where the function belongs.
    files = {found.name for found in pkgutil.iter_modules(kernel_agent.gate.__path__)}
    assert files.isdisjoint(kernel_agent.gate.__all__)


@pytest.mark.parametrize("first", ["kernel_agent.gate.checking", "kernel_agent.gate.options", "kernel_agent.gate"])
def test_the_gate_is_a_function_whatever_was_imported_before(first: str):
    program = f"import {first}, kernel_agent.gate; assert callable(kernel_agent.gate.check)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_of_the_gate_is_there():
    assert all(getattr(importlib.import_module("kernel_agent.gate"), name) for name in kernel_agent.gate.__all__)
