"""Models: ours as plain single-device code, and the way to a user's own."""
