"""Analyses of datamodels and of the models they were fitted to.

The names are those of `gradkeep.datamodels`, one module per kind of question.
"""
