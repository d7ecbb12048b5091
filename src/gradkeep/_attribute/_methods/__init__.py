"""Every method, one file each; the default first."""

from gradkeep._attribute._methods import _cos, _dot, _kernel, _kfac, _self, _tracin, _trak

ALL = (
    _kernel.METHOD,
    _trak.METHOD,
    _dot.METHOD,
    _cos.METHOD,
    _tracin.METHOD,
    _self.METHOD,
    _kfac.KFAC,
    _kfac.EKFAC,
)
