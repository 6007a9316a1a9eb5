"""A run on several machines: each runs `shoal train` with the same run directory, one of them leads, and any may come or go."""
