"""Files that register operators of torch's are told from those that only speak of a library, or call an operator."""

from __future__ import annotations

import ast

import pytest

from kernel_agent.pairs.operators import registers_operators


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n@torch.library.custom_op('mine::f', mutates_args=())\ndef f(x): ...",
        "from torch.library import triton_op\n@triton_op('mine::f', mutates_args={})\ndef f(x): ...",
        "from torch import library as registry\nmine = registry.Library('mine', 'DEF')",
        "import torch.library as registry\nregistry.define('mine::f', '(Tensor x) -> Tensor')",
        "import torch as t\nt.library.Library('mine', 'DEF').define('f(Tensor x) -> Tensor')",
        "import torch\nregistry = torch.library\nregistry.impl('mine::f', 'CUDA')(print)",
        "def register():\n    from torch.library import impl\n    impl('mine::f', 'CUDA')(print)\nregister()",
        "from torch.library import *\ndefine('mine::f', '(Tensor x) -> Tensor')",
        "import torch\nuse = torch.ops.aten.sin.default.py_impl(1)",
    ],
)
def test_a_registry_is_seen_wherever_it_is_imported_and_whatever_it_is_called(text: str) -> None:
    # A form that is missed has its operators replaced by those of a second import.
    assert registers_operators(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        '"""As in the library of another vendor."""\nlibrary = 3\nprint(library)',
        "from triton.language.extra import libdevice as library\nlibrary.tanh(1)",
        "import torch\ntorch.ops.mine.square(1)",
        "import torch\nfrom torch.library import wrap_triton\nwrap_triton(print)\ntorch.library.wrap_triton(print)",
        "from torch.library import custom_op",
    ],
)
def test_a_word_a_call_and_an_import_alone_register_nothing(text: str) -> None:
    # Taken for registrations, they cost their file the outlines of its arguments.
    assert not registers_operators(ast.parse(text))
