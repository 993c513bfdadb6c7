"""The code around launches: what a stub gives its kernels, and the forward and backward that are written from that."""
