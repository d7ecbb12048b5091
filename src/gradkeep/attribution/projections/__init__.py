"""Random projections of gradients to k numbers that keep inner products.

All are unbiased, E<Px, Py> = <x, y>, and the same on every device, for every batch split and
however the gradients are kept.
"""

from gradkeep.attribution.projections._flat_sketches import ProjectionSum
from gradkeep.attribution.projections._project import (
    add_rows,
    project,
    project_dense,
    project_parameters,
    project_rows,
    signs_or_normals,
)
from gradkeep.attribution.projections._projection import (
    KINDS,
    Projection,
    ProjectionKind,
    require_room,
)
from gradkeep.attribution.projections._sketch import GradientSketch, sketch_of
from gradkeep.attribution.projections._two_sided import TwoSided, two_sided, two_sided_rows

__all__ = [
    "KINDS",
    "GradientSketch",
    "Projection",
    "ProjectionKind",
    "ProjectionSum",
    "TwoSided",
    "add_rows",
    "project",
    "project_dense",
    "project_parameters",
    "project_rows",
    "require_room",
    "signs_or_normals",
    "sketch_of",
    "two_sided",
    "two_sided_rows",
]
