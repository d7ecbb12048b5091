"""Front ends with the names of other systems; what they do is done elsewhere."""
