"""Solvers: BFGS, L-BFGS, conjugate gradients, trust region; and tests of derivatives."""

from ghor.solve.derivatives import Slope, check_gradient, check_hessian
from ghor.solve.minimize import minimize
from ghor.solve.problem import Result

__all__ = ["Result", "Slope", "check_gradient", "check_hessian", "minimize"]
