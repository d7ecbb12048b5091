"""Random projections of per-sample gradients."""
