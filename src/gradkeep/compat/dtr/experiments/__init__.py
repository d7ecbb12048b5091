"""The experiments of DTR by configuration: train, record, simulate; tables and pictures.

What each part does is done by `gradkeep.remat`; the trials run on `gradkeep.farm`.
"""
