"""`RunConfig`: every knob of a run in one frozen, validated record that is saved with the run."""

from __future__ import annotations

import enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Backend(str, enum.Enum):
    """Who writes the backward."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    MANUAL = "manual"
    REPLAY = "replay"
    COMPILER = "compiler"


class Draft(str, enum.Enum):
    """What a model's first code starts from."""

    COMPILER = "compiler"
    """The derived backward, which it is to beat; pairs where nothing can be derived."""
    RAG = "rag"
    """The pair that its plan chooses."""
    NONE = "none"
    """The mathematics alone: no derived adjoint is shown, and no pair is followed."""


class Effort(str, enum.Enum):
    """Reasoning effort, mapped to each provider's own scale (`docs/models.md`)."""

    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class RunConfig(BaseModel):
    """The parameters of one run. Paths that the run writes to are given by the run folder, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path = Field(description="the user's forward file")
    out: Path = Field(default=Path("generated"), description="where delivered files go")
    backend: Backend | None = Field(
        default=None, description="None: chosen from the keys present, else the offline default"
    )
    model: str | None = Field(default=None, description="model name; None: the backend's default")
    base_url: str | None = Field(default=None, description="an OpenAI- or Anthropic-compatible server")
    effort: Effort = Effort.MEDIUM
    replay: Path | None = Field(default=None, description="the recorded run whose replies are replayed")
    topk: int = Field(default=4, ge=0, le=32, description="retrieved pairs shown to the model")
    min_sim: float | None = Field(
        default=None, ge=0.0, le=1.0, description="least descriptor cosine; None: the calibrated default"
    )
    rag: bool = True
    rag_exclude: tuple[str, ...] = ()
    rag_index: Path | None = Field(
        default=None, description="folder of the index to search; None: the shipped one and that of own pairs"
    )
    rag_unlicensed: bool = Field(default=False, description="show harvested pairs without a licence, too")
    max_iters: int = Field(default=10, ge=1, description="asks over phases 2 and 3 together")
    patience: int = Field(default=3, ge=1, description="asks without progress before rolling back to the best snapshot")
    min_rel_impr: float = Field(
        default=0.02, ge=0.0, description="relative speed-up an optimised candidate must show to be kept"
    )
    draft: Draft | None = Field(
        default=None, description="None: as in runs before there was a choice, pairs and no derived adjoint"
    )
    candidates: int = Field(
        default=1, ge=1, le=16, description="first drafts asked for at once, each from another anchor"
    )
    reflect: bool = Field(default=True, description="phase 2 begins with a plan that is checked and priced")
    diagnosis: bool = Field(default=True, description="red verdicts say where and what; False: the largest error only")
    tune_variants: int = Field(
        default=24, ge=0, description="variants of launch parameters tried before a model is asked in phase 3"
    )
    tune_seconds: float = Field(
        default=150.0, ge=0.0, description="for the numbers of a derived backward on a GPU, proofs included; 0: none"
    )
    mutant_seconds: float = Field(
        default=5.0, ge=0.0, description="for mutants of the backward that is about to be delivered; 0: none are made"
    )
    max_cost_usd: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0, description="input and output tokens over the whole run")
    seed: int = 0
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    freeze_forward: bool = False
    deterministic: bool = Field(default=False, description="accept only gradients of the same bits in every call")
    pause: bool = Field(
        default=False, description="stop when phase 2 is over, with exit code 4; `resume` goes on with phase 3"
    )
    wait: bool = Field(default=True, description="False: `manual` ends with exit code 4 instead of waiting for a reply")
