"""Gradient accumulators: three ways to accumulate and reduce, in floating or fixed point."""
