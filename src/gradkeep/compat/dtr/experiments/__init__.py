"""The experiments of DTR by configuration: train, record, simulate; tables and figures.

The work is done by `gradkeep.remat`; trials run on `gradkeep.farm`.
"""
