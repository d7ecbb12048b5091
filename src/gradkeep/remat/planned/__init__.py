"""Training inside a byte budget: record a step, plan it, run the plan with saved-tensor hooks."""
