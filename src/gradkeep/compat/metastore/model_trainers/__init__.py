"""Trainers of MetaStore's three pairs of a model and a data set; each file is a command."""
