"""Listing and SQL over a store."""
