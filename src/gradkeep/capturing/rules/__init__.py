"""Rules that compute the gradients of each kind of layer from its calls."""
