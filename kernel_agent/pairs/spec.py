"""Records of what a file says (statically) and what its stub does (observed), shared by every room of the house."""

from __future__ import annotations

import enum
import hashlib
from pathlib import Path

from pydantic import Field

from kernel_agent.record import Record

Scalar = int | float | bool | str | None
Dim = Scalar | tuple[Scalar | tuple[Scalar, ...], ...]
"""A value of a SWEEP entry: a size, a flag, a name (`torch.float16` stands for the dtype), or tuples of such."""


class ShapeEntry(Record):
    """One entry of SWEEP or BENCH."""

    dims: dict[str, Dim]
    required: bool = True

    @property
    def label(self) -> str:
        """`M=17 N=100`: how cases and messages name the entry."""
        return " ".join(f"{name}={value}" for name, value in self.dims.items())


class FileFacts(Record):
    """What the syntax tree of a user's file or a pair file says. Reading it executes nothing."""

    path: Path
    source: str
    is_pair: bool = Field(description="True when the three section markers and META are present")
    stub: str = Field(description="name of the decorated function; `forward` in a pair file")
    stub_line: int
    parameters: tuple[str, ...] = Field(description="the stub's parameter names in order, without `ctx`")
    inputs_require_grad: tuple[int | str, ...] | None
    nondiff_outputs: tuple[int, ...]
    kernels: tuple[str, ...] = Field(description="names of @triton.jit functions, in file order")
    has_reference: bool
    has_surrogate: bool
    has_backward: bool = Field(description="the user's hand-written baseline, or the pair's backward section")
    bench: tuple[ShapeEntry, ...] = Field(default=(), description="BENCH of a dataset entry: sizes of real workloads")

    @property
    def stem(self) -> str:
        """File name without suffix: names the delivered files."""
        return self.path.stem

    @property
    def hash8(self) -> str:
        """First 8 hex digits of the SHA-256 of the forward's source; names the run folder."""
        return content_hash(self.source)[:8]


class ArgumentKind(str, enum.Enum):
    """What one argument or output is."""

    TENSOR = "tensor"
    NONE = "none"
    OTHER = "other"


class ArgumentFacts(Record):
    """One argument or output as observed at the first SWEEP entry."""

    name: str
    kind: ArgumentKind
    dtype: str = Field(default="", description="torch dtype name without `torch.`, for tensors")
    shape: tuple[int, ...] = ()
    needs_grad: bool = Field(default=False, description="inputs: gradient wanted; outputs: carries a gradient")
    text: str = Field(default="", description="repr of a non-tensor")
    axes: tuple[str, ...] = Field(
        default=(), description="one expression of dims per axis, such as `B*H`; `?` where it cannot be told"
    )
    dtypes: tuple[str, ...] = Field(default=(), description="dtypes seen over the dtypes that SWEEP names")
    dense: bool = Field(default=True, description="contiguous in row-major order, for tensors")


class KernelSpec(Record):
    """A forward that was read and once run: everything later rooms need to know about it."""

    facts: FileFacts
    sweep: tuple[ShapeEntry, ...]
    inputs: tuple[ArgumentFacts, ...] = Field(description="one per argument make_args passes, positional then keyword")
    outputs: tuple[ArgumentFacts, ...]
    returns_tuple: bool = Field(description="False: the stub returns one bare value")
    grads: tuple[str, ...] = Field(description="names of inputs whose gradients a backward returns, in order")
    launches: tuple[str, ...] = Field(description="kernels launched at the first entry, in order")
    mutated: tuple[str, ...] = Field(default=(), description="names of tensor inputs that the stub writes into")
    custom_gradient: bool = Field(default=False, description="`surrogate` replaces the truth for gradients")
    torch_ops: tuple[str, ...] = Field(
        default=(),
        description="computing torch functions of the stub itself: a backward may use them and their adjoints",
    )

    @property
    def hash8(self) -> str:
        """See `FileFacts.hash8`."""
        return self.facts.hash8


class Candidate(Record):
    """What a source of backwards delivers: sections, not whole files."""

    backward: str = Field(description="text of the `# --- backward ---` section without its marker")
    forward: str | None = Field(
        default=None, description="text of its own `# --- forward ---` section, if it saves more"
    )
    torch_ops: tuple[str, ...] = Field(
        default=(), description="computing torch functions that the backward calls and META of a pair file may lack"
    )

    @property
    def digest(self) -> str:
        """Content address of the candidate."""
        return content_hash((self.forward or "") + "\0" + self.backward)


_BLANKS = (" \n", "\t\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f")
"""Without one of these, no line of an ASCII text has blanks to drop but the last: most files, many times a second."""


def content_hash(text: str) -> str:
    """SHA-256 of the text with line ends normalised and trailing blanks dropped, as hex."""
    if not text.isascii() or any(blank in text for blank in _BLANKS):
        text = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    return hashlib.sha256(text.strip().encode()).hexdigest()
