"""Plans: which one to take when none is said."""
