"""Several jobs on one pool of cores: their processes, the loop that resizes them, and what it shows."""
