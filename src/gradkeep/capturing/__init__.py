"""Capture of per-sample gradients: layer rules, tasks, replay, and a recorder for training loops."""
