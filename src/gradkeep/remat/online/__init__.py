"""Online eviction while a step runs."""
