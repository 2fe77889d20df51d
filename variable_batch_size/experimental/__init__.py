"""What may change or be removed in any version: each folder stands alone, and nothing imports it."""
