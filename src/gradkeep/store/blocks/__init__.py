"""Blocks: segments of rows under manifests."""
