"""Trainers for MetaStore's three pairs of a model and a data set; each file is a command of its name."""
