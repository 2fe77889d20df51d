"""What happens around the minibatches and steps of a run, each in a file."""
