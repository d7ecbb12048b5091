"""Random projections of gradients to k numbers that keep inner products.

All are unbiased, E<Px, Py> = <x, y>, and the same on every device, for every batch split and
however the gradients are kept.
"""

from gradkeep.attribution.projections._project import (
    project,
    project_dense,
    project_layers,
    project_parameters,
    project_parts,
    project_rows,
    signs_or_normals,
)
from gradkeep.attribution.projections._projection import (
    KINDS,
    Projection,
    ProjectionKind,
    require_room,
)
from gradkeep.attribution.projections._two_sided import TwoSided, two_sided, two_sided_rows

__all__ = [
    "KINDS",
    "Projection",
    "ProjectionKind",
    "TwoSided",
    "project",
    "project_dense",
    "project_layers",
    "project_parameters",
    "project_parts",
    "project_rows",
    "require_room",
    "signs_or_normals",
    "two_sided",
    "two_sided_rows",
]
