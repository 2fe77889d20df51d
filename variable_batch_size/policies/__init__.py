"""Policies: batch sizes decided while a run goes on; numbers in, a batch size out."""
