"""Take out the guards of the library, one by one, and name those that no test misses.

A guard is a line that only matters on a bad day: a check, a limit, a repair of rounding, an undoing. Code runs
without it, and so do tests that do not ask for it. Every guard below is replaced in a copy of the source, and the
tests that should miss it are run there: one of them has to fail.

    make mutants                              all of them: "mutants: 90, survived: none"
    make mutants ARGS="--only polish"         those with this word in their names, with the output of pytest
    make mutants ARGS="-j 4"                  four at a time

Whoever writes a guard adds it here, with a test. `test_mutants.py` holds the list to the code.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/ghor")

# Where the guards are and where they are tested, so that a file that moves is one line here.
FILES = {
    "guards": "lifting/guards.py",
    "stack": "lifting/stack.py",
    "lifted": "lifting/lifted.py",
    "partition": "lifting/partition.py",
    "views": "lifting/views.py",
    "contract": "lifting/contract.py",
    "param_groups": "lifting/param_groups.py",
    "saving": "lifting/saving.py",
    "matrix_rules": "lifting/matrix_rules.py",
    "verdict": "lifting/probe/verdict.py",
    "declare": "constraints/declare.py",
    "validation": "constraints/validation.py",
    "base": "spaces/base.py",
    "matrix": "spaces/matrix.py",
    "orthogonal": "spaces/orthogonal.py",
    "rotations": "spaces/rotations.py",
    "framed": "spaces/framed.py",
    "hyperbolic": "spaces/hyperbolic.py",
    "spd": "spaces/spd.py",
    "symplectic": "spaces/symplectic.py",
    "sections": "spaces/sections.py",
    "linalg": "linalg.py",
    "retraction": "retraction.py",
    "muon": "optim/muon.py",
    "lbfgs": "optim/lbfgs.py",
    "points": "solve/points.py",
    "line_search": "solve/line_search.py",
    "trust_region": "solve/trust_region.py",
    "directions": "solve/directions.py",
    "problem": "solve/problem.py",
    "adapters": "adapters.py",
    "precision": "_torch/precision.py",
}


class Mutant(NamedTuple):
    """A guard, word for word as it stands once in its file, what is put in its place, and who misses it."""

    name: str
    file: str  # a key of FILES
    guard: str
    without: str
    tests: str  # node ids below tests/, separated by blanks

    @property
    def path(self) -> Path:
        return SOURCE / FILES[self.file]

    def nodes(self) -> list[str]:
        return [f"tests/{node}" for node in self.tests.split()]

    def applied(self, source: str) -> str:
        """The source without the guard."""
        count = source.count(self.guard)
        if count != 1:
            raise ValueError(f"{self.name}: {self.path} has this {count} times, not once:\n{self.guard}")
        return source.replace(self.guard, self.without)


MUTANTS = [
    # -- lifting/guards: before a step
    Mutant(
        "changes through .data on the CPU",
        "guards",
        "if not touched and (then is None or not (s.free or s.age % SELDOM == 0)):",
        "if not touched:",
        "lifting/test_guards.py::test_a_weight_moved_within_its_space",
    ),
    Mutant(
        "changes through .data on accelerators",
        "guards",
        "if not touched and (then is None or not (s.free or s.age % SELDOM == 0)):",
        "if not touched and (then is None or not s.free):",
        "_torch/test_values.py::test_every_so_often_it_looks_for_changes_from_outside",
    ),
    Mutant(
        "a shared step count that was written",
        "guards",
        "tuple(map(_version, s.seen.shared)) != s.seen.shared_versions",
        "False",
        "lifting/test_nothing_wrong_nothing_refused.py::test_a_shared_step_count_written_in_place_is_said",
    ),
    Mutant(
        "the same values written again after a NaN",
        "guards",
        "changed = changed | (written & ~_finite(s))",
        "changed = changed",
        "lifting/test_nonfinite_gradients.py::test_constrain_again_recovers_from_nan",
    ),
    Mutant(
        "constrained to another space since",
        "guards",
        "if declared is not None and declared != s.space:",
        "if False:",
        "lifting/test_guards.py::test_constrained_anew_to_another_space",
    ),
    Mutant(
        "a weight that was moved off its space",
        "guards",
        "check_on_space([s.owners[i] for i in some], s.space, [s.names[i] for i in some], warn)",
        "pass",
        "lifting/test_guards.py::test_a_weight_moved_off_its_space",
    ),
    Mutant(
        "the section rebuilt where a weight was moved",
        "guards",
        "s.section.rebuild(rows, s.exact(s.weights()[changed]))",
        "pass",
        "lifting/test_guards.py::test_a_weight_moved_within_its_space",
    ),
    Mutant(
        "moments that are not finite start from zero",
        "guards",
        "value[broken] = 0",
        "pass",
        "lifting/test_nonfinite_gradients.py::test_constrain_again_recovers_from_nan",
    ),
    Mutant(
        "a half precision weight that was loaded",
        "guards",
        "return torch.where(near, weights, Y.reshape(weights.shape).to(s.where[0]))",
        "return weights",
        "lifting/test_half_precision.py::test_a_weight_loaded_beside_another_state_counts",
    ),
    # -- lifting/guards: in a step and after it
    Mutant(
        "velocities off g^hor",
        "guards",
        "if bool(out.any()):",
        "if False:",
        "lifting/test_guards.py::test_a_velocity_that_has_left_ghor_moves_nothing",
    ),
    Mutant(
        "velocities off g^hor, later on",
        "guards",
        "if (s.age >= TRUSTED and s.age % SELDOM) or not s.W.numel():",
        "if s.age >= TRUSTED or not s.W.numel():",
        "lifting/test_guards.py::test_a_velocity_that_has_left_ghor_moves_nothing",
    ),
    Mutant(
        "polishing at once after a long step",
        "guards",
        "at_once = not peak <= s.large and bool(((length > s.large) & (length <= s.limit)).any())",
        "at_once = False",
        "laws/test_long_steps.py::test_rounding_of_a_long_step_is_repaired_at_once",
    ),
    Mutant(
        "polishing of implicit points on accelerators",
        "guards",
        "blind = not s.free and not s.section.holds_point",
        "blind = False",
        "_torch/test_values.py::test_huge_steps_stay_on_the_space",
    ),
    Mutant(
        "polishing when it is due",
        "guards",
        "or s.age % POLISH_POINT == 0:",
        "or False:",
        "laws/test_drift.py::test_1000_steps",
    ),
    Mutant(
        "long steps are taken after all",
        "guards",
        "s.section.update_far(Y, *deferred, s.retraction, s.turning())",
        "pass",
        "laws/test_long_steps.py::test_a_long_step_is_the_step_in_float64",
    ),
    Mutant(
        "long velocities are clipped",
        "guards",
        "return rows, V * (longest / norm).clamp_max(1)",
        "return rows, V",
        "laws/test_long_steps.py::test_points_of_a_group_that_is_not_compact_stay_finite",
    ),
    Mutant(
        "a clipped velocity is said",
        "guards",
        "if bool((norm > longest).any()):",
        "if False:",
        "laws/test_long_steps.py::test_a_clipped_velocity_warns_once",
    ),
    Mutant(
        "lengths that do not overflow",
        "guards",
        "norm = largest * s.each(torch.linalg.vector_norm((V / largest).flatten(1), dim=1))",
        "norm = s.each(torch.linalg.vector_norm(V.flatten(1), dim=1))",
        "laws/test_long_steps.py::test_a_long_step_is_the_step_in_float64",
    ),
    Mutant(
        "velocities that are not finite",
        "guards",
        "rows = (finite & left & (length > 0)).nonzero().flatten()",
        "rows = left.nonzero().flatten()",
        "lifting/test_nonfinite_gradients.py::test_gradient_that_is_not_finite",
    ),
    Mutant(
        "0/0 of coordinates that do not exist",
        "guards",
        "parts(W).masked_fill_(parts(s.space.one.hor(ones)) == 0, 0)",
        "pass",
        "lifting/test_guards.py::test_adam_without_eps",
    ),
    Mutant(
        "a weight that has outgrown its dtype",
        "guards",
        "large is not None and bool(large.any()):",
        "False:",
        "spaces/test_symplectic.py::test_every_learning_rate_stays_on_the_space",
    ),
    # -- lifting/stack
    Mutant(
        "the limit of velocities on accelerators",
        "stack",
        "W = (W * self.each((self.limit / length).clamp_max(1))).nan_to_num(0, 0, 0)",
        "W = W.nan_to_num(0, 0, 0)",
        "_torch/test_values.py::test_huge_steps_are_short_where_points_can_grow",
    ),
    Mutant(
        "NaN velocities on accelerators",
        "stack",
        "W = (W * self.each((self.limit / length).clamp_max(1))).nan_to_num(0, 0, 0)",
        "W = W * self.each((self.limit / length).clamp_max(1))",
        "_torch/test_values.py::test_nan_gradients_move_nothing",
    ),
    Mutant(
        "long velocities are deferred",
        "stack",
        "W = torch.where(self.each(moved), W, 0)",
        "pass",
        "laws/test_long_steps.py::test_no_step_is_too_long_for_the_space",
    ),
    Mutant(
        "a section that is being written is known as such",
        "stack",
        "self.in_motion = True",
        "pass",
        "lifting/test_interrupted.py::test_interrupted_while_a_section_moves",
    ),
    Mutant(
        "half precision points are projected",
        "stack",
        "return self.space.one.project(Y) if self.half and Y.numel() else Y",
        "return Y",
        "lifting/test_half_precision.py::test_the_first_step_starts_at_the_point_behind_the_weight",
    ),
    Mutant(
        "half precision weights that did not move",
        "stack",
        "points = torch.where(moved, points.to(self.where[0]), self.space.split(self.weights()))",
        "points = points.to(self.where[0])",
        "lifting/test_half_precision.py::test_the_first_step_starts_at_the_point_behind_the_weight",
    ),
    Mutant(
        "half precision anchors are projected",
        "stack",
        "space.one.project(anchor) if self.half and anchor is not None and anchor.numel() else anchor",
        "anchor",
        "lifting/test_decay_target.py::test_half_precision_stays_at_its_anchor",
    ),
    Mutant(
        "second moments spread with the boost",
        "stack",
        "self.section.squares = self.even",
        "pass",
        "laws/test_other_spaces.py::test_adam_spreads_its_second_moments",
    ),
    Mutant(
        "writes before a stack is split",
        "stack",
        "part.seen = replace(part.seen, versions=tuple(self.seen.versions[i] for i in index))",
        "pass",
        "_torch/test_values.py::test_writes_are_seen_when_a_stack_is_split",
    ),
    # -- lifting/lifted
    Mutant(
        "groups hold the weights again",
        "lifted",
        'zip(self.param_groups, flight.weights, strict=True):\n            group["params"] = params',
        "zip(self.param_groups, flight.weights, strict=True):\n            pass",
        "lifting/test_interrupted.py::test_an_exception_inside_the_base_step_leaves_groups_and_weights",
    ),
    Mutant(
        "state that an interrupted rule has begun",
        "lifted",
        "inside[key] = {}",
        "pass",
        "lifting/test_interrupted.py::test_an_exception_inside_the_base_step_leaves_groups_and_weights",
    ),
    Mutant(
        "no velocity is left behind",
        "lifted",
        "s.H.zero_()",
        "pass",
        "lifting/test_interrupted.py::test_an_error_in_the_base_leaves_no_velocity_behind",
    ),
    Mutant(
        "a section that was being written is dropped",
        "lifted",
        "s.drop_section()",
        "pass",
        "lifting/test_interrupted.py::test_interrupted_while_a_section_moves",
    ),
    Mutant(
        "a step that did not land",
        "lifted",
        "if self._flight is not None:  # the end of the last step was interrupted",
        "if False:",
        "lifting/test_interrupted.py",
    ),
    Mutant(
        "steps in inference mode",
        "lifted",
        "if torch.is_inference_mode_enabled():",
        "if False:",
        "lifting/test_interrupted.py::test_steps_in_inference_mode",
    ),
    Mutant(
        "steps under autocast",
        "lifted",
        "if any(map(torch.is_autocast_enabled, full_precision.devices)):",
        "if False:",
        "_torch/test_precision.py",
    ),
    Mutant(
        "gradients are looked at where a group asks for it",
        "lifted",
        'if True in [group["error_if_nonfinite"] for group in self.param_groups]:',
        "if False:",
        "lifting/test_nonfinite_gradients.py::test_error_if_nonfinite_by_group",
    ),
    Mutant(
        "weight decay without effect is said",
        "lifted",
        "if decay and all(manifold):",
        "if False:",
        "constraints/test_declare.py::test_weight_decay_on_manifold_weights_warns_once",
    ),
    Mutant(
        "no weight on a manifold is said",
        "lifted",
        "if not self._explicit and not any(manifold):",
        "if False:",
        "constraints/test_declare.py::test_warning_where_nothing_is_on_a_manifold",
    ),
    # -- lifting: groups, stacks, saving
    Mutant(
        "rules are tried where they run",
        "contract",
        "verify(self.Base, self._options, group, spaces_of(group), self.stack, self.blocks)",
        "pass",
        "lifting/test_probe.py::test_the_refusal_names_shape_and_space",
    ),
    Mutant(
        "a group that was refused is taken off again",
        "contract",
        "self.param_groups.pop()",
        "pass",
        "constraints/test_validation.py::test_unnamed_weights_are_named_by_place "
        "constraints/test_validation.py::test_weight_off_its_space",
    ),
    Mutant(
        "optimizers with two modes",
        "verdict",
        'if callable(getattr(Base, "train", None)) and callable(getattr(Base, "eval", None)):',
        "if False:",
        "lifting/test_probe.py::test_words_say_why_and_what_to_use",
    ),
    Mutant(
        "constrained after the optimizer was built",
        "partition",
        "if isinstance(space, Euclidean) and declared.get(id(p), space) != space:",
        "if False:",
        "constraints/test_packed.py::test_constrain_after_building_the_optimizer",
    ),
    Mutant(
        "differentiable steps",
        "partition",
        'if s.group.get("differentiable"):',
        "if False:",
        "lifting/test_param_groups.py::test_differentiable",
    ),
    Mutant(
        "a section that is switched",
        "partition",
        'and seen["section"] == group["section"]',
        "",
        "lifting/test_guards.py::test_section_kind_switched_live",
    ),
    Mutant(
        "a retraction that is switched",
        "partition",
        'and seen["retraction"] == group["retraction"]',
        "",
        "lifting/test_param_groups.py",
    ),
    Mutant(
        "weights that are exchanged in their group",
        "partition",
        'and all(map(operator.is_, seen["params"], group["params"]))',
        "",
        "lifting/test_guards.py::test_a_parameter_replaced_in_its_group_is_looked_at",
    ),
    Mutant(
        "state that users write",
        "views",
        "and all(map(operator.is_, values, s.seen.values))",
        "",
        "lifting/test_guards.py::test_state_written_by_the_user_counts",
    ),
    Mutant(
        "one weight of a stack in another dtype",
        "views",
        'and set(map(operator.attrgetter("dtype"), s.owners)) == {s.where[0]}',
        "",
        "lifting/test_guards.py::test_one_weight_of_a_stack_gets_another_dtype",
    ),
    Mutant(
        "unknown retractions and sections",
        "param_groups",
        "if not isinstance(group[key], str) or group[key] not in known:",
        "if False:",
        "lifting/test_param_groups.py::test_unknown_values_of_our_options",
    ),
    Mutant(
        "misspelt keys of groups",
        "param_groups",
        "if close and key not in GROUP_KEYS and key not in defaults:",
        "if False:",
        "lifting/test_param_groups.py::test_misspelt_group_key",
    ),
    Mutant(
        "as many spaces as weights",
        "param_groups",
        "if len(spaces) != len(params):",
        "if False:",
        "lifting/test_param_groups.py::test_number_of_spaces",
    ),
    Mutant(
        "a weight twice in a group",
        "param_groups",
        "if id(p) in seen:",
        "if False:",
        "constraints/test_validation.py::test_the_same_weight_twice_in_a_group",
    ),
    Mutant(
        "two weights with one memory",
        "param_groups",
        "if place in places:",
        "if False:",
        "constraints/test_validation.py::test_weights_that_share_memory",
    ),
    Mutant(
        "a group that contradicts the declaration",
        "param_groups",
        "if declared is not None and declared != given:",
        "if False:",
        "lifting/test_param_groups.py::test_group_that_contradicts_the_declaration",
    ),
    Mutant(
        "anchors without weight decay",
        "param_groups",
        "if not any(key in group for key in DECAYS):\n        raise",
        "if False:\n        raise",
        "lifting/test_decay_target.py::test_what_is_refused",
    ),
    Mutant(
        "state of another space",
        "saving",
        "if str(a) != str(b):",
        "if False:",
        "lifting/test_state_dict.py::test_state_dicts_of_another_space_are_refused",
    ),
    Mutant(
        "options of a checkpoint that differ",
        "saving",
        "if key in loaded and loaded[key] != group[key]:",
        "if False:",
        "lifting/test_nothing_wrong_nothing_refused.py::test_options_of_a_checkpoint_that_differ_are_said",
    ),
    Mutant(
        "moments of the plain optimizer",
        "saving",
        "del self.state[p]",
        "pass",
        "lifting/test_state_dict.py::test_a_state_dict_of_the_plain_optimizer_loads",
    ),
    Mutant(
        "state keeps the dtype that it was saved in",
        "saving",
        "self.state[p][k] = v.to(theirs.device) if torch.is_tensor(v) else theirs",
        "pass",
        "lifting/test_state_dict.py::test_resume_is_exact",
    ),
    Mutant(
        "loaded groups keep their space",
        "saving",
        'group["space"] = old[i]["space"]',
        "pass",
        "lifting/test_state_dict.py::test_resume_is_exact",
    ),
    Mutant(
        "blocks are skew to the bit",
        "matrix_rules",
        "s.W.copy_(s.space.one.hor(s.W))",
        "pass",
        "optim/test_muon.py::test_rules_of_matrices_lift_by_blocks",
    ),
    # -- constraints
    Mutant(
        "lazy weights",
        "validation",
        "if is_lazy(p):",
        "if False:",
        "constraints/test_validation.py::test_weights_of_other_kinds",
    ),
    Mutant(
        "sparse weights",
        "validation",
        "if p.layout != torch.strided:",
        "if False:",
        "constraints/test_validation.py::test_weights_of_other_kinds",
    ),
    Mutant(
        "expanded weights",
        "validation",
        "if any(step == 0 and size > 1 for step, size in zip(p.stride(), p.shape, strict=True)):",
        "if False:",
        "constraints/test_validation.py::test_weights_that_share_memory",
    ),
    Mutant(
        "weights that are not finite",
        "validation",
        "if not p.is_meta and (count :=",
        "if False and (count :=",
        "constraints/test_validation.py::test_weight_that_is_not_finite",
    ),
    Mutant(
        "weights off their space",
        "validation",
        "if not bool(bad.any()):",
        "if True:",
        "constraints/test_validation.py::test_weight_off_its_space",
    ),
    Mutant(
        "float64 weights of float32 digits",
        "validation",
        "p.copy_(space.project(p))",
        "pass",
        "lifting/test_nothing_wrong_nothing_refused.py::test_a_change_of_dtype_is_an_occasion_to_project",
    ),
    Mutant(
        "the worst point of a weight counts",
        "validation",
        "worst = (distance / allowed).argmax(1, keepdim=True)",
        "worst = torch.zeros_like(distance[:, :1], dtype=torch.int64)",
        "constraints/test_validation.py::test_every_point_of_a_weight_counts",
    ),
    Mutant(
        "anchors of another shape",
        "validation",
        "if anchor.shape != p.shape or anchor.is_complex() != p.is_complex():",
        "if False:",
        "lifting/test_decay_target.py::test_what_is_refused",
    ),
    Mutant(
        "all weights are moved, or none",
        "declare",
        "points = [nearest(p, space, name) for name, p, space in found]",
        "points = (nearest(p, space, name) for name, p, space in found)",
        "_torch/test_precision.py::test_project_moves_all_or_nothing",
    ),
    # -- spaces: sections
    Mutant(
        "the whole of Lambda is polished",
        "sections",
        "whole = now or age % self.period == 0",
        "whole = now",
        "laws/test_drift.py::test_the_whole_frame_is_back_on_its_group",
    ),
    Mutant(
        "the whole of Lambda is polished after a long step",
        "sections",
        "whole = now or age % self.period == 0",
        "whole = age % self.period == 0",
        "laws/test_long_steps.py::test_rounding_of_a_long_step_is_repaired_at_once",
    ),
    Mutant(
        "frames that would outgrow their dtype",
        "sections",
        "W = self.space.bounded(self.Lambda, W)",
        "pass",
        "spaces/test_symplectic.py::test_growth_is_held_without_a_look_at_the_values",
    ),
    Mutant(
        "frames that would outgrow their dtype by a long step",
        "sections",
        "W = self.space.bounded(Lambda, W)",
        "pass",
        "spaces/test_symplectic.py::test_every_learning_rate_stays_on_the_space",
    ),
    Mutant(
        "back to the group after a long step",
        "sections",
        "L = self.space.restore(self.space.update_section(wide(Lambda), W, R), self.E).to(Lambda.dtype)",
        "L = self.space.update_section(wide(Lambda), W, R).to(Lambda.dtype)",
        "laws/test_long_steps.py::test_rounding_of_a_long_step_is_repaired_at_once",
    ),
    Mutant(
        "back to the space after a long step, implicit",
        "sections",
        "Y[rows] = self.space.implicit_restore(y).to(Y.dtype)",
        "Y[rows] = y.to(Y.dtype)",
        "laws/test_long_steps.py::test_rounding_of_a_long_step_is_repaired_at_once",
    ),
    Mutant(
        "long steps in float64, implicit",
        "sections",
        "y, turned = wide(Y[rows]), [wide(X[rows]) for X in vectors]",
        "y, turned = wide(Y[rows]), [wide(X[rows]) for X in ()]",
        "laws/test_long_steps.py",
    ),
    Mutant(
        "what digits can hold after a long step",
        "sections",
        "self.Lambda[rows] = self.space.within_digits(Lambda, L)",
        "self.Lambda[rows] = L",
        "laws/test_other_spaces.py::test_points_stay_positive_definite",
    ),
    Mutant(
        "an inverse is forgotten when its section is rebuilt",
        "sections",
        "self.master[rows] = Y\n        self.P = None",
        "self.master[rows] = Y",
        "lifting/test_guards.py::test_a_weight_moved_within_its_space",
    ),
    Mutant(
        "an inverse is forgotten after a long step",
        "sections",
        "X[rows] = x.to(X.dtype)\n        self.P = None",
        "X[rows] = x.to(X.dtype)",
        "laws/test_long_steps.py",
    ),
    Mutant(
        "fingerprints see another order",
        "sections",
        "torch.cat([rows.sum(-1), rows.sum(-2), bits[:, k:].to(torch.int64)], -1)",
        "torch.cat([rows.sum(-1), bits[:, k:].to(torch.int64)], -1)",
        "spaces/test_sections.py::test_a_fingerprint_tells_the_order",
    ),
    Mutant(
        "vectors turn from a transported to an implicit frame",
        "sections",
        "self.space.implicit_turn(Y, implicit.R, self.Lambda, vectors)",
        "pass",
        "lifting/test_guards.py::test_section_kind_switched_live",
    ),
    Mutant(
        "sections of files are checked",
        "sections",
        'space.checked_section(held["section"], E)',
        'held["section"]',
        "lifting/test_nothing_wrong_nothing_refused.py::test_a_loaded_section_is_repaired_or_refused",
    ),
    Mutant(
        "anchors of files are checked",
        "sections",
        'space.checked_anchor(held["anchor"])',
        'held["anchor"]',
        "lifting/test_nothing_wrong_nothing_refused.py::test_a_loaded_section_is_repaired_or_refused",
    ),
    # -- spaces
    Mutant(
        "polishing repairs",
        "matrix",
        "X.add_(X @ ((eye_like(X) - product(self.inverse(X, n), X)) * (share / 2)))",
        "pass",
        "laws/test_frames.py::test_polishing_squares_the_distance",
    ),
    Mutant(
        "polishing leaves alone what did not move",
        "matrix",
        "share = share[..., None, None] if isinstance(share, Tensor) else share",
        "share = 1.0",
        "lifting/test_stack.py::test_repairs_leave_a_weight_alone_that_does_not_move",
    ),
    Mutant(
        "loaded sections are repaired",
        "matrix",
        "            self.polish(Lambda, E)\n        return Lambda",
        "            pass\n        return Lambda",
        "spaces/test_sections.py::test_a_loaded_complement_that_was_rounded_is_repaired",
    ),
    Mutant(
        "dense retractions where B is wide",
        "matrix",
        "if N < 2 * n and N <= R.dense_up_to:",
        "if False:",
        "laws/test_long_steps.py",
    ),
    Mutant(
        "anchors are renewed",
        "orthogonal",
        "return _renewed(Y1, R, P, worn) if bool(worn.any()) else (R, P)",
        "return (R, P)",
        "spaces/test_sections.py::test_all_the_way_around_a_great_circle",
    ),
    Mutant(
        "anchors are renewed on accelerators",
        "orthogonal",
        "R = torch.where(worn[..., None, None], Q * phases",
        "R = torch.where(worn[..., None, None] & False, Q * phases",
        "spaces/test_sections.py::test_all_the_way_around_a_great_circle",
    ),
    Mutant(
        "loaded anchors are refused",
        "orthogonal",
        "if not bool((off <= 0.005 * math.sqrt(R.shape[-1])).all()):",
        "if False:",
        "lifting/test_nothing_wrong_nothing_refused.py::test_a_loaded_section_is_repaired_or_refused",
    ),
    Mutant(
        "matrices without full rank",
        "orthogonal",
        "if not bool((rank == M.shape[-1]).all()):",
        "if False:",
        "constraints/test_validation.py::test_constrain_what_has_no_point_near",
    ),
    Mutant(
        "projections of huge and tiny matrices",
        "orthogonal",
        "M = M / M.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)",
        "M = M * 1",
        "laws/test_frames.py::test_projections_with_a_derivative_do_not_depend_on_the_size",
    ),
    Mutant(
        "projections are polished",
        "orthogonal",
        "Y = Y + Y @ (eye_like(Y) - product(Y.mH, Y)) / 2",
        "pass",
        "laws/test_frames.py::test_projections_are_on_the_space_to_rounding",
    ),
    Mutant(
        "frames are orthogonal after a step of any length",
        "orthogonal",
        "Q, R = torch.linalg.qr(Lambda)\n",
        "return super().restore(Lambda, E)\n        Q, R = torch.linalg.qr(Lambda)\n",
        "laws/test_long_steps.py::test_rounding_of_a_long_step_is_repaired_at_once",
    ),
    Mutant(
        "logarithms at the cut locus",
        "orthogonal",
        "if not off <= torch.finfo(Y.dtype).eps ** 0.5:",
        "if False:",
        "test_retraction.py::test_cut_locus_is_refused",
    ),
    Mutant(
        "reflections are no rotations",
        "rotations",
        "return super().residual(Y) + 2 * (det(self.matrix(Y).detach()) < 0)",
        "return super().residual(Y)",
        "constraints/test_validation.py::test_reflection_is_not_in_so",
    ),
    Mutant(
        "random rotations and projections have determinant 1",
        "rotations",
        "sign = torch.where(det(U @ V) < 0, -1, 1).to(U.dtype)",
        "sign = torch.ones_like(det(U @ V))",
        "constraints/test_validation.py::test_reflection_is_not_in_so",
    ),
    Mutant(
        "hyperbolic points are held where digits end",
        "hyperbolic",
        "return torch.where(beyond, ((far / x0).log() / t).clamp(0, 1), 1)",
        "return torch.ones_like(t)",
        "laws/test_other_spaces.py::test_it_says_when_digits_run_out",
    ),
    Mutant(
        "hyperbolic points beyond the digits are off",
        "hyperbolic",
        "x0 * torch.finfo(Y.dtype).eps < 1, (1",
        "x0 * torch.finfo(Y.dtype).eps < math.inf, (1",
        "laws/test_other_spaces.py",
    ),
    Mutant(
        "hyperbolic projections beyond the digits",
        "hyperbolic",
        "if not far * torch.finfo(X.dtype).eps < 1:",
        "if False:",
        "laws/test_other_spaces.py",
    ),
    Mutant(
        "squares of coordinates stay positive",
        "hyperbolic",
        "X[..., 1:] = step.spread(X[..., 1:]).clamp_min(0)",
        "X[..., 1:] = step.spread(X[..., 1:])",
        "laws/test_other_spaces.py",
    ),
    Mutant(
        "that digits have run out is said",
        "framed",
        "if not torch.compiler.is_compiling() and may_read(held) and bool(held.any()):",
        "if False:",
        "laws/test_other_spaces.py::test_it_says_when_digits_run_out",
    ),
    Mutant(
        "steps of SPD beyond the digits",
        "spd",
        "return torch.where(indefinite[..., None, None, None], before, after)",
        "return after",
        "laws/test_other_spaces.py::test_points_stay_positive_definite",
    ),
    Mutant(
        "SPD points that are indefinite are off",
        "spd",
        "return frobenius(Y - Y.mT) / 2 + indefinite * frobenius(Y)",
        "return frobenius(Y - Y.mT) / 2",
        "laws/test_frames.py",
    ),
    Mutant(
        "symplectic frames have a limit",
        "symplectic",
        "return W * s.clamp(0, 1).view(-1, *[1] * (W.dim() - 1))",
        "return W",
        "spaces/test_symplectic.py::test_bounded_shortens_what_grows_and_nothing_else",
    ),
    Mutant(
        "symplectic projections that miss",
        "symplectic",
        "if not bool((off <= rounding.clamp_max(1)).all()):",
        "if False:",
        "constraints/test_validation.py::test_constrain_what_has_no_point_near",
    ),
    Mutant(
        "means of weights that are none",
        "base",
        "if not bool(((w >= 0) & torch.isfinite(w)).all() and (total > 0).all()):",
        "if False:",
        "spaces/test_base.py::test_what_has_no_mean",
    ),
    Mutant(
        "implicit sections where there are none",
        "base",
        'if asked == "implicit" and not self.implicit:',
        "if False:",
        "lifting/test_param_groups.py::test_implicit_section_where_there_is_none",
    ),
    # -- linear algebra
    Mutant(
        "long sums in float64",
        "linalg",
        "if A.shape[-1] <= LONG:",
        "if True:",
        "test_linalg.py::test_long_sums_keep_their_digits",
    ),
    Mutant(
        "LU of a batch, one by one",
        "linalg",
        'if first.shape[-1] <= SMALL or first.dim() == 2 or first.device.type != "cpu":',
        "if True:",
        "test_linalg.py::test_inverse_and_solve_of_a_batch_on_two_threads",
    ),
    Mutant(
        "inverses of a batch, one by one",
        "linalg",
        "if X.shape[-1] <= SMALL:",
        "if True:",
        "test_linalg.py::test_inverse_and_solve_of_a_batch_on_two_threads",
    ),
    Mutant(
        "third derivatives of symmetric functions",
        "linalg",
        "bend = _Last.apply(bend, T, G, H) if torch.is_grad_enabled() else bend",
        "pass",
        "laws/test_points.py::test_logarithms_are_differentiated_twice_where_eigenvalues_meet",
    ),
    Mutant(
        "exponentials of long velocities on accelerators",
        "linalg",
        "if may_read(X) and X.numel() > 0 else 12):",
        "if may_read(X) and X.numel() > 0 else 3):",
        "_torch/test_values.py::test_huge_steps_stay_on_the_space",
    ),
    Mutant(
        "exponentials are balanced",
        "retraction",
        "c = torch.exp2(torch.round(torch.log2(size.clamp(1e-6, 1e6))))",
        "c = torch.ones_like(size)",
        "test_retraction.py",
    ),
    # -- optimizers
    Mutant(
        "Muon's blocks are skew to the bit",
        "muon",
        "W = space.hor(O)",
        "W = O",
        "optim/test_muon.py",
    ),
    Mutant(
        "Muon of zero gradients",
        "muon",
        "X = X / frobenius(X).clamp_min(eps)[:, None, None]",
        "X = X / frobenius(X)[:, None, None]",
        "optim/test_muon.py::test_newton_schulz",
    ),
    Mutant(
        "Muon's groups, all parts or none",
        "muon",
        "del self.param_groups[count:]",
        "pass",
        "optim/test_muon.py",
    ),
    Mutant(
        "L-BFGS and gradients that are not finite",
        "lbfgs",
        "if flat_spaces or bool(torch.isfinite(g).all()):",
        "if True:",
        "optim/test_lbfgs.py::test_a_loss_that_is_not_finite",
    ),
    Mutant(
        "L-BFGS and weights that others moved",
        "lbfgs",
        "self._forget()",
        "pass",
        "optim/test_lbfgs.py::test_a_weight_that_others_moved_starts_afresh",
    ),
    Mutant(
        "L-BFGS and weights that others moved off their space",
        "lbfgs",
        "check_on_space([params[i]], spaces[i], [name_of(group, 0, i)], self._warn)",
        "pass",
        "optim/test_lbfgs.py::test_a_weight_that_others_moved_starts_afresh",
    ),
    Mutant(
        "L-BFGS takes one group",
        "lbfgs",
        "if self.param_groups:\n            raise",
        "if False:\n            raise",
        "optim/test_lbfgs.py::test_one_group",
    ),
    Mutant(
        "L-BFGS puts weights where its frames are",
        "lbfgs",
        "        finally:\n            put(frames)",
        "        finally:\n            pass",
        "optim/test_lbfgs.py::test_a_loss_that_is_not_finite_far_away optim/test_lbfgs.py::test_a_loss_that_is_not_finite",
    ),
    # -- solvers
    Mutant(
        "memory turns where an anchor is renewed",
        "points",
        "self.moved(d, t, memory)",
        "pass",
        "optim/test_lbfgs.py",
    ),
    Mutant(
        "steps that a retraction is exact for",
        "points",
        "longest.append(b.limit / length if length > 0 else math.inf)",
        "pass",
        "solve/test_minimize.py::test_every_method_finds_a_critical_point_on_every_compact_space",
    ),
    Mutant(
        "curvature beyond rounding",
        "directions",
        "return ys if float(ys) > least else None",
        "return ys",
        "solve/test_minimize.py",
    ),
    Mutant(
        "values that are not finite are too far",
        "line_search",
        "while not math.isfinite(now.f) and count < iterations:",
        "while False:",
        "optim/test_lbfgs.py::test_a_loss_that_is_not_finite_far_away",
    ),
    Mutant(
        "trust regions never go uphill",
        "trust_region",
        "if ratio > 0.1 and decrease >= 0:",
        "if True:",
        "solve/test_minimize.py::test_every_method_finds_a_critical_point_on_every_compact_space",
    ),
    Mutant(
        "time is over within a Newton step",
        "trust_region",
        "if math.sqrt(new) <= target or log.late():",
        "if math.sqrt(new) <= target:",
        "solve/test_minimize.py::test_time_is_over_within_a_newton_step",
    ),
    Mutant(
        "runs that have come to their last digit",
        "problem",
        "elif self.stalls(place.frames.eps):",
        "elif False:",
        "solve/test_minimize.py::test_float32_ends_where_its_digits_do",
    ),
    Mutant(
        "starting points off their space",
        "problem",
        "check_on_space([p], s, [name])",
        "pass",
        "solve/test_minimize.py::test_what_makes_no_sense",
    ),
    # -- adapters, precision
    Mutant(
        "files of other sizes",
        "adapters",
        "if wrong:",
        "if False:",
        "test_adapters.py::test_a_file_that_does_not_fit_changes_nothing",
    ),
    Mutant(
        "points of files are on their spaces",
        "adapters",
        'check_on_space([tensors[n]], space, [f"{n} of the file"])',
        "pass",
        "test_adapters.py::test_a_file_that_does_not_fit_changes_nothing",
    ),
    Mutant(
        "files in another precision are projected",
        "adapters",
        "p.copy_(tensors[n] if tensors[n].dtype == p.dtype else space.project(tensors[n].to(p.dtype)))",
        "p.copy_(tensors[n])",
        "test_adapters.py::test_a_file_in_another_precision",
    ),
    Mutant(
        "adapters in full precision",
        "adapters",
        '"dtype": COMPUTE_DTYPE.get(W.dtype, W.dtype)}',
        '"dtype": W.dtype}',
        "test_adapters.py::test_half_precision_layers_have_adapters_in_full",
    ),
    Mutant(
        "no autocast within",
        "precision",
        "self.off.enter_context(torch.autocast(device, enabled=False))",
        "pass",
        "_torch/test_precision.py::test_autocast_does_not_reach_projections",
    ),
]


# -- running them ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the library and its tests, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        root = Path(name)
        for folder in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        yield root


def test_there(root: Path, nodes: list[str], verbose: bool) -> int:
    """pytest's exit code in a copy: 0 all passed, 1 some failed, else they were not run."""
    import pytest

    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root / "src")
    sys.path.insert(0, str(root / "src"))
    sys.dont_write_bytecode = True  # the next mutant of a file may be as old and as long
    out = os.open(root / "output", os.O_CREAT | os.O_WRONLY)
    if not verbose:
        os.dup2(out, 1)
        os.dup2(out, 2)
    return int(pytest.main(["-x", "-q", "-n", "0", "--timeout", "200", "-p", "no:cacheprovider", *nodes]))


def caught(task: tuple[Mutant, bool]) -> tuple[Mutant, str, float]:
    """Whether a test misses the guard, in a process of its own."""
    mutant, verbose = task
    began = time.process_time()
    with copied() as root:
        path = root / mutant.path
        path.write_text(mutant.applied(path.read_text()))
        code = test_there(root, mutant.nodes(), verbose)
    outcome = {0: "SURVIVED", 1: "caught"}.get(code, f"NOT RUN (pytest's exit code is {code})")
    return mutant, outcome, time.process_time() - began


def whole(nodes: list[str]) -> str:
    """What fails with all guards in place, in the words of pytest: a mutant is caught by what passes without it."""
    with copied() as root:
        code = test_there(root, nodes, False)
        return "" if code == 0 else (root / "output").read_text()[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="mutants with this in their names")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="how many at a time (2)")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if given.only in m.name]
    if not chosen:
        print(f"no mutant has {given.only!r} in its name")
        return 2
    import torch._dynamo  # loaded once: each process is a fork of this one, where there are forks

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    began = time.perf_counter()
    with context.Pool(given.j, maxtasksperchild=1) as pool:
        wrong = pool.apply(whole, [sorted({node for m in chosen for node in m.nodes()})])
        if wrong:
            print(f"tests fail with all guards in place:\n{wrong}")
            return 2
        print(f"with all guards in place the tests pass, {time.perf_counter() - began:.0f} s", flush=True)
        survived = []
        tasks = [(m, bool(given.only)) for m in chosen]
        for mutant, outcome, seconds in pool.imap_unordered(caught, tasks, chunksize=1):
            print(f"{seconds:5.1f} s  {outcome}: {mutant.file}, {mutant.name}", flush=True)
            if outcome != "caught":
                survived.append(mutant.name)
    names = "".join(f"\n  {name}" for name in survived) or " none"
    print(f"mutants: {len(chosen)}, survived:{names} ({time.perf_counter() - began:.0f} s)")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
