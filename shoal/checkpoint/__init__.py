"""Checkpoints: folders that are complete or not there, and what is in them."""
