"""What the compiler makes of a kernel for sm_90: registers, spills, shared memory, instructions. Needs no GPU.

Triton brings ptxas along, so that a launch can be compiled to a cubin on any machine. Compiling imports nothing of a
candidate, but its kernels are Python functions of it: this runs in the candidate's child, and what comes out of it is
used to rank candidates, never to accept one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import warnings
from typing import TYPE_CHECKING

from pydantic import Field

from kernel_agent.bench.ptx_code import CodePart, code_parts
from kernel_agent.record import Record

if TYPE_CHECKING:
    from kernel_agent.ir.capture.build import Build

CAPABILITY = 90
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one program may use on sm_90 (CUDA C++ Programming Guide, compute capabilities)."""

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_DEBUG_LINE = re.compile(r"^\s*(\.loc|\.file|//)|^\s*\$L__(tmp|func_begin|func_end|info_string)\w*:")
_ATOMIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.", re.MULTILINE)


class CompiledKernel(Record):
    """One kernel as compiled for sm_90, or why it cannot be."""

    name: str
    problem: str = Field(default="", description="why there is no cubin, in one line; nothing below counts then")
    warps: int = 4
    stages: int = Field(default=3, description="stages of the software pipeline that were asked for")
    registers: int = Field(default=0, description="per thread")
    spill_stores: int = Field(default=0, description="bytes per thread, each instruction once")
    spill_loads: int = Field(default=0, description="bytes per thread, each instruction once")
    stack_bytes: int = Field(default=0, description="local memory per thread, spills included")
    shared_bytes: int = Field(default=0, description="per program")
    atomics: int = Field(default=0, description="atomic instructions in the code")
    wgmma: bool = Field(default=False, description="products run on whole warp groups, at the full rate of sm_90")
    mma: bool = Field(default=False, description="products run on single warps")
    async_copies: bool = Field(default=False, description="loads are copied to shared memory ahead of their use")
    code: tuple[CodePart, ...] = Field(default=(), description="outside of loops, then each loop in textual order")
    ptx: str = Field(default="", description="SHA-256 of the PTX without names of kernels, comments and source lines")

    @property
    def fits(self) -> bool:
        """Whether sm_90 can run it at all."""
        return not self.problem and self.shared_bytes <= SHARED_LIMIT

    @property
    def spills(self) -> int:
        """Bytes per thread that are spilled and loaded back, each instruction once."""
        return self.spill_stores + self.spill_loads


def compile_build(build: Build) -> CompiledKernel:
    """Compile one captured launch for sm_90, whatever GPU is here. Triton's failures are in `problem`."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name = build.kernel.fn.__name__
    attributes = {(place,): [["tt.divisibility", 16]] for place in build.aligned}
    source = ASTSource(build.kernel, dict(build.types), dict(build.constants), attributes)
    said = io.StringIO()
    try:
        # What ptxas tells stands in no file that Triton keeps: it must compile anew, and print.
        with (
            contextlib.redirect_stdout(said),
            warnings.catch_warnings(),
            knobs.nvidia.scope(),
            knobs.compilation.scope(),
        ):
            warnings.simplefilter("ignore")  # what Triton deprecates in its language is not ours to raise on
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True
            made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=dict(build.options))
    except Exception as error:  # Triton and ptxas fail in many ways on a candidate's kernel
        return CompiledKernel(name=name, problem=_first_line(error))
    ptx = made.asm["ptx"]
    return CompiledKernel(
        name=name,
        warps=made.metadata.num_warps,
        stages=made.metadata.num_stages,
        shared_bytes=made.metadata.shared,
        atomics=len(_ATOMIC.findall(ptx)),
        wgmma="wgmma.mma_async" in ptx,
        mma="mma.sync" in ptx,
        async_copies="cp.async" in ptx,
        code=code_parts(ptx),
        ptx=ptx_digest(ptx, name),
    ).model_copy(update=resources(said.getvalue()))


def resources(log: str) -> dict[str, int]:
    """What `ptxas -v` says of a module with one kernel, by field of `CompiledKernel`.

    Raises `ValueError` for a log without it.
    """
    registers, spills = _REGISTERS.search(log), _SPILLS.search(log)
    if registers is None or spills is None:
        raise ValueError(f"ptxas tells no registers: {log[:300]!r}")
    stack, stores, loads = (int(number) for number in spills.groups())
    return {
        "registers": int(registers.group(1)),
        "stack_bytes": stack,
        "spill_stores": stores,
        "spill_loads": loads,
    }


def ptx_digest(ptx: str, kernel: str) -> str:
    """Equal for PTX that differs in the kernel's name, comments and source lines only."""
    code = ptx.partition("\n\t.section\t")[0].partition("\n.section")[0]
    lines = (line.partition("//")[0].rstrip() for line in code.splitlines() if not _DEBUG_LINE.match(line))
    text = "\n".join(line for line in lines if line)
    return hashlib.sha256(re.sub(rf"\b{re.escape(kernel)}(?=\b|_param)", "kernel", text).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
