import torch

from styles.kernels import launch, twice


class OneInput(torch.autograd.Function):
    """A forward of one tensor; subclasses bring the rest."""

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        launch(twice, dy, dx)
        return dx
