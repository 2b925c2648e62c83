"""Data, models, the loop, verification: what is computed on every rank."""
