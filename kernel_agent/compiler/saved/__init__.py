"""Passes on a forward before it is differentiated: what it stored is loaded, the gauge of a softmax is chosen."""
