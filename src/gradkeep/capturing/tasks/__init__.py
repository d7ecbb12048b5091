"""What is asked of a model for every sample."""
