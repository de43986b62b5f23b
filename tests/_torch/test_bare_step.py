"""Hooks of the step, of state_dict and of load_state_dict: they fire as torch's do, and see weights, not
shadows."""

import copy

import torch
from helpers.steps import STIEFEL, Net, build, classes, gradients, same, train, values
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ghor


@classes
def test_hooks_of_the_step(cls):
    """Global pre, local pre, local post, global post; removed ones are silent; a pre-hook may change the
    arguments."""
    net = Net()
    opt, fired = build(cls, net), []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, *_: fired.append(("global pre", o))),
        register_optimizer_step_post_hook(lambda o, *_: fired.append(("global post", o))),
        opt.register_step_pre_hook(lambda o, *_: fired.append(("local pre", o))),
        opt.register_step_post_hook(lambda o, *_: fired.append(("local post", o))),
    ]
    try:
        train(net, opt, gradients(net, 2))
    finally:
        for hook in hooks:
            hook.remove()
    train(net, opt, gradients(net, 1))
    assert fired == [(kind, opt) for kind in ("global pre", "local pre", "local post", "global post")] * 2
    opt.register_step_pre_hook(lambda o, args, kwargs: ((*args, lambda: fired.append("closure")), kwargs))
    opt.step()
    assert fired[-1] == "closure"


@classes
def test_a_pre_hook_sees_weights_and_may_change_gradients(cls):
    """Hooks see the optimizer as users do: the weights in the groups, not the shadows."""
    net, twin = Net(), Net()
    opt, other = build(cls, net), build(cls, twin)
    seen = []

    def halve(o, *_):
        seen.append([id(p) for group in o.param_groups for p in group["params"]])
        for p in net.parameters():
            p.grad.mul_(0.5)

    opt.register_step_pre_hook(halve)
    steps = gradients(net, 2)
    train(net, opt, steps)
    train(twin, other, [[g / 2 for g in step] for step in steps])
    assert seen == [[id(p) for p in net.parameters()]] * 2
    same(values(net), values(twin))


@classes
def test_hooks_of_state_dict_and_load_state_dict(cls):
    """Pre-hooks in their order and before, post-hooks after; `prepend` comes first; what they return
    counts."""
    net = Net()
    opt, calls = build(cls, net), []
    train(net, opt, gradients(net, 1))
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, d: calls.append("post") or {**d, "more": 1})
    opt.state["note"] = 1
    saved = opt.state_dict()
    assert saved["state"].pop("note") == opt.state.pop("note") == 1
    assert (calls, saved.pop("more")) == (["first", "pre", "post"], 1)

    def halved(o, loaded):
        calls.append("halve")
        groups = [{**g, "lr": g["lr"] / 2} for g in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    lr = opt.param_groups[0]["lr"]
    opt.register_load_state_dict_pre_hook(halved)
    opt.register_load_state_dict_pre_hook(lambda o, d: calls.append("before"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append(("after", o.param_groups[0]["lr"])))
    opt.load_state_dict(saved)
    assert calls[3:] == ["before", "halve", ("after", lr / 2)]
    train(net, opt, gradients(net, 1))
    assert all(STIEFEL.residual(p.detach()) <= 1e-14 for p in (net.a, net.b, net.wide))


def test_what_a_load_hook_returns_is_loaded():
    net = Net(torch.float32)
    opt = ghor.optim.Adam(net)
    train(net, opt, gradients(net, 2))
    state = copy.deepcopy(opt.state_dict())

    def zero(_, loaded):
        loaded = copy.deepcopy(loaded)
        loaded["state"][0]["exp_avg"].zero_()
        return loaded

    opt.register_load_state_dict_pre_hook(zero)
    seen = []
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.state[net.a]["section"].dtype))
    opt.load_state_dict(state)
    assert not opt.state[net.a]["exp_avg"].any()
    assert opt.state[net.a]["exp_avg_sq"].any()
    assert seen == [torch.float32]


def test_the_profiler_sees_the_step():
    net = Net()
    opt = build("Adam", net)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in gradients(net, 2):
            opt.zero_grad()
            train(net, opt, [step])
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["Optimizer.step#Adam.step"] == counts["Optimizer.zero_grad#Adam.zero_grad"] == 2
