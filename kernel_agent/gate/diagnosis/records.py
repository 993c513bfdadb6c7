"""What a diagnosis says, as records that the verdict carries and the ledger keeps."""

from __future__ import annotations

import enum

from pydantic import Field

from kernel_agent.record import Record


class Fault(str, enum.Enum):
    """The classes of mistakes that the bank of hypotheses knows."""

    MISSING_TERM = "missing term"
    DOUBLED_TERM = "doubled term"
    TERM_SIGN = "sign of a term"
    SCALE = "scale"
    SIGN = "sign"
    TRANSPOSED = "transposed"
    WRONG_AXIS = "wrong axis"
    UNMASKED_TAIL = "unmasked tail"
    LAST_BLOCK_SKIPPED = "last block skipped"
    STRIDES_IGNORED = "cotangent strides ignored"
    STALE_STATISTIC = "stale statistic"
    EXCHANGED = "gradient of another input"
    FACTOR = "wrong factor"
    OUTPUT_IGNORED = "cotangent of an output ignored"


class Hypothesis(Record):
    """One mistake that explains the whole residual of a gradient at the first red case."""

    grad: str
    fault: Fault
    statement: str = Field(description="one sentence without the gradient's name in front")
    left_over: float | None = Field(
        description="norm of the residual that it leaves over the norm of the residual, <= 1e-6; None: seen, not fitted"
    )
    line: int | None = Field(default=None, description="line of the user's forward that the term belongs to")


class Region(Record):
    """Where a gradient is wrong."""

    grad: str
    statement: str = Field(description="such as 'only in the last block of rows (rows 96 to 99)'")
    wrong_tiles: int
    tiles: int


class MatrixRow(Record):
    """One case of the red shape: which gradients pass."""

    case: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]


class Suspect(Record):
    """The first line of the candidate that computes something the exact adjoint does not."""

    line: int = Field(description="line of the judged pair file")
    statement: str


class Diagnosis(Record):
    """What could be told of a red verdict. Empty parts could not be told."""

    matrix: tuple[MatrixRow, ...] = ()
    readings: tuple[str, ...] = Field(default=(), description="what the pattern of the matrix says, one line each")
    where: tuple[Region, ...] = ()
    what: tuple[Hypothesis, ...] = ()
    suspect: Suspect | None = None
    notes: tuple[str, ...] = Field(default=(), description="which part could not be made, and why")
    seconds: float = 0.0
