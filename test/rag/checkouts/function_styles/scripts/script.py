"""A script imports what lies beside it."""
import torch
from kernel_beside import halve


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        halve[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        halve.run(dy, dx, dy.numel(), BLOCK=1024, grid=(1,), warmup=False)
        return dx


if __name__ == "__main__":
    print(Halve.apply(torch.ones(4)))
