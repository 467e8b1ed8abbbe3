"Beside other callbacks, optimizers and models of all shapes, in any order"
import copy,math
from collections import namedtuple
import pytest,torch
from fastai.basics import (Callback,Learner,SGD,nn,partial,tensor)
from fastai.callback.all import FetchPredsCallback,GradientAccumulation,GradientClip,MixedPrecision
from fastai_amp16.all import (DynamicMixedPrecision,GradientNormClip,half_forward)
from common import *

def test_fine_tune_keeps_the_scale_and_frozen_layers():
    body = nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU())
    learn = learner(nn.Sequential(body, nn.Linear(16,1)), splitter=lambda m: [list(m[0].parameters()),list(m[1].parameters())], cbs=Poison({0,1}, 'backward')).to_fp16_dynamic()
    start = weights(learn)
    learn.freeze()
    fit(learn, 1, wd=0.5)
    assert equal(start[:2], weights(learn)[:2]) and not equal(start[2:], weights(learn)[2:]) # norms train on, as fastai has it
    with learn.no_bar(), learn.no_logging(): learn.fine_tune(1, 1e-2)
    assert not equal(start[:2], weights(learn)[:2]) and learn.mixed_precision.scaler.get_scale()==2**14
    clean(learn)

def test_lr_find_leaves_no_trace(tmp_path):
    learn = fit(learner(cbs=Poison({0,5,6}, 'backward'), n=128, path=tmp_path).to_fp16_dynamic(), 1)
    before,scaler,opt = state(learn),learn.mixed_precision.scaler.state_dict(),copy.deepcopy(learn.opt.state_dict())
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=20, show_plot=False)
    assert equal(before, state(learn)) and learn.mixed_precision.scaler.state_dict()==scaler
    assert all(torch.equal(a['grad_avg'], b['grad_avg']) for a,b in zip(learn.opt.state_dict()['state'], opt['state']))

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16_dynamic], ids=['fp32','fp16'])
def test_accumulated_gradients_equal_the_large_batch(to):
    def run(bs, cbs):
        return weights(fit(to(learner(plain_mlp, bs=bs, cbs=cbs, shuffle=False, opt_func=partial(SGD, mom=0.9))), 3))
    for p,q in zip(run(32, None), run(8, GradientAccumulation(32))): torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)

def test_fastais_gradient_clip():
    "Clips true gradients"
    class Norms(Callback):
        order = 90
        def before_step(self): self.learn.seen = max(getattr(self.learn, 'seen', 0), math.hypot(*[p.grad.norm().item() for p in self.model.parameters()]))
    learn = fit(learner(cbs=[GradientClip(0.1), Norms()]).to_fp16_dynamic(), 2)
    assert learn.seen==pytest.approx(0.1, rel=1e-3) and learn.mixed_precision.history.grad_norm.max()>0.1

def test_a_weight_in_two_groups_is_unscaled_once():
    def tied():
        m = mlp(bn=False)
        m[3] = nn.Linear(16,8)
        m.add_module('4', nn.Linear(8,16, bias=False))
        m[4].weight = m[0].weight
        m.add_module('5', nn.Linear(16,1))
        return m
    def run(to): return fit(to(learner(tied, opt_func=SGD, lr=0.1, shuffle=False, cbs=GradientNormClip(100.), splitter=lambda m: [list(m[:3].parameters()),list(m[3:].parameters())])), 1)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert b.gradient_norm_clip.norms==pytest.approx(a.gradient_norm_clip.norms, rel=1e-2)
    for p,q in zip(a.model.parameters(), b.model.parameters()): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)

def test_model_replaced_after_our_before_fit():
    "As DistributedTrainer does when it converts batch norms"
    class Replace(Callback):
        order = 11
        def before_fit(self):
            self.learn.model = copy.deepcopy(self.model)
            self.model[0].register_forward_hook(lambda m,i,o: self.seen.append(m.weight.dtype))
    replace = Replace()
    replace.seen = []
    fit(learner(cbs=replace).to_fp16_dynamic(), 1)
    assert set(replace.seen)=={torch.float16}

def test_nested_validation_and_two_mixed_precisions():
    class Nested(Callback):
        order = 80
        def after_train(self): self.learn.validate()
    learn = learner().to_fp16_dynamic().to_fp16()
    stuck = learner(cbs=[Nested(), Poison(range(99), 'forward')], n=32).to_fp16_dynamic(on_spiral='raise')
    fit(learn, 1, cbs=Nested())
    assert len(learn._grab_cbs(MixedPrecision))==1 and len(learn.mixed_precision.history)==4
    with pytest.raises(FloatingPointError): fit(stuck, 3)

def test_predictions_inside_a_fit():
    fetch = FetchPredsCallback()
    learn = fit(learner(cbs=fetch).to_fp16_dynamic(), 3)
    with torch.no_grad(), half_forward(learn.model.eval()): pred = learn.model(torch.stack([o[0] for o in learn.dls.valid_ds]))
    assert torch.equal(fetch.preds[0], pred.float())
    assert learn.mixed_precision.skipped==0 and len(learn.mixed_precision.history)==12
    clean(learn)

def test_validate_before_any_fit():
    learn = learner().to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(): loss = learn.validate()[0]
    with torch.no_grad(), half_forward(learn.model.eval()): pred = learn.model(torch.stack([o[0] for o in learn.dls.valid_ds]))
    assert loss==pytest.approx(mse(pred.float(), torch.stack([o[1] for o in learn.dls.valid_ds])).item(), rel=1e-6)
    assert learn.opt is None

Out = namedtuple('Out', 'y extra')

class MyDict(dict): pass

@pytest.mark.parametrize('wrap,get', [(lambda y: Out(y, [y]), lambda p: p.y), (lambda y: MyDict(y=y, n=None), lambda p: p['y']), (lambda y: (y,y), lambda p: p[0]), (lambda y: [y], lambda p: p[0])])
def test_outputs_keep_their_types(wrap, get):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = mlp()
        def forward(self, x): return wrap(self.m(x))
    kind = type(wrap(tensor(0.)))
    def loss(p, t):
        assert type(p) is kind and get(p).dtype==torch.float32
        return mse(get(p), t)
    learn = fit(learner(Model(), loss_func=loss).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.skipped==0

def test_compiled_model():
    learn = learner()
    learn.model = torch.compile(learn.model, backend='eager')
    fit(learn.to_fp16_dynamic(), 1)
    assert learn.mixed_precision.skipped==0 and len(learn.mixed_precision.history)==4

def running(learn):
    "The mixed-precision callbacks that worked in a fit"
    class Who(Callback):
        order = 99
        def after_batch(self): self.who = [cb for cb in self.learn.cbs if isinstance(cb, MixedPrecision) and cb.run]
    who = Who()
    fit(learn, 1, cbs=who)
    return who.who

def test_only_one_runs(monkeypatch):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    for make in (lambda l: l.to_fp16_dynamic().to_fp16_dynamic(), lambda l: l.to_fp16().to_fp16_dynamic(), lambda l: l.to_fp16_dynamic().to_fp16(),
                 lambda l: l.to_bf16_dynamic().to_fp16_dynamic(), lambda l: l.to_fp16_dynamic().to_channelslast(), lambda l: l.to_channelslast().to_fp16_dynamic(),
                 lambda l: l.to_non_native_fp16().to_fp16_dynamic() if torch.backends.cudnn.enabled else l.to_fp16_dynamic(),
                 lambda l: l.add_cbs([DynamicMixedPrecision(), DynamicMixedPrecision()])):
        learn = make(learner())
        who, = running(learn)
        assert type(who) is DynamicMixedPrecision and learn.mixed_precision is who and len(who.history)==4
        assert not learn.to_fp32()._grab_cbs(MixedPrecision) and not hasattr(learn, 'mixed_precision') and running(learn)==[]

def test_as_callbacks_of_a_learner():
    learn = learner(cbs=[DynamicMixedPrecision(keep_fp32=nn.Linear), GradientNormClip(1.)])
    fit(learn, 1)
    assert learn.mixed_precision.plan is None and len(learn.mixed_precision.history)==4

def test_from_fp16_to_bf16_to_fp32_between_fits():
    learn = fit(learner().to_fp16_dynamic(), 1)
    before = weights(learn)
    fit(learn.to_bf16_dynamic(), 1)
    assert learn.mixed_precision.scaler.get_scale()==1 and len(learn.mixed_precision.history)==4
    fit(learn.to_fp32(), 1)
    assert not equal(before, weights(learn))
    clean(learn)
