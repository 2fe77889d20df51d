"""Planning: what a run will do, before it starts."""
