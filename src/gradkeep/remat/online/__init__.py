"""Eviction while a step runs."""
