"""Chooses tiles, warps, stages and programs of a derived backward: by times on a GPU, or by a compile for sm_90."""
