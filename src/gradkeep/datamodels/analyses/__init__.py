"""What datamodels, and the models they were fitted to, tell about the training data.

The names are those of `gradkeep.datamodels`, one module per kind of question.
"""
