"""Rules: what a step's batch size makes of the optimizer's settings."""
