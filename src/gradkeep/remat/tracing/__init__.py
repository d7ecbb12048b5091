"""Recording of the operators of a step."""
