"""Places that hold the bytes of a store."""
