"""Example data that comes with packages: nothing is downloaded."""

from gradkeep.data._digits import Digits, load_digits

__all__ = ["Digits", "load_digits"]
