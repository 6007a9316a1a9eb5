"""What a run shows and leaves behind; needs nothing of training."""
