"""What can be computed from kept gradients without restoring them."""
