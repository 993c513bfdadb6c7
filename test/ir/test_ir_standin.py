"""The stand-in device answers what GPU files ask, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernel_agent.ir import declared_dtype, execute, import_module, standin

GPU_FILE = """
import torch, triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
FIXED = torch.device("cuda:0")
CAPABILITY = torch.cuda.get_device_capability()
SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count
SHARED = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]
TARGET = triton.runtime.driver.active.get_current_target()
TABLE = torch.arange(4, device=DEVICE)
assert torch.cuda.is_available()
CONFIGS = [triton.Config({"BLOCK": 32 if CAPABILITY[0] >= 9 else 16}, num_warps=SMS // 33)]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def kernel(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) + BLOCK, mask=c < n)


def stub(x):
    assert x.is_cuda and x.device == FIXED and DEVICE.type == "cuda"
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    y = torch.empty_like(x)
    with torch.cuda.device(x.device):
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    torch.cuda.synchronize()
    return y, programs
"""


@pytest.fixture
def gpu_file(tmp_path: Path) -> Path:
    path = tmp_path / "gpu_file.py"
    path.write_text(GPU_FILE)
    return path


def test_ranges_for_a_profiler_are_set_in_vain():
    # A torch without CUDA raises at the first of them; code that has imported the function meets the same stand-in.
    with standin(), torch.cuda.nvtx.range("{}", "launch"):
        torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("beside"))


def test_a_kernel_that_is_wrapped_for_tracing_is_launched_as_it_is():
    # Else torch carries the launch out as an operator of its own, which no capture sees as a launch.
    with standin():
        assert torch.library.wrap_triton(wrapped) is wrapped


@triton.jit
def wrapped(X):
    tl.store(X, 1.0)


def test_a_file_that_asks_for_the_gpu_at_import_and_in_its_stub_runs(gpu_file):
    module = import_module(gpu_file, "standin_gpu_file")
    assert module.CAPABILITY == (9, 0)
    assert (module.SMS, module.SHARED, module.TARGET.arch) == (132, 232448, 90)
    y, programs = execute(module.stub, (torch.zeros(40),)).result
    assert programs == 132
    assert y.tolist() == [32.0] * 40
    assert sys.modules["standin_gpu_file"] is module


def patched_names() -> dict[str, object]:
    """Everything the stand-in and the capture replace."""
    names = dict(vars(torch.cuda))
    names["Generator"] = torch.Generator
    names["apply"] = torch.autograd.Function.__dict__["apply"]
    names["driver"] = triton.runtime.driver._active
    names["run"], names["tune"] = JITFunction.run, Autotuner.run
    names["dtype"], names["modes"] = torch.get_default_dtype(), torch._C._len_torch_function_stack()
    names["grad"] = torch.is_grad_enabled()
    return names


def test_nothing_stays_patched_after_import_and_execution(gpu_file):
    before = patched_names()
    module = import_module(gpu_file, "standin_gpu_file_2")
    execute(module.stub, (torch.zeros(8),), {}, leaves=(0,))
    assert patched_names() == before


def test_nothing_stays_patched_when_the_stub_raises(gpu_file):
    before = patched_names()

    def stub(x):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        execute(stub, (torch.zeros(8),), {}, leaves=(0,))
    assert patched_names() == before


def test_a_file_that_fails_to_import_leaves_no_module(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('at import')")
    with pytest.raises(RuntimeError, match="at import"):
        import_module(path, "standin_broken")
    assert "standin_broken" not in sys.modules


def test_standin_may_be_nested_and_makes_tensors_on_the_cpu():
    with standin(), standin():
        generator = torch.Generator(device="cuda").manual_seed(0)
        x = torch.randn(3, device="cuda", generator=generator)
        assert x.cuda() is x
    assert x.device.type == "cpu"


def test_questions_about_dtypes_are_answered_for_the_declared_ones():
    # Answered for what images are held in, an output allocated in the common dtype would report float64.
    def stub(half, single):
        assert torch.result_type(half, single) == torch.float32
        assert torch.result_type(half, 2.0) == torch.float16
        assert torch.promote_types(half.dtype, torch.bfloat16) == torch.float32
        assert not torch.can_cast(torch.float32, torch.int32)
        assert torch.get_default_dtype() == torch.float32
        return torch.zeros(half.shape, dtype=torch.result_type(half, half))

    result = execute(stub, (torch.ones(2).half(), torch.ones(2))).result
    assert declared_dtype(result) == torch.float16


def test_what_is_asked_for_on_the_gpu_is_made_where_the_execution_computes_whatever_stands_around():
    # The truth child imports files under a stand-in of its own: an execution inside of it has another place.
    with standin():
        with standin(torch.device("meta")):
            assert torch.empty(3, device="cuda").is_meta
            assert torch.empty(3, device=torch.device("cuda", 0)).is_meta
            assert not torch.empty(3).is_meta
        assert torch.empty(3, device="cuda").device == torch.device("cpu")
