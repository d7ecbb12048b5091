"""The commands of the datamodels library, of both its generations, with the same flags.

`python -m datamodels.training.worker ...` becomes `python -m gradkeep.compat.datamodels.training.worker
...`; scripts with `main(*_, index, logdir)`, specs and YAML files stay as they are.
"""
