"""Environments of others as chat environments."""
