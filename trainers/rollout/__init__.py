"""What samples, and what plays: engines, rollouts, the pool of groups in flight."""
