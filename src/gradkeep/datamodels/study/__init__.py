"""Studies: many models, each trained on its own subset."""
