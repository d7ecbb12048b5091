"""Random projections of gradients to k numbers that keep inner products.

All are unbiased, E<Px, Py> = <x, y>, and the same on every device, for every batch split and
however the gradients are kept.
"""

from gradkeep.attribution._projections._dense import (
    project_dense,
    project_parameters,
    signs_or_normals,
)
from gradkeep.attribution._projections._project import project
from gradkeep.attribution._projections._projection import KINDS, Kind, Projection
from gradkeep.attribution._projections._rows import project_rows
from gradkeep.attribution._projections._two_sided import TwoSided, two_sided, two_sided_rows

__all__ = [
    "KINDS",
    "Kind",
    "Projection",
    "TwoSided",
    "project",
    "project_dense",
    "project_parameters",
    "project_rows",
    "signs_or_normals",
    "two_sided",
    "two_sided_rows",
]
