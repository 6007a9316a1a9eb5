"""Training: the step, the loop around it, and what they are made of."""
