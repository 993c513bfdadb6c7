"""Shared by all rooms: one sandbox per test session, one place that checks a pair or a mutant of it, a few pairs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kept_servers import KeptServers

from kernel_agent.data import pairs_root
from kernel_agent.gate import GateOptions, Verdict, check
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox, supervisor
from kernel_agent.sandbox.supervisor import PRELOAD
from rag import Index, build_index


@pytest.fixture(autouse=True, scope="session")
def no_own_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have own pairs; here nobody has, in processes that are started, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


PAIRS = Path(__file__).parent / "gate" / "pairs"

torch.set_num_threads(1)


class PairJudge:
    """Checks the pairs of `test/gate/pairs` and what changes make of them. Truths are computed once per session."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._truths: dict[str, Truths] = {}

    def truths(self, name: str) -> Truths:
        """The truths of one pair, kept for the session."""
        if name not in self._truths:
            self._truths[name] = Truths(describe(read_file(PAIRS / f"{name}.py"), self.sandbox), self.sandbox)
        return self._truths[name]

    def spec(self, name: str) -> KernelSpec:
        """The spec of one pair."""
        return self.truths(name).spec

    def source(self, name: str, *changes: tuple[str, str]) -> str:
        """The pair's text with changes in its backward section. Each old text must stand there exactly once."""
        head, rest = (PAIRS / f"{name}.py").read_text().split(BACKWARD_MARKER)
        backward, check_section = rest.split(CHECK_MARKER)
        for old, new in changes:
            assert backward.count(old) == 1, f"{old!r} stands {backward.count(old)} times in the backward of {name}"
            backward = backward.replace(old, new)
        return head + BACKWARD_MARKER + backward + CHECK_MARKER + check_section

    def __call__(
        self, name: str, *changes: tuple[str, str], options: GateOptions | None = None, diagnose: bool = False
    ) -> Verdict:
        """The verdict on a pair, or on a mutant of it."""
        return self.check_source(name, self.source(name, *changes), options, diagnose=diagnose)

    def with_backward(self, name: str, backward: str, options: GateOptions | None = None) -> Verdict:
        """The verdict on a pair whose backward section is replaced."""
        text = self.source(name)
        head, rest = text.split(BACKWARD_MARKER)
        return self.check_source(
            name, f"{head}{BACKWARD_MARKER}\n{backward}\n\n{CHECK_MARKER}{rest.split(CHECK_MARKER)[1]}", options
        )

    def check_source(
        self, name: str, source: str, options: GateOptions | None = None, *, diagnose: bool = False
    ) -> Verdict:
        """The verdict on any text, with the named pair as the truth."""
        options, truths = options or GateOptions(), self.truths(name)
        return check(self.spec(name), source, self.sandbox, options, truths=truths, diagnose=diagnose)


CHILDREN = ("kernel_agent.compiler.child", "kernel_agent.bench.model_child")
"""What children of many tests would import again, each for half a second."""


@pytest.fixture(scope="session")
def servers() -> Iterator[KeptServers]:
    """Fork servers that sandboxes of this session have left."""
    kept = KeptServers(CHILDREN)
    yield kept
    kept.close()


@pytest.fixture(autouse=True)
def kept_servers(request: pytest.FixtureRequest, servers: KeptServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes that a test opens have servers that run, except where the lives of servers are what is tested."""
    if not request.path.is_relative_to(Path(__file__).parent / "sandbox"):
        monkeypatch.setattr(supervisor, "ForkServer", servers)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One fork server for the whole session: starting it costs more than most tests."""
    with Sandbox((*CHILDREN, *PRELOAD)) as shared:
        yield shared


FIXED = (
    *("layernorm_row", "layernorm_persistent", "rmsnorm_row", "rmsnorm_per_head", "add_rmsnorm", "groupnorm_small"),
    *("batchnorm_train_2d", "embedding_atomic", "embedding_sorted_segment", "fa2_causal", "fa_onekernel_dq_atomic"),
    *("fa_gqa_loop_heads", "softmax_row", "softmax_online", "log_softmax", "matmul_nt", "matmul_splitk_dw"),
    *("matmul_bias_gelu", "swiglu_separate", "swiglu_packed", "gelu_erf", "ce_row", "cumsum_rows"),
    *("selective_scan_recompute", "rwkv6_recurrent", "linattn_causal_chunk", "jagged_softmax", "gnn_message_sum"),
    *("causal_conv1d_dw", "kl_div_batchmean"),
)
"""Slugs of shipped pairs: with all of them, what is nearest would change with every pair that is added."""


@pytest.fixture(scope="session")
def pair_index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Thirty of the shipped pairs, searched by words alone: no model is loaded."""
    folder = tmp_path_factory.mktemp("pairs")
    for slug in FIXED:
        (path,) = pairs_root().glob(f"*/{slug}.py")
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, folder / path.parent.name)
    return build_index(folder, folder / "index", dense=False)


@pytest.fixture(scope="session")
def judge(sandbox: Sandbox) -> PairJudge:
    """Checks pairs and mutants."""
    return PairJudge(sandbox)
