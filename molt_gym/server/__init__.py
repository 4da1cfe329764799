"""The loopback server: an agent's own SDK talks to it, and what it asks becomes a turn of a rollout."""
