"""`Embedding`: which model made the vectors of an index, as the index remembers it. Those of two never meet."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.errors import EnvironmentProblem
from rag.embed import DIMENSIONS, MODEL_NAME, WEIGHTS_SHA256

OPENAI = "openai:"
"""What the name of a model begins with that OpenAI, or a server that speaks its protocol, is asked for."""


class EmbeddingProblem(EnvironmentProblem):
    """The model of an index cannot be used here. A search goes on without it; building an index does not."""


class Embedding(BaseModel):
    """Which model made the vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="`all-MiniLM-L6-v2`, the path of a model folder, or `openai:` and a name")
    sha256: str = Field(description="SHA-256 of its weights file, or over its folder; empty: asked over the network")
    dimensions: int = Field(description="length of a vector")

    @property
    def identity(self) -> str:
        """Equal for vectors that may be compared, and for no others."""
        return f"{self.model} {self.sha256} {self.dimensions}"

    @property
    def bundled(self) -> bool:
        """Whether it is the model that comes with a wheel, for which the thresholds are calibrated."""
        return self.model == MODEL_NAME

    @property
    def remote(self) -> bool:
        """Whether texts leave this machine to be embedded."""
        return self.model.startswith(OPENAI)


BUNDLED = Embedding(model=MODEL_NAME, sha256=WEIGHTS_SHA256, dimensions=DIMENSIONS)
"""The default."""
