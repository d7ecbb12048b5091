"""Models that were used to study rematerialization, built by name with generated inputs."""

from gradkeep.data._zoo._catalog import build, checked_sizes, default_sizes, published_sizes, zoo
from gradkeep.data._zoo._workload import Workload

__all__ = ["Workload", "build", "checked_sizes", "default_sizes", "published_sizes", "zoo"]
