"""The optimizer: minibatch gradients in, updates out."""
