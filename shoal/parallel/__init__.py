"""Axes of parallelism, one file an axis, and `parallelize`, which composes them."""
