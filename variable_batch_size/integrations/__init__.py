"""Integrations: frameworks that own the training loop; the only files that import them."""
