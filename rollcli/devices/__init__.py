"""Where things go: hardware, model facts, memory by part, placement. Imports neither torch nor Ray."""
