"""Training steps that follow a plan of eviction and recomputation."""
