"""Data: what the ranks learn from.

`catalog` says what there is and what is wrong with it (no torch, no download), `load` gives the
sets. Files on disk: `sources` looks for them, `obtain` and `download` bring what is missing.
"""
