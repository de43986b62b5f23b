"""Solvers: BFGS, L-BFGS, conjugate gradients, trust region; and tests of derivatives.

coordinates.py     weights as points, and flat vectors of g^hor at all of them
iterate.py         where a solver is: frames, value, gradient; the lines that lead away
problem.py         the loss: samples, Hessians, scales
rules.py           what a descent has learned of the curvature
method.py          a method takes iterates to iterates: descent.py (line_search.py), trust_region.py
result.py          when a run is over, and what it has found
minimize.py        all of it in one call;  derivatives.py  tests of derivatives
"""

from ghor.solve.derivatives import Slope, check_gradient, check_hessian
from ghor.solve.minimize import minimize
from ghor.solve.result import Result

__all__ = ["Result", "Slope", "check_gradient", "check_hessian", "minimize"]
