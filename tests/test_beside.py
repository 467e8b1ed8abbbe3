"Beside other callbacks, optimizers and models of all shapes, in any order"
import copy,math,warnings
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
import pandas as pd
import pytest,torch
from fastai.basics import (Adam,Callback,CancelStepException,DataLoader,DataLoaders,L,Learner,OptimWrapper,SGD,TensorBase,TensorImage,
                           accuracy,nn,partial,ranger,set_seed,tensor)
from fastai.layers import MergeLayer,SequentialEx
from fastai.losses import CrossEntropyLossFlat
from fastai.callback.all import (ActivationStats,BnFreeze,CSVLogger,ChannelsLast,CutMix,EarlyStoppingCallback,FetchPredsCallback,
                                 GradientAccumulation,GradientClip,MixUp,MixedPrecision,ReduceLROnPlateau,SaveModelCallback,
                                 ShowGraphCallback,rnn_cbs)
from fastai.callback.fp16 import ModelToHalf,NonNativeMixedPrecision
from fastai_amp16.all import AdamW16,DynamicMixedPrecision,GradientNormClip,LossScale,SkippedSteps,half_forward,ranger16
from fastai_amp16.demo import digits_dls
from fastai_amp16.learner import running
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from common import *
from benchmarks.shared.fastais import fastais

def test_fine_tune_keeps_the_scale_and_frozen_layers():
    "The scale that the first step has found is the one of all fits that follow"
    set_seed(0)
    body = nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU())
    def split(m): return [list(m[0].parameters()),list(m[1].parameters())]
    learn = learner(nn.Sequential(body, nn.Linear(16,1)), splitter=split).to_fp16_dynamic(init_scale=2.**24)
    start = weights(learn)
    learn.freeze()
    fit(learn, 1, wd=0.5)
    mp = learn.mixed_precision
    found,n = mp.scaler.get_scale(),mp.n_rerun
    assert equal(start[:2], weights(learn)[:2]) and not equal(start[2:], weights(learn)[2:]) # norms train on, as fastai has it
    with learn.no_bar(), learn.no_logging(): learn.fine_tune(1, 1e-2)
    assert not equal(start[:2], weights(learn)[:2]) and n>0 and found<2**24
    assert mp.history.reruns[4:].sum()==n-mp.history.reruns[0]==0 and mp.history.loss_scale.tolist()==[found]*12
    clean(learn)

@pytest.mark.warns('`mul` in `1`')
def test_lr_find_gives_all_back_and_keeps_what_it_found(tmp_path):
    "Weights and optimizer are as before; the scale that fits, and what fp16 cannot hold, are known to the next fit"
    learn = learner(lambda: nn.Sequential(nn.Linear(8,8), Detour(), mlp()), n=128, path=tmp_path).to_fp16_dynamic(init_scale=2.**24)
    learn.model[1].on = True
    fit(learn, 0)
    before,opt = state(learn),copy.deepcopy(learn.opt.state_dict())
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=20, show_plot=False)
    mp = learn.mixed_precision
    found,n = mp.scaler.get_scale(),mp.n_rerun
    assert equal(before, state(learn)) and str(learn.opt.state_dict())==str(opt) and n>0 and mp.promoted==['1'] and found<2**24
    fit(learn, 1)
    assert mp.n_rerun<=n+2 and mp.promoted==['1'] and found/4<=mp.scaler.get_scale()<=2*found and not mp.n_skipped

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16_dynamic], ids=['fp32','fp16'])
def test_accumulated_gradients_equal_the_large_batch(to):
    def run(bs, cbs):
        return weights(fit(to(learner(plain_mlp, bs=bs, cbs=cbs, shuffle=False, opt_func=partial(SGD, mom=0.9))), 3))
    for p,q in zip(run(32, None), run(8, GradientAccumulation(32))): torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)

def test_fastais_gradient_clip():
    "Clips true gradients"
    class Norms(Callback):
        order = 90
        def before_step(self):
            norm = math.hypot(*[p.grad.norm().item() for p in self.model.parameters()])
            self.learn.seen = max(getattr(self.learn, 'seen', 0), norm)
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
    def split(m): return [list(m[:3].parameters()),list(m[3:].parameters())]
    def run(to): return fit(to(learner(tied, opt_func=SGD, lr=0.1, shuffle=False, cbs=GradientNormClip(100.), splitter=split)), 1)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert b.gradient_norm_clip.norms==pytest.approx(a.gradient_norm_clip.norms, rel=1e-2)
    for p,q in zip(a.model.parameters(), b.model.parameters()): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)

def test_model_replaced_after_our_before_fit():
    "As DistributedTrainer does when it converts batch norms"
    class Replace(Callback):
        order = 11
        def before_fit(self):
            self.learn.model = copy.deepcopy(self.model)
            self.learn.create_opt()
            self.model[0].register_forward_hook(lambda m,i,o: self.seen.append(o.dtype))
    replace = Replace()
    replace.seen = []
    fit(learner(cbs=replace).to_fp16_dynamic(), 1)
    assert set(replace.seen)=={torch.float16}

def test_nested_validation():
    class Nested(Callback):
        order = 80
        def after_train(self): self.learn.validate()
    learn = learner().to_fp16_dynamic()
    stuck = learner(cbs=[Nested(), Poison(range(99), 'forward')], n=32).to_fp16_dynamic(on_spiral='raise')
    fit(learn, 1, cbs=Nested())
    assert len(learn._grab_cbs(MixedPrecision))==1 and len(learn.mixed_precision.history)==4
    with pytest.raises(FloatingPointError): fit(stuck, 3)

def test_predictions_inside_a_fit():
    fetch = FetchPredsCallback()
    learn = fit(learner(cbs=fetch).to_fp16_dynamic(), 3)
    with torch.no_grad(), half_forward(learn.model.eval()): pred = learn.model(torch.stack([o[0] for o in learn.dls.valid_ds]))
    assert torch.equal(fetch.preds[0], pred.float().cpu())
    assert learn.mixed_precision.n_skipped==0 and len(learn.mixed_precision.history)==12
    clean(learn)

def test_validate_before_any_fit():
    learn = learner().to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(): loss = learn.validate()[0]
    with torch.no_grad(), half_forward(learn.model.eval()): pred = learn.model(torch.stack([o[0] for o in learn.dls.valid_ds]))
    assert loss==pytest.approx(mse(pred.float(), torch.stack([o[1] for o in learn.dls.valid_ds])).item(), rel=1e-6)
    assert learn.opt is None

Out = namedtuple('Out', 'y extra')

class MyDict(dict): pass

@pytest.mark.parametrize('wrap,get', [(lambda y: Out(y, [y]), lambda p: p.y), (lambda y: MyDict(y=y, n=None), lambda p: p['y']),
                                      (lambda y: (y,y), lambda p: p[0]), (lambda y: [y], lambda p: p[0]),
                                      (lambda y: Dataclass(y), lambda p: p.y), (lambda y: Odd(y, y), lambda p: p[1])])
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
    assert learn.mixed_precision.n_skipped==0

def test_compiled_model():
    learn = learner()
    learn.model = torch.compile(learn.model, backend='eager')
    fit(learn.to_fp16_dynamic(), 1)
    assert learn.mixed_precision.n_skipped==0 and len(learn.mixed_precision.history)==4

# --- several mixed precisions

def mixed(learn): return [cb for cb in learn.cbs if isinstance(cb, (MixedPrecision,ModelToHalf,NonNativeMixedPrecision))]

class Counts(Callback):
    "Notes which mixed precision works in a batch"
    order = -20
    def __init__(self): self.seen = set()
    def after_pred(self): self.seen |= {cb for cb in mixed(self.learn) if cb.run}

@pytest.mark.parametrize('first,then,class_,dtype', [
    ('to_fp16_dynamic', 'to_fp16_dynamic', DynamicMixedPrecision, torch.float16),
    ('to_bf16_dynamic', 'to_fp16_dynamic', DynamicMixedPrecision, torch.float16),
    ('to_fp16_dynamic', 'to_fp16', MixedPrecision, torch.float16), ('to_fp16', 'to_fp16_dynamic', DynamicMixedPrecision, torch.float16),
    ('to_fp16_dynamic', 'to_bf16', MixedPrecision, torch.bfloat16), ('to_bf16', 'to_fp16_dynamic', DynamicMixedPrecision, torch.float16),
    ('to_bf16_dynamic', 'to_fp16', MixedPrecision, torch.float16), ('to_fp16', 'to_bf16_dynamic', DynamicMixedPrecision, torch.bfloat16),
    ('to_channelslast', 'to_bf16_dynamic', DynamicMixedPrecision, torch.bfloat16),
    ('to_fp16_dynamic', 'to_non_native_fp16', NonNativeMixedPrecision, torch.float16),
    ('to_non_native_fp16', 'to_fp16_dynamic', DynamicMixedPrecision, torch.float16)])
@pytest.mark.parametrize('fits', [False, True], ids=['before a fit', 'between fits'])
@pytest.mark.usefixtures('uncompared')
def test_the_last_call_wins(first, then, class_, dtype, fits, capsys):
    "It is at work, alone, and says in a line what it replaces, once"
    learn,seen = getattr(learner(cbs=Counts()), first)(),set()
    learn.model[0].register_forward_hook(lambda m,i,o: seen.add(o.dtype))
    with fastais():
        if fits: fit(learn, 1)
        old = mixed(learn)[-1]
        capsys.readouterr()
        getattr(learn, then)()
        seen.clear(), learn.counts.seen.clear()
        for _ in range(2): fit(learn, 1)
        said = capsys.readouterr().out.splitlines()
    who = mixed(learn)[-1]
    assert type(who) is class_ and getattr(learn, who.name) is who and {type(cb) for cb in learn.counts.seen}-{ModelToHalf}=={class_}
    assert seen=={dtype} and len(said)==(first!=then) # one like another is nothing to tell
    assert all(o.count(' replaces ')==1 and type(old).__name__ in o for o in said)
    assert hasattr(learn, 'mixed_precision')==isinstance(who, MixedPrecision)
    assert getattr(learn, 'scaler', None) is None # after a fit, as with fastai's
    assert not mixed(learn.to_fp32()) or class_ is NonNativeMixedPrecision
    assert fit(learn.to_non_native_fp32(), 1) and not mixed(learn) and not hasattr(learn, 'mixed_precision')
    clean(learn)

@pytest.mark.parametrize('kinds', [(MixedPrecision,DynamicMixedPrecision), (DynamicMixedPrecision,MixedPrecision),
                                   (DynamicMixedPrecision,MixedPrecision,partial(DynamicMixedPrecision, 'bf16'))])
@pytest.mark.parametrize('validate', [False, True], ids=['fit','validation'])
def test_several_among_the_callbacks_of_a_learner(kinds, validate):
    "The last works alone"
    with fastais():
        cbs = [o() for o in kinds]
        learn = learner(cbs=[*cbs, counts:=Counts()])
        with learn.no_bar(), learn.no_logging(): learn.validate() if validate else learn.fit(1)
    assert counts.seen=={cbs[-1]} and learn.mixed_precision is cbs[-1] and all(cb.run for cb in cbs)
    if not validate: clean(learn)

def test_channels_last_adds_no_other():
    for to in (Learner.to_fp16_dynamic, Learner.to_bf16_dynamic):
        for learn in (to(learner()), to(learner().to_channelslast())):
            learn.to_channelslast()
            fit(learn, 1)
            assert mixed(learn)==[learn.mixed_precision] and len(learn.mixed_precision.history)==4 and hasattr(learn, 'channels_last')

def test_fastais_own_replace_each_other_as_they_always_did(capsys):
    learn = learner().to_fp16().to_bf16()
    assert len(mixed(learn))==2 and not capsys.readouterr().out

@pytest.mark.parametrize('own,other', [(DynamicMixedPrecision, partial(DynamicMixedPrecision, 'bf16')),
    (DynamicMixedPrecision, MixedPrecision), (MixedPrecision, DynamicMixedPrecision)], ids=['ours-ours', 'ours-theirs', 'theirs-ours'])
def test_one_for_a_single_fit(own, other):
    "It takes the place of the learner's own, which works again afterwards, whatever happens"
    with fastais():
        own,other,counts = own(),other(),Counts()
        learn = learner(cbs=[own,counts])
        for o in (None, other):
            for cbs in ([], [Raise('before_step', KeyboardInterrupt)]):
                with pytest.raises(KeyboardInterrupt) if cbs else nullcontext(): fit(learn, 1, cbs=[*L(o), *cbs])
                assert counts.seen=={o or own} and mixed(learn)==[own] and own.run
                assert running(learn) is (own if isinstance(own, DynamicMixedPrecision) else None)
                counts.seen.clear()
        fit(learn, 1)
        assert learn.mixed_precision is own
        clean(learn)

def test_the_scaler_is_there_in_a_fit_and_only_there():
    "As fastai has it, also if a validation is nested in the fit, or if the fit is interrupted"
    seen = []
    class See(Callback):
        def before_backward(self): seen.append(self.learn.scaler)
    for cbs in ([], [Raise('before_step', KeyboardInterrupt)]):
        learn = learner(cbs=See()).to_fp16_dynamic()
        with pytest.raises(KeyboardInterrupt) if cbs else nullcontext(): fit(learn, 2, cbs=cbs)
        assert seen and all(o is learn.mixed_precision.scaler for o in seen) and learn.scaler is None
        seen.clear()

def test_a_choice_in_the_middle_of_a_single_fit_stays():
    class Choose(Callback):
        def after_epoch(self): self.learn.to_fp32()
    learn = learner().to_fp16_dynamic()
    fit(learn, 2, cbs=[DynamicMixedPrecision('bf16'), Choose()])
    assert not mixed(learn)

@pytest.mark.parametrize('first', [True, False])
def test_distributed_trainer(first, monkeypatch):
    """In one process: Accelerate's `prepare` wraps models in a DistributedDataParallel only if there are several, so it is replaced

    And fastai broadcasts on CUDA only."""
    from fastai.distributed import DistributedDL
    monkeypatch.setenv('WORLD_SIZE', '1')
    monkeypatch.setattr(DistributedDL, '_broadcast', lambda self, t, rank: list(t))
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        learn = learner(shuffle=False)
        if first: learn.to_fp16_dynamic()
        learn.to_distributed(sync_bn=False, cpu=True)
        if not first: learn.to_fp16_dynamic()
        learn.distributed_trainer.accelerator.prepare = nn.parallel.DistributedDataParallel
        fit(learn, 1)
        assert mixed(learn)==[learn.mixed_precision] and len(learn.mixed_precision.history)==4
        clean(learn)
        like_fp32(fit(learner(shuffle=False), 1), learn)
    finally: torch.distributed.destroy_process_group()

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

@pytest.mark.parametrize('to,order', [('to_fp32',-30),('to_fp32',99),('to_bf16_dynamic',10),('to_fp16_dynamic',99)])
def test_changed_by_a_callback_in_the_middle_of_a_fit(to, order):
    for event in ('before_epoch','before_train','before_batch','after_batch','after_train','before_validate','after_epoch'):
        class Change(Callback):
            def change(self):
                self.times += 1
                if self.times==2: getattr(self.learn, to)()
        cb = Change()
        cb.times,cb.order = 0,order
        setattr(cb, event, cb.change)
        a,b = [fit(t(learner(shuffle=False, cbs=c)), 3) for t,c in ((Learner.to_fp32, None), (Learner.to_fp16_dynamic, cb))]
        clean(b)
        assert hasattr(b, 'mixed_precision')==(to!='to_fp32')
        like_fp32(a, b, rtol=0.1, atol=2e-2)

def test_switched_off_for_one_fit():
    "As fastai has it: `run=False` lasts until the end of the fit"
    a,b = learner(shuffle=False),learner(shuffle=False).to_fp16_dynamic()
    b.mixed_precision.run = False
    assert equal(state(fit(a, 1)), state(fit(b, 1))) and len(b.mixed_precision.history)==0
    assert not equal(state(fit(a, 1)), state(fit(b, 1))) and len(b.mixed_precision.history)==4

def test_removed_and_interrupted_in_one_batch():
    class Remove(Callback):
        def after_pred(self): self.learn.to_fp32()
        def after_loss(self): raise KeyboardInterrupt
    learn = learner(cbs=Remove()).to_fp16_dynamic()
    with pytest.raises(KeyboardInterrupt): fit(learn)
    clean(learn)

# --- optimizers and parameter groups

def three_groups():
    return nn.Sequential(nn.Sequential(nn.Linear(8,16), nn.GroupNorm(2,16), nn.ReLU()),
                         nn.Sequential(nn.Linear(16,16), nn.LayerNorm(16), nn.ReLU()), nn.Linear(16,1))
def split(m): return [list(o.parameters()) for o in m]

def torchs(opt, **kwargs): return partial(OptimWrapper, opt=opt, **kwargs)

opt_funcs = {'AdamW16':AdamW16, 'Adam':Adam, 'SGD':partial(SGD, mom=0.9), 'ranger':ranger, 'ranger16':ranger16,
    'torch AdamW':torchs(torch.optim.AdamW), 'torch fused AdamW':torchs(torch.optim.AdamW, fused=True),
    'torch fused SGD':torchs(torch.optim.SGD, momentum=0.9, fused=True)}

class SkipFirst(Callback):
    order = 20
    def before_step(self):
        if self.train_iter==0: raise CancelStepException()

class PoisonFirst(Callback):
    def before_backward(self):
        if self.train_iter==0: self.learn.loss_grad = self.learn.loss_grad*1e30

skipping = 'SGD','ranger','torch AdamW' # fastai's with and without more state, and torch's

@pytest.mark.parametrize('name,skip', [*((o,False) for o in opt_funcs),
                                       *(pytest.param(o, True, marks=poisoned('backward')) for o in skipping)])
def test_optimizers_and_groups(name, skip):
    "Freeze, unfreeze, slices of learning rates, a new optimizer: as in fp32, where a first step that is skipped leaves nothing behind"
    def run(to, cb):
        learn = to(learner(three_groups, opt_func=opt_funcs[name], lr=1e-3, splitter=split, shuffle=False, cbs=cb if skip else None))
        learn.freeze()
        fit(learn, 1)
        learn.unfreeze()
        fit(learn, 1, slice(1e-4,1e-2))
        learn.freeze_to(1)
        fit(learn, 1, slice(1e-3), wd=0.1)
        old = learn.opt
        fit(learn, 1, 1e-3, reset_opt=True)
        assert learn.opt is not old
        with learn.no_bar(), learn.no_logging(): learn.fine_tune(1, 1e-2)
        return learn
    a,b = run(Learner.to_fp32, SkipFirst()),run(Learner.to_fp16_dynamic, PoisonFirst())
    assert b.mixed_precision.n_skipped==6*skip and b.mixed_precision.scaler.get_scale()==2.**16 # fp32 cannot hold these gradients either
    clean(b)
    like_fp32(a, b, rtol=5e-2)

# --- models of all shapes

class Net(nn.Module):
    "A body, and what makes a model special around it"
    def __init__(self, **modules):
        super().__init__()
        self.body,self.head = mlp()[:3],nn.Linear(16,1)
        for k,v in modules.items(): setattr(self, k, v)
    def forward(self, x): return self.head(self.body(x))

class TwoInputs(Net):
    def forward(self, x, cat): return super().forward(x+self.emb(cat).sum(1))

class Tied(Net):
    "Auto-encoder whose decoder is the encoder's weight, and one weight in two modules"
    def __init__(self):
        super().__init__(back=nn.Linear(16,16), again=nn.Linear(16,16))
        self.again.weight = self.back.weight
    def forward(self, x):
        x = self.again(self.back(self.body(x)).relu())
        return (x@self.body[0].weight).mean(1, keepdim=True)+self.head(x)

class Direct(Net):
    "Calls `forward` itself, so that no hook runs"
    def forward(self, x): return self.head.forward(self.norm.forward(self.body.forward(x)))

class Buffers(Net):
    "Buffers that are not fp32"
    def __init__(self):
        super().__init__()
        self.register_buffer('wide', torch.linspace(0, 1, 8, dtype=torch.float64))
        self.register_buffer('rot', torch.polar(torch.ones(4), torch.linspace(0, 1, 4)))
    def forward(self, x):
        x = torch.view_as_real(torch.view_as_complex(x.float().reshape(-1,4,2))*self.rot).flatten(1)
        return super().forward((x.double()*(1+self.wide)).float())

class Fourier(Net):
    "Complex parameters, as in a Fourier neural operator"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(9, dtype=torch.complex64)/9)
    def forward(self, x): return self.head(torch.fft.irfft(torch.fft.rfft(self.body(x).float())*self.w, n=16))

class Momentum(Net):
    "Writes weights in its forward pass, as MoCo's momentum encoder; `how` is one of several ways"
    def __init__(self, how):
        super().__init__(slow=nn.Linear(16,1).requires_grad_(False))
        self.how = how
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for a,b in zip(self.head.parameters(), self.slow.parameters()):
                    if self.how=='data': b.data = b.data*0.5+a.data*0.5
                    elif self.how=='in place': b.mul_(0.5).add_(a, alpha=0.5)
                if self.how=='state': self.slow.load_state_dict(self.head.state_dict())
        x = self.body(x)
        return self.head(x)+self.slow(x)

class Island(Net):
    "A part leaves autocast, as half precision asks of a part that it cannot hold"
    def forward(self, x):
        x = self.body(x)
        with torch.autocast('cpu', enabled=False): return self.head(x.float())

class Decorated(Net):
    @torch.autocast('cpu', enabled=False)
    def last(self, x): return self.head(x.float())
    def forward(self, x): return self.last(self.body(x))

class OwnGradient(Net):
    "Takes a gradient with respect to its parameters in the forward pass, in validation as well"
    def forward(self, x):
        with torch.enable_grad():
            y = self.head(self.body(x))
            g = torch.autograd.grad(y.float().mean(), list(self.head.parameters()), create_graph=True)
        return y*(1+sum(o.float().pow(2).sum() for o in g)/10)

class Wide(Net):
    "A part computes in float64"
    def forward(self, x): return self.head(self.fine(self.body(x).double()).float())

class Attention(Net):
    def forward(self, x):
        x = self.inp(x[...,None])
        x = self.attn(x, x, x, need_weights=False)[0]+x
        return self.out(self.ln(x)).mean(1)

class Counting(Net):
    "Integer input: counts of eight words"
    def forward(self, x): return self.head(self.body(self.emb(x.abs().mul(2).long().clamp(max=7)).mean(1)))

class Checkpointed(Net):
    "Runs its norms again in the backward pass"
    def forward(self, x): return self.head(checkpoint(self.body, self.inp(x), use_reentrant=self.reentrant))

class Param(Net):
    "A bare parameter in a product, a scalar one, and one that is not used"
    def __init__(self):
        super().__init__()
        self.w,self.s,self.unused = nn.Parameter(torch.randn(16,16)/4),nn.Parameter(torch.tensor(1.)),nn.Parameter(torch.ones(3))
    def forward(self, x): return self.head((self.body(x)@self.w)*self.s)

def parametrized():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.head)
    nn.utils.parametrizations.spectral_norm(net.body[0])
    return net

def ws_conv(): return nn.Sequential(nn.Unflatten(1, (1,8)), nn.Conv1d(1,8,3), nn.GroupNorm(2,8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1))
def unet_block():
    return nn.Sequential(SequentialEx(nn.Linear(8,8), nn.BatchNorm1d(8), nn.ReLU(), MergeLayer()),
                         SequentialEx(nn.Linear(8,8), MergeLayer(dense=True)), nn.Linear(16,1))

shapes = {'tied':Tied, 'direct':lambda: Direct(norm=nn.LayerNorm(16)), 'buffers':Buffers, 'complex':Fourier, 'island':Island,
    'decorated':Decorated, 'own gradient':OwnGradient,
    **{f'writes: {how}': partial(Momentum, how) for how in ('data','in place','state')},
    'float64':lambda: Wide(fine=nn.Linear(16,16).double()),
    'attention':lambda: Attention(inp=nn.Linear(1,8), attn=nn.MultiheadAttention(8, 2, batch_first=True),
                                  ln=nn.LayerNorm(8), out=nn.Linear(8,1)),
    'integers':lambda: Counting(emb=nn.Embedding(8,8)), 'checkpointed':lambda: Checkpointed(reentrant=False, inp=nn.Linear(8,8)),
    'reentrant':lambda: Checkpointed(reentrant=True, inp=nn.Linear(8,8)),
    'parameters':Param, 'parametrized':parametrized, 'lazy':ws_conv,
    'fastai':unet_block,
    'frozen norm':lambda: Net(body=nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16).eval().requires_grad_(False), nn.ReLU()))}

def like_fp32(a, b, rtol=3e-2, atol=5e-3):
    "Both learners saw the same losses and came to the same weights"
    assert len(a.recorder.losses)==len(b.recorder.losses)
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=rtol, atol=1e-4)
    for (k,v),w in zip(state(a).items(), state(b).values()):
        if v.is_floating_point(): torch.testing.assert_close(w, v, rtol=rtol, atol=atol, msg=lambda m, k=k: f'{k}: {m}')

@in_turn(shapes)
def test_models_of_all_shapes(name, to, dtype):
    def run(to):
        learn = learner(n=16, opt_func=partial(SGD, mom=0.9), lr=0.05, shuffle=False)
        set_seed(1)
        learn.model = shapes[name]()
        if name=='lazy': learn.model(torch.zeros(2,8))
        return fit(to(learn), 6)
    a,b = run(Learner.to_fp32),run(getattr(Learner, to))
    clean(b)
    assert b.mixed_precision.n_skipped==0 and len(b.mixed_precision.history)==6
    like_fp32(a, b, rtol=3e-2 if dtype==torch.float16 else 0.1, atol=5e-3 if dtype==torch.float16 else 2e-2)

changes = {'pruned':lambda m: prune.l1_unstructured(m[0], 'weight', 0.3),
    'parametrized':lambda m: nn.utils.parametrizations.weight_norm(m[0]), 'frozen':lambda m: m[0].requires_grad_(False)}

@pytest.mark.parametrize('change', changes.values(), ids=changes)
def test_models_changed_in_the_middle_of_a_fit(change):
    class Change(Callback):
        def before_batch(self):
            if self.training and self.train_iter==2: change(self.model)
    a,b = [fit(to(learner(shuffle=False, cbs=Change())), 2) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    assert not any('forward' in m.__dict__ for m in b.model.modules())
    like_fp32(a, b)

@pytest.mark.parametrize('which', ['MergeLayer','everything','inner'])
def test_fastais_merge_layers_kept_in_fp32(which):
    "They look for the input of their block on the tensor they get"
    keep = {'MergeLayer':MergeLayer, 'everything':nn.Module, 'inner':'0.layers.1'}[which]
    a,b = [fit(to(learner(unet_block, shuffle=False)), 2) for to in (Learner.to_fp32, partial(Learner.to_fp16_dynamic, keep_fp32=keep))]
    like_fp32(a, b)

@pytest.mark.parametrize('clip', [GradientClip, GradientNormClip])
@pytest.mark.parametrize('overflow', [(), pytest.param({1}, marks=poisoned('backward'))])
def test_parameters_that_the_optimizer_does_not_hold(clip, overflow):
    "Their gradients are nobody's to zero; fastai's GradientClip takes them in"
    def split(m): return [list(m[3].parameters())]
    def run(to):
        return fit(to(learner(shuffle=False, splitter=split, opt_func=SGD, lr=3., cbs=[clip(0.05), Poison(overflow, 'backward')])), 2)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    if not overflow: like_fp32(a, b)
    assert b.mixed_precision.n_skipped==len(overflow) and all(v.isfinite().all() for v in state(b).values())
    assert not equal(weights(b)[4:], weights(learner())[4:])

@pytest.mark.warns('The backward pass is not finite in fp32 either')
def test_overflow_in_parameters_that_the_optimizer_does_not_hold():
    "It is an overflow as any other: GradientClip would spread it"
    learn = learner(mlp, shuffle=False, splitter=lambda m: [list(m[3].parameters())], cbs=GradientClip())
    learn.model[0].weight.register_hook(lambda g: g*(math.inf if learn.train_iter==2 else 1.))
    fit(learn.to_fp16_dynamic(), 2)
    assert learn.mixed_precision.history.skipped.tolist()==[i==2 for i in range(8)]
    assert all(v.isfinite().all() for v in state(learn).values())
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=Raise('after_backward', KeyboardInterrupt))
    assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())

def test_small_writes_in_the_forward_pass_add_up():
    "In half precision 1+1e-4 is 1: only the first of them may be lost"
    class Counter(Net):
        def forward(self, x):
            if self.training:
                with torch.no_grad(): self.slow.bias.add_(1e-4)
            return super().forward(x)+0*self.slow(self.body(x))
    learn = fit(learner(lambda: Counter(slow=nn.Linear(16,1).requires_grad_(False))).to_fp16_dynamic(), 0)
    learn.model.slow.bias.data.fill_(1.)
    fit(learn, 10)
    assert learn.model.slow.bias.item()==pytest.approx(1+40e-4, abs=2e-4)

@dataclass(frozen=True)
class Dataclass:
    y: torch.Tensor
    n: int = 1

class Odd(tuple):
    def __new__(cls, a, b): return super().__new__(cls, (a,b))

@both
def test_several_inputs_and_outputs_in_a_dict(to, dtype):
    def run(to):
        set_seed(0, reproducible=True)
        x,c = torch.randn(64,8),torch.randint(0, 5, (64,3))
        dls = DataLoaders.from_dsets(Items(zip(x, c, x[:,:1])), Items(zip(x, c, x[:,:1])), bs=16, shuffle=False, device=default_device())
        dls.n_inp = 2
        learn = Learner(dls, TwoInputs(emb=nn.Embedding(5,8)), mse, drawn, lr=1e-2)
        return fit(to(learn), 2)
    like_fp32(run(Learner.to_fp32), run(getattr(Learner, to)), rtol=0.1, atol=2e-2)

@both
def test_tensor_subclasses(to, dtype):
    "Their type reaches the loss, and their methods survive"
    kinds = []
    class Loss:
        def __call__(self, p, t):
            kinds.append((type(p), p.dtype, type(t)))
            return mse(p, t)
    class Typed(Callback):
        order = 9.5 # fastai's CastToTensor makes them plain at 9
        def before_batch(self): self.learn.xb,self.learn.yb = (TensorImage(self.x),),(TensorBase(self.y),)
    a,b = [fit(to(learner(mlp, loss_func=Loss(), cbs=Typed(), shuffle=False)), 2) for to in (Learner.to_fp32, getattr(Learner, to))]
    assert set(kinds)=={(TensorImage, torch.float32, TensorBase)}
    like_fp32(a, b, rtol=0.1, atol=2e-2)

# --- beside other callbacks

def conv_net(): return nn.Sequential(nn.Conv2d(1,8,3,2,1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128,10))

def digits(to, cbs=None, model=conv_net, n=64, **kwargs):
    "A learner of scikit-learn's digits, some of them"
    set_seed(0, reproducible=True)
    train,valid = (Items([dl.dataset[i] for i in range(m)]) for dl,m in zip(digits_dls().loaders, (n,32)))
    dls = DataLoaders.from_dsets(train, valid, bs=16, device=default_device())
    return to(Learner(dls, model(), CrossEntropyLossFlat(), drawn, lr=1e-2, metrics=accuracy, cbs=cbs, **kwargs))

@both
@pytest.mark.parametrize('mix', [MixUp, CutMix])
def test_mixed_up_samples(mix, to, dtype):
    a,b = [fit(digits(to, mix(0.4)), 2) for to in (Learner.to_fp32, getattr(Learner, to))]
    like_fp32(a, b, atol=2e-2 if dtype==torch.float16 else 5e-2)
    assert isinstance(b.loss_func, CrossEntropyLossFlat) and fit(digits(Learner.to_fp32), 2).recorder.losses!=a.recorder.losses

@both
def test_frozen_batch_norms_keep_their_statistics(to, dtype):
    def run(to):
        learn = digits(to, BnFreeze())
        learn.model[1].requires_grad_(False)
        before = learn.model[1].running_mean.clone()
        fit(learn, 1)
        assert torch.equal(before, learn.model[1].running_mean)
        return learn
    like_fp32(run(Learner.to_fp32), run(getattr(Learner, to)), atol=2e-2)

@both
def test_channels_last(to, dtype):
    learn = fit(digits(getattr(Learner, to), ChannelsLast()), 1)
    assert learn.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    like_fp32(fit(digits(Learner.to_fp32), 1), learn, atol=2e-2)

@both
def test_activation_stats(to, dtype):
    a,b = [fit(digits(to, ActivationStats(with_hist=True)), 1) for to in (Learner.to_fp32, getattr(Learner, to))]
    for i in range(len(a.activation_stats.stats[0])):
        for x,y in zip(a.activation_stats.layer_stats(i), b.activation_stats.layer_stats(i)):
            assert list(y)==pytest.approx(list(x), rel=3e-2, abs=3e-2)
        assert a.activation_stats.hist(i).shape==b.activation_stats.hist(i).shape
    assert not any(m._forward_hooks for m in b.model.modules())

def test_recurrent_callbacks():
    "ModelResetter, RNNCallback and RNNRegularizer with fastai's AWD-LSTM, whose weights are new tensors in every forward pass"
    from fastai.text.models.awdlstm import AWD_LSTM
    from fastai.text.models.core import LinearDecoder,SequentialRNN
    def run(to):
        set_seed(0, reproducible=True)
        x = torch.randint(0, 20, (48,7))
        model = SequentialRNN(AWD_LSTM(20, 8, 8, 2), LinearDecoder(20, 8, 0.1, bias=True))
        items = Items(zip(x[:,:6], x[:,1:]))
        dls = DataLoaders.from_dsets(items, items, bs=16, shuffle=False, drop_last=True, device=default_device())
        learn = to(Learner(dls, model, CrossEntropyLossFlat(), AdamW16, lr=1e-2, cbs=rnn_cbs(alpha=2, beta=1), moms=(0.8,0.7,0.8)))
        return fit(learn, 2)
    a = run(Learner.to_fp32)
    for to in (Learner.to_fp16_dynamic, Learner.to_bf16_dynamic):
        b = run(to)
        like_fp32(a, b, rtol=0.1, atol=2e-2)
        assert all((h==0).all() for hc in b.model[0].hidden for h in hc) # reset after the fit
        clean(b)

@poisoned('forward')
def test_loggers(tmp_path, capsys):
    "CSVLogger and ShowGraphCallback, progress bars on: what the table shows is logged"
    learn = digits(Learner.to_fp16_dynamic, [CSVLogger(), ShowGraphCallback(), Poison({0}, 'forward')], path=tmp_path)
    learn.recorder.train_metrics = False
    learn.metrics = [accuracy, LossScale(), SkippedSteps()]
    learn.fit(2)
    log = pd.read_csv(tmp_path/'history.csv')
    assert list(log.columns)==list(learn.recorder.metric_names) and log.skipped_steps.tolist()==[1,0] and log.loss_scale.tolist()==[2**16]*2
    assert log.train_loss.tolist()==pytest.approx([v[0] for v in learn.recorder.values], rel=1e-4) and log.train_loss.between(0, 10).all()
    assert learn.show_graph.nb_batches==[4,8]

@poisoned('backward')
def test_tensorboard(tmp_path):
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with pytest.raises(Exception, match='mixed precision'): # as documented
        fit(digits(Learner.to_fp16_dynamic, TensorBoardCallback(tmp_path/'no')), 1)
    board = TensorBoardCallback(tmp_path/'log', trace_model=False, log_preds=False)
    learn = digits(Learner.to_fp16_dynamic, [board, Poison({1}, 'backward')])
    learn.metrics = SkippedSteps()
    fit(learn, 2)
    log = EventAccumulator(str(tmp_path/'log')).Reload()
    assert [o.value for o in log.Scalars('skipped_steps')]==[1,0] and all(math.isfinite(o.value) for o in log.Scalars('train_loss'))

@pytest.mark.parametrize('cb', [SaveModelCallback, partial(EarlyStoppingCallback, patience=1), partial(ReduceLROnPlateau, patience=0)])
def test_trackers(cb, tmp_path, capsys):
    "They see the losses that fp32 sees, and decide alike"
    class Worse(Callback):
        "From the second epoch on the model gets worse"
        order = 55
        def after_train(self):
            if self.epoch>0: self.model[-1].bias.data += torch.arange(10.)
    def run(to):
        learn = digits(to, [cb(), Worse()], path=tmp_path)
        return fit(learn, 4),[v[1] for v in learn.recorder.values]
    (a,la),(b,lb) = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert len(la)==len(lb) and a.opt.hypers[-1]['lr']==b.opt.hypers[-1]['lr']
    assert lb==pytest.approx(la, rel=0.1)
    with b.no_bar(), b.no_logging():
        if cb is SaveModelCallback: assert b.validate()[0]==lb[0] # the best is back

# --- lr_find

def deep_net():
    return nn.Sequential(nn.Flatten(), *[o for _ in range(4) for o in (nn.Linear(64,64), nn.LayerNorm(64), nn.GELU())], nn.Linear(64,10))

def large_batches(model):
    "Digits in batches so large that a suggestion is more than chance: with small ones fp32's own changes with the number of threads"
    x,y = map(torch.stack, zip(*[(x,y) for x,y in digits_dls().train.dataset]))
    dls = DataLoaders(*[DataLoader(range(n), bs=256, shuffle=True, create_batch=lambda idxs: (x[idxs],y[idxs])) for n in (1024,256)])
    return Learner(dls, model(), CrossEntropyLossFlat(), AdamW16)

lr_models = {'regression':lambda: learner(n=512, bs=64), 'images':lambda: large_batches(conv_net), 'deep':lambda: large_batches(deep_net)}

@pytest.mark.parametrize('name', few(lr_models, 'regression'))
@poisoned('forward', 'backward')
def test_lr_find_finds_what_it_finds_in_fp32(name, tmp_path):
    "Also where half precision overflows: until the scale is found, and in single batches"
    def find(to, *cbs):
        set_seed(0, reproducible=True)
        learn = lr_models[name]()
        learn.path,learn.model = tmp_path,nn.Sequential(Detour(), learn.model)
        to(learn).add_cbs(cbs)
        before = state(learn)
        with learn.no_bar(): lr = learn.lr_find(show_plot=False).valley
        assert equal(before, state(learn)) and all(o.isfinite() for o in learn.recorder.losses)
        clean(learn)
        return lr,dict(zip(learn.recorder.lrs, map(float, learn.recorder.losses))) # none of a batch that fp32 cannot use
    lr,fp32 = find(Learner.to_fp32)
    learned = next(iter(fp32.values()))-min(fp32.values())
    in_fp16 = [Poison({0,30,31}, 'precision')]
    in_fp32 = [Poison({0,30}, 'forward'), Poison({20,50}, 'backward')] # skipped steps move the next losses
    for cbs,least,near in (([], 0., 0.002), (in_fp16, 0., 0.002), (in_fp32, lr/2, 0.05)):
        found,losses = find(partial(Learner.to_fp16_dynamic, init_scale=2.**24), *cbs)
        assert all(abs(losses[o]-fp32[o])<=near*learned for o in losses if least<=o<=2*lr)
        if name!='images': assert lr/2<=found<=2*lr # there, the suggestion depends on how losses explode in the end

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('to,bad', [('to_fp16_dynamic',math.nan),('to_bf16_dynamic',math.inf)])
def test_lr_find_ends_where_fp32_is_lost_too(to, bad, tmp_path):
    "From the 60th batch on; fp32 itself goes on for ever with NaN"
    def search(to, bad):
        class Lost(Callback):
            order,i = 1,0
            def after_loss(self):
                self.i += 1
                if self.i>=60: self.learn.loss = self.learn.loss_grad = self.loss_grad*bad
        learn = lr_models['regression']()
        learn.path = tmp_path
        with learn.no_bar(): valley = getattr(learn, to)().add_cb(Lost()).lr_find(show_plot=False).valley
        return learn.lost.i,valley
    (n,valley),(fp32,ref) = search(to, bad),search('to_fp32', math.inf)
    assert fp32==60 and n<=62 and ref/2<=valley<=2*ref

def test_lr_find_ends_where_the_loss_explodes(tmp_path):
    "In fp16 it overflows there; batches run again, so that the losses are those of fp32, and end the search where that ends it"
    def run(to):
        def model(): return nn.Sequential(nn.Linear(8,16), nn.Linear(16,16), nn.Linear(16,16), nn.Linear(16,1))
        learn = to(learner(model, n=512, bs=64, opt_func=partial(SGD, mom=0.), path=tmp_path, loss_func=nn.MSELoss()))
        with learn.no_bar(): learn.lr_find(end_lr=1e12, num_it=20, show_plot=False)
        return learn
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert len(a.recorder.losses)==len(b.recorder.losses)<15 and b.mixed_precision.n_rerun and not b.mixed_precision.n_skipped

# --- what other callbacks expect of `learn.mixed_precision`

class Preallocates(Callback):
    "Runs the largest batch before the fit, in the context that it enters and leaves by name, as fastxtend's ProgressiveResize does"
    order = 11
    def __init__(self): self.dtypes = []
    def before_fit(self):
        if self.learn.opt is None: return
        x,y = self.dls.one_batch()
        self.learn.mixed_precision.autocast.__enter__()
        pred = self.model(torch.cat([x,x]))
        self.dtypes.append(pred.dtype)
        loss = self.learn.loss_func(pred, torch.cat([y,y]))
        self.learn.mixed_precision.autocast.__exit__(None, None, None)
        self.learn.scaler.scale(loss).backward()
        self.model.zero_grad()

class WholeBatch(Callback):
    "Enters it in one event and leaves it in another"
    def before_batch(self): self.learn.mixed_precision.autocast.__enter__()
    def after_loss(self): self.learn.mixed_precision.autocast.__exit__(None, None, None)

class Unscales(Callback):
    "Before fastai's `MixedPrecision` would"
    order = 9
    def __init__(self, whose): self.whose = whose
    def before_step(self): self.learn.scaler.unscale_(self.learn.mixed_precision if self.whose=='callback' else self.opt)

@both
@pytest.mark.parametrize('cbs', [lambda: [Preallocates()], lambda: [WholeBatch()], lambda: [Unscales('callback')],
    lambda: [Unscales('opt')], lambda: [Preallocates(), Unscales('callback')]],
    ids=['preallocates', 'whole batch', 'unscales', 'unscales opt', 'both'])
def test_what_others_do_with_autocast_and_scaler(cbs, to, dtype):
    a,b = [learner(plain_mlp, shuffle=False, opt_func=SGD, cbs=o) for o in ([], cbs())]
    getattr(b, to)()
    like_fp32(fit(a, 1, 0.3), fit(b, 1, 0.3))
    if hasattr(b, 'preallocates'): assert b.preallocates.dtypes==[dtype]
    clean(b)

@poisoned('backward')
def test_attributes_as_fastai_has_them():
    seen = []
    class See(Callback):
        def after_batch(self):
            mp = self.learn.mixed_precision
            seen.append((mp.skipped,mp.autocast is mp.autocast,mp.autocast.fast_dtype,self.learn.scaler is mp.scaler))
    learn = fit(learner(cbs=[See(), Poison({1}, 'backward')]).to_fp16_dynamic(init_scale=1024.), 1)
    mp = learn.mixed_precision
    train,valid = seen[:4],seen[4:]
    assert [o[0] for o in train]==[i==1 for i in range(4)] and all(o[1:]==(True,torch.float16,True) for o in train+valid)
    assert list(mp.scales)==[1024.]*3 and mp.kwargs==dict(init_scale=1024.) and mp.amp_mode.value=='fp16' and isinstance(mp, MixedPrecision)
    assert mp.param_groups is learn.opt.param_groups or list(mp.param_groups)==list(learn.opt.param_groups)

def test_an_averaged_model_in_the_place_of_the_model_for_validations():
    "The optimizer holds none of its weights, and need not"
    learn = fit(learner().to_fp16_dynamic(), 1)
    learn.model = torch.optim.swa_utils.AveragedModel(learn.model)
    for _ in range(2): # nothing is left locked
        assert learn.validate()[0]<10 and learn.get_preds()[0].dtype==torch.float32

class Empty(nn.Module):
    "A weight without numbers, as Squeeze-and-Excitation of few channels has"
    def __init__(self):
        super().__init__()
        self.down,self.up = nn.Linear(16,0),nn.Linear(0,16)
    def forward(self, x): return x*torch.sigmoid(self.up(self.down(x)))

@pytest.mark.filterwarnings('ignore:Initializing zero-element')
def test_a_weight_without_numbers():
    def net(): return nn.Sequential(nn.Linear(8,16), Empty(), nn.Linear(16,1))
    like_fp32(*(fit(to(learner(net, shuffle=False)), 1) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)))

def test_a_mixed_precision_of_another_library():
    "Of the same name"
    class MixedPrecision(Callback): order = 10
    learn = learner(cbs=MixedPrecision()).to_fp16_dynamic()
    assert [type(cb) for cb in learn.cbs if cb.name=='mixed_precision']==[DynamicMixedPrecision]
    learn.add_cb(MixedPrecision)
    learn.mixed_precision.after_pred = lambda: works.append([cb for cb in learn.cbs if cb.name=='mixed_precision' and cb.run])
    works = []
    fit(learn, 1)
    assert works and all(o==[learn.mixed_precision] and type(learn.mixed_precision) is MixedPrecision for o in works)

# --- a CPU

def series_net(): return nn.Sequential(nn.Unflatten(1, (1,8)), nn.Conv1d(1,4,3), nn.ReLU(), nn.Flatten(), nn.Linear(24,1))

@pytest.mark.cpu_only('its fp16 convolutions are slow')
def test_a_cpu_says_what_fp16_convolutions_cost(recwarn):
    "Once, and only where there are some to pay for"
    warnings.simplefilter('always')
    def said(learn): return [str(w.message) for w in recwarn.list if 'CPU' in str(w.message)]
    kept = learner(series_net).to_fp16_dynamic(keep_fp32=nn.Conv1d)
    for quiet in (learner().to_fp16_dynamic(), learner(series_net).to_bf16_dynamic(), kept): assert not said(fit(quiet, 1))
    learn = learner(series_net).to_fp16_dynamic()
    learn.validate()
    assert not said(learn)
    told, = said(fit(learn, 1))
    assert 'to_fp32' in told and 'bf16' not in told and len(said(fit(learn, 1)))==1

# --- importing

def test_importing_changes_nothing(in_a_process, tmp_path):
    "But what it defines: in a process of its own, after what fastai's `fp16` brings"
    code = '''
import io,random,sys,warnings
from contextlib import redirect_stderr,redirect_stdout
import fastai.callback.fp16
from fastai.torch_core import defaults
import numpy as np,torch
def known(): return {k: list(v) if isinstance(v, list) else v for k,v in vars(defaults).items()}
def states(): return torch.get_rng_state().tolist(),random.getstate(),np.random.get_state()[1].tolist(),torch.get_default_dtype()
before,out = (known(),states(),list(warnings.filters)),io.StringIO()
with warnings.catch_warnings(record=True) as told, redirect_stdout(out), redirect_stderr(out):
    warnings.simplefilter('always')
    import fastai_amp16.all as ours
assert (known(),states(),list(warnings.filters))==before and not told and not out.getvalue()
'''
    in_a_process(code, tmp_path)

@pytest.mark.parametrize('module', ['vision.all','text.all','tabular.all','collab','callback.all','distributed','metrics'])
def test_the_star_import_hides_no_name_of_fastais(module):
    theirs,ours = import_module(f'fastai.{module}'),import_module('fastai_amp16.all')
    assert not [k for k in ours.__all__ if getattr(theirs, k, getattr(ours, k)) is not getattr(ours, k)]
