"""One file for each kind of layer: from its calls to its gradients."""
