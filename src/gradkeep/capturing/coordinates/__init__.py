"""Keeping few bytes of every row: coordinates of its gradient in a basis that the store keeps."""
