"""What users do to weights, state and groups between steps: noticed, or refused, never ignored."""

import copy
import warnings

import pytest
import torch
from helpers.steps import (
    STIEFEL,
    Net,
    build,
    gradients,
    same,
    sections,
    state_of,
    take_steps,
    through_a_file,
    train,
    values,
    weight,
)
from helpers.table import each_shape_and_section, name, point, randn
from torch import nn

import ghor

SELDOM = 10

# -- weights -------------------------------------------------------------------------------------------------


@sections
@pytest.mark.parametrize("steps_before", [0, 1, 12])
def test_a_weight_written_off_its_space_is_refused(section, steps_before, gen):
    Y, Z, b = weight(9, 3), weight(9, 3, seed=1), nn.Parameter(torch.zeros(3))
    opt = ghor.optim.Adam([{"params": [Y, Z], "space": STIEFEL}, {"params": [b]}], section=section)
    take_steps(opt, gen, steps_before)
    with torch.no_grad():
        Y.mul_(2)
    said = r"parameter 0 of group 0 of shape \(9, 3\) is .* off Stiefel\(\); call ghor.constrain"
    for _ in range(3):  # as often as it is tried
        with pytest.raises(ValueError, match=said):
            take_steps(opt, gen)
    assert abs(float(Y.detach().norm()) - 2 * 3**0.5) < 1e-5  # and nothing was moved


def test_a_parameter_replaced_in_its_group_is_looked_at(gen):
    opt = ghor.optim.Adam([weight(9, 3)], space=STIEFEL)
    take_steps(opt, gen)
    opt.param_groups[0]["params"][0] = nn.Parameter(randn((9, 3), gen, torch.float32))
    with pytest.raises(ValueError, match="off Stiefel"):
        take_steps(opt, gen)


def write(how, p, Y):
    with torch.no_grad():
        if how == "copy_":
            p.copy_(Y)
        elif how == ".data":
            p.data.copy_(Y)
        else:
            p.data = Y.clone()


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    ("shape", "count", "section"),
    [
        ((9, 3), 1, "transported"),
        ((9, 4), 3, "transported"),
        ((400, 49, 7), 1, "transported"),  # so many that they are compared in another way
        ((60, 4), 2, "implicit"),
        ((400, 90), 1, "implicit"),  # so many that sums are compared
    ],
    ids=str,
)
def test_one_entry_written_through_data(shape, count, section, last, gen):
    ws = [nn.Parameter(STIEFEL.random(*shape, generator=gen)) for _ in range(count)]
    opt = ghor.optim.Adam(ws, space=STIEFEL, section=section, lr=1e-3)
    for _ in range(3):
        for p in ws:
            p.grad = torch.randn(p.shape, generator=gen)
        opt.step()
    ws[-last].data.view(-1)[-last] += 0.01
    with pytest.raises(ValueError, match="off Stiefel"):
        opt.step()


@pytest.mark.parametrize("how", ["copy_", ".data", ".data ="])
@sections
def test_a_weight_moved_within_its_space(how, section, gen):
    """One warning, no jump back: the next step starts at the new point, with the moments that were there."""
    net = Net()
    opt = ghor.optim.SGD(net, lr=1e-2, section=section)
    train(net, opt, gradients(net, 3))
    twin = Net()
    target = STIEFEL.random(7, 3, generator=gen, dtype=torch.float64)
    write(how, net.a, target)
    twin.load_state_dict(net.state_dict())
    fresh = ghor.optim.SGD(twin, lr=1e-2, section=section)
    steps = gradients(net, 3, seed=4)
    train(twin, fresh, steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(net, opt, steps)
    said = [str(w.message).split(",")[0] for w in caught]
    # an implicit section is a function of the weight: nothing has to be rebuilt, and writes through .data go
    # unnoticed
    assert said == ["a changed outside the optimizer"] or (section == "implicit" and said == [])
    # SGD does not see the basis of the complement: as a new optimizer from the new point, up to rounding
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.detach() - q.detach()).abs().max() <= 1e-13


@pytest.mark.parametrize("when", ["stepping", "loaded", "split"])
def test_writes_to_a_large_stack_are_noticed_once(when, gen):
    """A write through .data is noticed once, and nothing else is: not the optimizer's own steps, and not in a
    state that was loaded, or in a stack that splits in the very step."""
    Y, Z = (nn.Parameter(STIEFEL.random(50, 49, 7, generator=gen)) for _ in range(2))
    opt = ghor.optim.SGD([Y, Z] if when == "split" else [Y], lr=1e-2, space=STIEFEL, section="transported")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(opt, gen, 12)  # the point is polished in one of them
    if when == "loaded":
        held = opt.state_dict()
        opt = ghor.optim.SGD([Y], lr=1e-2, space=STIEFEL, section="transported")
        opt.load_state_dict(held)
    target = STIEFEL.random(49, 7, generator=gen)
    Y.data[31] = target
    Y.grad, Z.grad = torch.zeros_like(Y), None
    with pytest.warns(UserWarning, match="changed outside the optimizer"):
        opt.step()
    assert torch.equal(Y[31], target)  # no jump back
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()


@each_shape_and_section
@pytest.mark.parametrize("touch", [1e-9, 1e-4])
def test_a_weight_moved_a_little_keeps_its_momentum(space, shape, section, touch, gen):
    """As averaging, projecting and saving in another precision do: the frame goes along with the weight. In a
    new frame, momentum would point anywhere."""
    start = point(space, shape, gen)
    pulls, noise = randn((10, *shape), gen), touch * randn(shape, gen)
    steps = []
    for moved in (False, True):
        Y = nn.Parameter(start.clone())
        opt = ghor.optim.SGD([Y], lr=0.02, momentum=0.9, space=space, section=section)
        for G in pulls / pulls.norm():
            Y.grad = G
            opt.step()
        if moved:
            near = space.retract(Y.detach(), space.tangent(Y.detach(), noise))
            write("copy_", Y, near)
        before, Y.grad = Y.detach().clone(), torch.zeros_like(Y)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*changed outside the optimizer")
            opt.step()
        steps.append(Y.detach() - before)
    without, after = steps
    assert without.norm() > 1e-3
    # momentum of length one or so turns by some multiples of the change, and it moves by 0.02 of that
    assert (after - without).norm() <= 10 * touch * (1 + before.norm()) * (1e-2 + without.norm())


@pytest.mark.parametrize(("space", "shape"), [(STIEFEL, (9, 3)), (ghor.Sphere(), (4, 5))], ids=name)
def test_an_anchor_is_renewed_where_a_weight_was_moved_far(space, shape, gen):
    """-Y is where the frame of the old anchor does not exist."""
    Y = nn.Parameter(space.E(shape, dtype=torch.float64))
    opt = ghor.optim.SGD([Y], lr=0.1, momentum=0.9, space=space, section="implicit")
    Y.grad = torch.zeros_like(Y)
    opt.step()
    write("copy_", Y, -Y.detach())
    Y.grad = randn(shape, gen)
    with pytest.warns(UserWarning, match="changed outside the optimizer"):
        opt.step()
    assert torch.isfinite(Y).all()
    assert 0 < float((Y.detach() + space.E(shape, dtype=torch.float64)).norm()) < 1
    assert (space.residual(Y.detach()) <= 1e-13).all()


def test_a_pose_that_others_turn_around(gen):
    """There is no shortest way to the opposite orientation, so a new frame starts there."""
    space = ghor.PositionsOrientations()
    Y = nn.Parameter(space.random(4, 2, 3, generator=gen, dtype=torch.float64))
    opt = ghor.optim.SGD([Y], lr=0.1, space=space)
    take_steps(opt, gen)
    turned = Y.detach() * torch.tensor([[1.0], [-1.0]])
    write("copy_", Y, turned)
    with pytest.warns(UserWarning, match="changed outside the optimizer"):
        take_steps(opt, gen)
    assert (space.residual(Y.detach()) <= 1e-13).all()
    assert 0 < float((Y.detach() - turned).abs().max()) < 1


@pytest.mark.parametrize("how", ["copy_", ".data", ".data ="])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
@sections
def test_a_weight_moved_off_its_space(how, section, dtype):
    """The step raises before anything moves, and names the weight and the call; after the call it goes on."""
    net = Net(dtype)
    opt = build("Adam", net, section=section)
    train(net, opt, gradients(net, 10))  # an implicit section looks at the weight's distance every 10 moves
    write(how, net.b, net.b.detach() * 1.5)
    before, state = values(net), state_of(opt)
    with pytest.raises(ValueError, match=r"b of shape \(7, 3\) is .* off Stiefel\(\); call ghor\.constrain"):
        train(net, opt, gradients(net, 1))
    same(values(net), before)
    same(state_of(opt), state)
    ghor.constrain(net, "b", STIEFEL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed outside the optimizer")
        train(net, opt, gradients(net, 2))
    assert not torch.equal(net.b, before[1])


def test_load_state_dict_on_the_model_is_noticed():
    net, other = Net(), Net(seed=3)
    opt = build("Adam", net)
    train(net, opt, gradients(net, 3))
    net.load_state_dict(other.state_dict())
    with pytest.warns(
        UserWarning, match=r"a and 1 other weights changed outside the optimizer, within Stiefel\(\)"
    ):
        train(net, opt, gradients(net, 1))
    # Adam's steps are a few lr = 1e-2 long
    assert (net.a - other.a).detach().abs().max() < 0.1


def test_dtype_of_the_model_changed(gen):
    layer = ghor.constrain(nn.Linear(9, 3, bias=False), "weight", STIEFEL)
    opt = ghor.optim.Adam(layer)
    take_steps(opt, gen, 3)
    layer.double()
    opt._warn.said.add("changed")  # that it differs from the section follows
    with pytest.warns(UserWarning, match="float64 and was .* projected"):  # 1e-7 is far in float64
        take_steps(opt, gen)
    assert STIEFEL.residual(layer.weight.detach()) < 1e-13
    layer.weight.data.mul_(1 + 1e-4)
    with pytest.raises(ValueError, match="off Stiefel"):
        take_steps(opt, gen)


def test_one_weight_of_a_stack_gets_another_dtype(gen):
    weights = [weight(8, 2), weight(8, 2, seed=1)]
    opt = ghor.optim.SGD(weights, lr=0.1, space=STIEFEL)
    take_steps(opt, gen, 3)
    weights[1].data = STIEFEL.project(weights[1].data.double())
    with pytest.warns(UserWarning, match="parameter 1 of group 0 changed outside"):
        take_steps(opt, gen)
    assert STIEFEL.residual(weights[1].detach()) <= 1e-14


def test_deepcopied_layers_are_declared_too():
    layer = ghor.constrain(nn.Linear(9, 4, bias=False), "weight", STIEFEL)
    model = nn.Sequential(layer, copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer)))
    assert ghor.optim.Adam(model.parameters()).param_groups[0]["space"] == STIEFEL


def test_constrained_anew_to_another_space(gen):
    layer = ghor.constrain(nn.Linear(9, 4, bias=False), "weight", STIEFEL)
    opt = ghor.optim.Adam(layer)
    take_steps(opt, gen)
    ghor.constrain(layer, "weight", ghor.Grassmann())
    with pytest.raises(
        ValueError, match=r"constrained to Grassmann\(\) after this optimizer took it on Stiefel\(\)"
    ):
        take_steps(opt, gen)


# -- velocities ----------------------------------------------------------------------------------------------


class Leaks(torch.optim.SGD):
    """SGD, and when `leaks` is set a velocity that is no element of g^hor: A is not skew."""

    leaks = False

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.leaks:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(1e-3)


# -- groups and state ----------------------------------------------------------------------------------------


def test_space_changed_after_steps_is_refused(gen):
    Y = weight(5, 3)
    opt = ghor.optim.Adam([Y], space=ghor.Euclidean())
    take_steps(opt, gen)
    with torch.no_grad():
        Y.copy_(STIEFEL.project(Y))
    opt.param_groups[0]["space"] = STIEFEL
    with pytest.raises(ValueError, match=r"went from Euclidean\(\) to Stiefel\(\) after steps were taken"):
        take_steps(opt, gen)


def test_groups_can_be_other_dicts(gen):
    weights = [weight(8, 2), weight(8, 2, seed=1), nn.Parameter(torch.zeros(3))]
    opt = ghor.optim.Adam([{"params": weights[:2], "space": STIEFEL}, {"params": weights[2:]}], lr=0.1)
    take_steps(opt, gen, 3)
    opt.param_groups = [dict(group, lr=0.0) for group in opt.param_groups]
    before = [p.detach().clone() for p in weights]
    take_steps(opt, gen)
    assert all(map(torch.equal, weights, before))


def test_state_written_by_the_user_counts(gen):
    Y, Z = weight(5, 3), weight(5, 3, seed=1)
    opt = ghor.optim.Adam([Y, Z], space=STIEFEL, lr=0.1)
    take_steps(opt, gen)
    opt.state[Y]["exp_avg"] = torch.zeros(5, 3)
    before = Y.detach().clone()
    Y.grad = torch.zeros(5, 3)
    opt.step()
    assert torch.equal(Y, before)
    opt.state[Y].clear()
    opt.step()
    assert opt.state[Y]["step"] == 1
    assert opt.state[Z]["step"] == 3
    opt.state.clear()
    opt.step()
    assert opt.state[Y]["step"] == opt.state[Z]["step"] == 1


def test_a_shared_step_count_written_in_place_is_said(gen):
    ws = [weight(9, 3, seed=i) for i in range(3)]
    opt = ghor.optim.Adam(ws, space=STIEFEL)
    take_steps(opt, gen)
    opt.state[ws[0]]["step"].fill_(100)
    with pytest.warns(UserWarning, match=r"3 weights share.*Bind a new tensor"):
        take_steps(opt, gen)
    opt.state[ws[1]]["step"] = torch.tensor(7.0)
    take_steps(opt, gen)
    assert [float(opt.state[w]["step"]) for w in ws] == [102, 8, 102]


def test_section_kind_switched_live(gen):
    Y, Z = weight(9, 3, dtype=torch.float64), weight(9, 3, dtype=torch.float64)
    opts = [ghor.optim.SGD([p], space=STIEFEL, lr=0.05, momentum=0.9, section="transported") for p in (Y, Z)]
    for t in range(20):
        opts[0].param_groups[0]["section"] = "implicit" if 5 <= t < 12 else "transported"
        Y.grad = randn((9, 3), gen)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
        assert ("section" in opts[0].state[Y]) == (opts[0].param_groups[0]["section"] == "transported")
    assert (Y - Z).abs().max() < 1e-13


def test_a_weight_constrained_to_another_space_is_refused_where_it_did_not_move(gen):
    """The rows of an orthogonal matrix are unit vectors, so only the declaration tells."""
    layer = nn.Linear(6, 6, bias=False)
    ghor.constrain(layer, "weight", STIEFEL)
    opt = ghor.optim.Adam(layer)
    take_steps(opt, gen, 2)
    before = layer.weight.detach().clone()
    ghor.constrain(layer, "weight", ghor.Sphere())
    layer.weight.data.copy_(before)
    with pytest.raises(
        ValueError, match=r"constrained to Sphere\(\) after this optimizer took it on Stiefel"
    ):
        take_steps(opt, gen)
    assert torch.equal(layer.weight, before)
    ghor.constrain(layer, "weight", STIEFEL)
    take_steps(opt, gen)


@sections
@pytest.mark.parametrize("shape", [(3, 9), (7, 3)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_that_was_given_another_shape(count, shape, section, gen):
    """Through `.data`: with as many numbers it was read as if it had the old one, and left its space."""
    params = [weight(9, 3, seed=seed) for seed in range(count)]
    opt = ghor.optim.Adam(params, space=STIEFEL, section=section)
    take_steps(opt, gen)
    kept = [p.data for p in params]
    for p in params:
        p.grad, p.data = None, STIEFEL.random(*shape, generator=gen)
        p.grad = torch.ones(shape)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 had shape \(9, 3\) and has \(.* now"):
        opt.step()
    same([p.detach() for p in params], before)
    for p, data in zip(params, kept, strict=True):
        p.grad, p.data = None, data
    take_steps(opt, gen)


def test_a_weight_whose_memory_was_freed(gen):
    """As FSDP frees whole weights after a forward pass; torch would read there all the same, and crash."""
    p = weight(9, 3)
    opt = ghor.optim.Adam([p], space=STIEFEL)
    size = p.untyped_storage().size()
    p.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has no memory any more: .*reshard\(\)"):
        opt.step()
    p.untyped_storage().resize_(size)
    with torch.no_grad():
        p.copy_(STIEFEL.random(9, 3, generator=gen))
    take_steps(opt, gen)


def test_a_section_of_another_shape_is_refused(gen):
    opts = [ghor.optim.Adam([weight(*shape)], space=STIEFEL) for shape in ((6, 2), (9, 2))]
    for opt in opts:
        take_steps(opt, gen)
    with pytest.raises(ValueError, match=r"a loaded section of shape \(6, 6\) is not that of 9 x 2 weights"):
        opts[1].load_state_dict(opts[0].state_dict())
    take_steps(opts[1], gen)


# -- options that are switched on between steps --------------------------------------------------------------


def as_it_is(opt):
    return opt


def loaded(opt):
    opt.load_state_dict(through_a_file(opt.state_dict()))
    return opt


class Bound(torch.optim.SGD):
    """SGD with momentum betas[0], for which it keeps a state only where that is not 0."""

    def __init__(self, params, lr=1e-3, betas=(0.0, 0.9)):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["betas"] = betas
        self.defaults["betas"] = betas

    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] = group["betas"][0]
        return super().step(closure)


class FromTensor(torch.optim.SGD):
    """SGD with momentum m, a tensor that it reads in every step."""

    def __init__(self, params, lr=1e-3, m=0.0):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["m"] = torch.as_tensor(m)
        self.defaults["m"] = torch.as_tensor(m)

    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] = float(group["m"])
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "key", "values"),
    [
        (ghor.optim.SGD, "momentum", (0.0, 0.9, 0.5)),
        (Bound, "betas", ((0.0, 0.9), (0.9, 0.9), (0.5, 0.9))),
        (FromTensor, "m", (0.0, 0.9, 0.5)),
    ],
    ids=["SGD", "Bound", "FromTensor"],
)
@pytest.mark.parametrize("between", [as_it_is, loaded, copy.deepcopy], ids=lambda f: f.__name__)
def test_momentum_that_comes_and_goes_turns_with_its_frame(cls, key, values, between):
    """SGD gives the same weights in every frame, also if it is copied while there is no momentum."""
    none, much, some = values

    def run(section):
        gen = torch.Generator().manual_seed(3)
        Y = nn.Parameter(STIEFEL.random(9, 3, generator=gen, dtype=torch.float64))
        opt = ghor.lift(cls)([Y], lr=0.05, space=STIEFEL, section=section)
        for value in [none] * 2 + [much] * 15 + [none] * 4 + [some] * 10:
            held = opt.param_groups[0][key]
            opt.param_groups[0][key] = held.fill_(value) if torch.is_tensor(held) else value
            take_steps(opt, gen)
            opt = between(opt) if value == none else opt
        return opt.param_groups[0]["params"][0].detach()

    torch.testing.assert_close(run("implicit"), run("transported"), rtol=0, atol=1e-10)
