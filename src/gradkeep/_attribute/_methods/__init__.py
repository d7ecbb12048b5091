"""Every method, one file each; the default first."""

from gradkeep._attribute._methods import _cos, _dot, _self, _tracin

ALL = (
    _dot.METHOD,
    _cos.METHOD,
    _tracin.METHOD,
    _self.METHOD,
)
