"""Declare which weights of a module live on which space."""

from ghor.constraints.declare import check, constrain, declared_spaces, param_groups, project

__all__ = ["check", "constrain", "declared_spaces", "param_groups", "project"]
