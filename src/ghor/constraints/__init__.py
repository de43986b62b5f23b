"""Declare which weights of a module live on which space."""

from ghor.constraints.declare import constrain, declared_spaces, param_groups, project
from ghor.constraints.multiples import constrain_multiples
from ghor.constraints.report import check

__all__ = ["check", "constrain", "constrain_multiples", "declared_spaces", "param_groups", "project"]
