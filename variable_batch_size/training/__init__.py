"""Training: minibatches in, updates out."""
