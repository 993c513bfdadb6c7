"""The derivative of a PyTorch function as short lines of mathematics: runs in the truth child, only text leaves it."""
