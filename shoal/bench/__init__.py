"""What a step costs and what it is made of, measured on this machine's ranks."""
