"""Training within a budget by a plan made from recorded steps."""
