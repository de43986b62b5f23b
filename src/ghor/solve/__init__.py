"""Solving problems: L-BFGS, conjugate gradients, trust region, and tests of derivatives."""

from .check import Slope, check_gradient, check_hessian
from .minimize import minimize
from .problem import Result

__all__ = ["Result", "Slope", "check_gradient", "check_hessian", "minimize"]
