"""How long a backward takes: measured on a GPU, or modelled without one and labelled so."""
