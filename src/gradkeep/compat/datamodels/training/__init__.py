"""Create a store directory, and train the model of one of its rows."""
