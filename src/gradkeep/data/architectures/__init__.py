"""Small reference models."""
