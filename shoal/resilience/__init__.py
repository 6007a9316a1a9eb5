"""Runs that go on: what a launcher does about a failure, state kept in memory for it, and failures on request."""
