import torch

from styles import bases
from styles.kernels import launch, twice


class Twice(bases.OneInput):
    """The backward is the base's."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        launch(twice, x, y)
        return y


double = Twice.apply
