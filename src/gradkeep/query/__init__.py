"""What can be computed from kept gradients without restoring them.

>>> from gradkeep import query
>>> [name for name in query.__all__ if name.islower()]
['along', 'cosine', 'dot', 'gradients', 'gram', 'mean', 'squares',
 'top', 'total', 'variance']
"""

from gradkeep.query._ask import cosine, dot, gram, top
from gradkeep.query._gradients import Gradients, gradients
from gradkeep.query._groups import Directions, along, mean, squares, total, variance
from gradkeep.query._products import Plan, Products, Step, Top

__all__ = [
    "Directions",
    "Gradients",
    "Plan",
    "Products",
    "Step",
    "Top",
    "along",
    "cosine",
    "dot",
    "gradients",
    "gram",
    "mean",
    "squares",
    "top",
    "total",
    "variance",
]
