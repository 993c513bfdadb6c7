"""The compiler: derives a Triton backward from the IR of a forward, without a model and without a network."""
