"`DynamicMixedPrecision` in a `Learner`: what a user runs, beside fp32, plain PyTorch and fastai itself"
import copy,math,pickle,warnings
from collections import namedtuple
import pytest,torch
from fastai.basics import (Adam,Callback,CancelBackwardException,CancelBatchException,CancelFitException,CancelStepException,DataLoader,DataLoaders,Learner,OptimWrapper,
                           SGD,load_learner,nn,partial,set_seed,tensor)
from fastai.callback.all import FetchPredsCallback,GradientAccumulation,GradientClip,MixedPrecision,TerminateOnNaNCallback
from fastai_amp16.all import (AdamW16,DynamicMixedPrecision,GradNorm,GradientNormClip,LossScale,SkippedSteps,half_forward)
from torch.utils._python_dispatch import TorchDispatchMode

def mlp(bn=True): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16) if bn else nn.Identity(), nn.ReLU(), nn.Linear(16,1))
def plain_mlp(): return mlp(bn=False)

def mse(p, t): return nn.functional.mse_loss(p, t)/16 # small enough for a loss scale of 2**16
class Items(list):
    "A dataset that can be exported"
    def new_empty(self): return Items()

def learner(model=mlp, n=64, bs=16, scale=1., loss_func=None, opt_func=AdamW16, lr=1e-2, shuffle=True, **kwargs):
    set_seed(0, reproducible=True)
    x = torch.randn(n, 8)
    y = scale*(x[:,:1]*x[:,1:2]+0.1)
    dls = DataLoaders(DataLoader(Items(zip(x, y)), bs=bs, shuffle=shuffle), DataLoader(Items(zip(x[:16], y[:16])), bs=bs))
    return Learner(dls, model if isinstance(model, nn.Module) else model(), loss_func or mse, opt_func, lr=lr, **kwargs)

def fit(learn, n=2, lr=None, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, lr, **kwargs)
    return learn

def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def state(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}
def equal(a, b): return all(torch.equal(x, y) for x,y in zip(a, b)) if isinstance(a, list) else all(torch.equal(v, b[k]) for k,v in a.items())

def clean(learn):
    "What must hold outside a forward pass"
    assert not torch.is_autocast_enabled('cpu') and torch.backends.mha.get_fastpath_enabled()
    assert isinstance(learn.model, nn.Module) and not any('forward' in m.__dict__ for m in learn.model.modules())
    held = {id(p) for pg in learn.opt.param_lists for p in pg}
    assert all(p.dtype==torch.float32 and id(p) in held for p in learn.model.parameters())

both = pytest.mark.parametrize('to,dtype', [('to_fp16_dynamic',torch.float16), ('to_bf16_dynamic',torch.bfloat16)], ids=['fp16','bf16'])

# --- who computes in what

class Spy(nn.Module):
    "Notes dtypes of what passes"
    seen = None
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x):
        out = self.m(x)
        if self.seen is not None: self.seen.append((type(self.m).__name__, self.training, x.dtype, getattr(self.m, 'weight', x).dtype, out.dtype))
        return out

@both
def test_half_precision_in_training_and_validation(to, dtype):
    spies = [Spy(o) for o in mlp()]
    seen = []
    for o in spies: o.seen = seen
    losses = []
    def loss_func(p, t):
        losses.append((p.dtype, torch.is_autocast_enabled('cpu')))
        return (p-t).pow(2).mean()
    learn = fit(getattr(learner(nn.Sequential(*spies), loss_func=loss_func), to)(), 1)
    f = torch.float32
    ours = [('Linear',f,dtype,dtype), ('BatchNorm1d',dtype,f,dtype), ('ReLU',dtype,dtype,dtype), ('Linear',dtype,dtype,dtype)]
    for i,(name,train,*dts) in enumerate(seen): assert (name,*dts)==ours[i%4] and train==(i<16)
    assert len(seen)==20 and set(losses)=={(f,False)}
    clean(learn)
    seen.clear()
    preds,_ = learn.get_preds()
    learn.validate()
    assert [s[3] for s in seen[::4]]==[dtype]*2 and preds.dtype==f
    clean(learn)

def test_trains_as_a_hand_written_loop():
    "autocast, GradScaler and AdamW of torch, bit by bit the same loss and to rounding the same weights"
    model = mlp(bn=False)
    ours = learner(copy.deepcopy(model), shuffle=False, wd=0.1, wd_bn_bias=True, cbs=GradientNormClip(0.5)).to_fp16_dynamic()
    losses = []
    class Losses(Callback):
        def after_batch(self):
            if self.training: losses.append(self.loss.item())
    fit(ours, 3, cbs=Losses())

    opt,scaler,ref = torch.optim.AdamW(model.parameters(), 1e-2, (0.9,0.99), 1e-4, 0.1),torch.amp.GradScaler('cpu'),[]
    for _ in range(3):
        for xb,yb in ours.dls.train:
            with torch.autocast('cpu', torch.float16): pred = model(xb)
            loss = mse(pred.float(), yb)
            ref.append(loss.item())
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert losses==pytest.approx(ref, rel=1e-3) and losses[0]==ref[0]
    for p,q in zip(ours.model.parameters(), model.parameters()): torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)

@both
def test_true_weight_decay_reaches_the_next_forward(to, dtype):
    "Steps of 1e-5 of the weight, which half precision cannot represent, add up"
    class Check(Callback):
        "Each half weight is its master, cast"
        def before_fit(self): self.n = 0
        def before_batch(self): self.h = self.learn.model.register_forward_hook(self.compare)
        def after_pred(self): self.h.remove()
        def compare(self, m, i, o):
            self.n += 1
            for p,q in zip(m.parameters(), self.masters): assert torch.equal(p.detach(), q.detach().to(p.dtype))
    learn = getattr(learner(nn.Sequential(nn.Linear(8,1)), loss_func=lambda p,t: 0*p.sum(), wd=1e-3, wd_bn_bias=True, lr=1e-2), to)()
    before = weights(learn)
    check = Check()
    check.masters = list(learn.model.parameters())
    fit(learn, 25, cbs=check)
    assert check.n==125
    for p,b in zip(learn.model.parameters(), before): torch.testing.assert_close(p.detach(), b*(1-1e-5)**100, rtol=2e-5, atol=0)

def test_edits_and_loads_in_the_middle_of_a_fit_reach_the_next_forward(tmp_path):
    class Edit(Callback):
        def after_batch(self):
            if self.training and self.train_iter==2: self.model[0].weight.data.fill_(3.)
            if self.training and self.train_iter==3: self.learn.load('start')
    def run(to):
        learn = to(learner(plain_mlp, path=tmp_path))
        learn.create_opt()
        learn.save('start')
        return fit(learn, 1, cbs=[Edit(), (seen:=Seen())]),seen
    class Seen(Callback):
        order = 1
        def before_fit(self): self.preds = []
        def after_pred(self): self.preds.append(self.learn.pred.detach().float())
    (_,sa),(_,sb) = run(Learner.to_fp16_dynamic),run(Learner.to_fp32)
    for p,q in zip(sa.preds, sb.preds): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)

# --- overflow

class Poison(Callback):
    "Makes the batches at `steps` overflow: in the forward pass by an infinite input, in the backward pass by a large gradient"
    order = 5
    def __init__(self, steps, where): self.steps,self.where,self.i = steps,where,-1
    def before_batch(self):
        if not self.training: return
        self.i += 1
        if self.i in self.steps and self.where=='forward': self.learn.xb = tuple(x*math.inf for x in self.xb)
    def before_backward(self):
        if self.i in self.steps and self.where=='backward': self.learn.loss_grad = self.learn.loss_grad*1e30

class Watch(Callback):
    "State before each batch and after it, and which events fired"
    order = 99
    def before_fit(self): self.changed,self.cancelled = [],[]
    def snapshot(self):
        s = {k: v.clone() for k,v in self.model.state_dict().items()}
        s.update({(i,k): torch.as_tensor(v).clone() for i,o in enumerate(self.opt.state_dict()['state']) for k,v in o.items()})
        return s
    def before_batch(self):
        if self.training: self.before = self.snapshot()
    def after_cancel_step(self): self.cancelled.append(self.train_iter)
    def after_batch(self):
        if self.training:
            now = self.snapshot()
            self.changed.append([k for k in now if k not in self.before or not torch.equal(now[k], self.before[k])])

@pytest.mark.parametrize('where', ['forward','backward'])
@both
def test_a_skipped_step_changes_nothing(to, dtype, where):
    steps = {0,2,3}
    watch = Watch()
    learn = fit(getattr(learner(cbs=[Poison(steps, where), watch]), to)(), 2)
    mp = learn.mixed_precision
    assert [i for i,c in enumerate(watch.changed) if not c]==sorted(steps) and all(len(c)>8 for i,c in enumerate(watch.changed) if i not in steps)
    assert watch.cancelled==sorted(steps)
    assert mp.skipped==3 and mp.history.skipped.tolist()==[i in steps for i in range(8)]
    assert mp.history.grad_norm[mp.history.skipped].map(math.isnan if where=='forward' else math.isinf).all()
    assert mp.history.grad_norm[~mp.history.skipped].gt(0).all()
    if dtype==torch.float16: # what the forward pass did is no reason to lower the scale
        assert mp.scaler.get_scale()==(2**16 if where=='forward' else 2**13)
        assert mp.history.loss_scale.tolist()==([2**16]*8 if where=='forward' else [2**i for i in (16,15,15,14,13,13,13,13)])
    losses = [o.item() for o in learn.recorder.losses]
    assert all(map(math.isfinite, losses)) and learn.recorder.values[-1][0]>0
    clean(learn)

def test_smoothed_loss_goes_on_as_if_the_skipped_batch_had_not_been():
    def smooth(steps):
        return [o.item() for o in fit(learner(lr=0., cbs=[Poison(steps, 'forward')], shuffle=False).to_fp16_dynamic(), 1).recorder.losses]
    plain,poisoned = smooth(()),smooth({1})
    assert poisoned[0]==plain[0]==pytest.approx(poisoned[1], rel=1e-6)
    first = smooth({0})
    second = (plain[1]*(1-0.98**2)-plain[0]*0.02*0.98)/0.02 # the second batch's own loss
    assert first[0]==0 and first[1]==pytest.approx(second, rel=1e-4)

def test_terminate_on_nan_does_not_end_a_fit_over_a_skipped_step():
    learn = fit(learner(cbs=[Poison({1}, 'forward'), TerminateOnNaNCallback()]).to_fp16_dynamic(), 1)
    assert len(learn.mixed_precision.history)==4

def test_meant_infinities_are_no_forward_overflow():
    "Logits masked by -inf: what overflows beside them is the backward pass"
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8,4)
        def forward(self, x): return self.lin(x).masked_fill(torch.tensor([False,True,False,False]), -math.inf),torch.tensor(math.inf)
    def loss(p, t): return nn.functional.cross_entropy(p[0], torch.zeros(len(p[0]), dtype=torch.long))*1e2
    learn = fit(learner(Masked(), loss_func=loss).to_fp16_dynamic(), 3)
    assert 0<learn.mixed_precision.skipped<12 and learn.mixed_precision.scaler.get_scale()<2**16

def test_gradients_that_need_a_scale_below_one():
    learn = fit(learner(plain_mlp, loss_func=lambda p,t: 1e6*(p-t).sum(), opt_func=partial(SGD, mom=0.), lr=1e-9, n=256).to_fp16_dynamic(), 2)
    assert learn.mixed_precision.scaler.get_scale()<1 and not learn.mixed_precision.history.skipped.iloc[-1]

@pytest.mark.parametrize('on_spiral', ['heal','warn','raise'])
@pytest.mark.parametrize('where,kw', [('forward',{}), ('backward',dict(dynamic=False, init_scale=512.)), ('backward',dict(init_scale=1., min_scale=1.))])
def test_spiral(on_spiral, where, kw):
    learn = learner(cbs=Poison(range(2,99), where)).to_fp16_dynamic(on_spiral=on_spiral, patience=4, **kw)
    if on_spiral=='raise':
        with pytest.raises(FloatingPointError, match='4 steps in a row'): fit(learn, 5)
        assert learn.mixed_precision.skipped==4
    else:
        with pytest.warns(UserWarning, match='4 steps in a row') as w: fit(learn, 5)
        assert len([o for o in w if 'in a row' in str(o.message)])==1 and learn.mixed_precision.skipped==18
    assert all(p.isfinite().all() for p in learn.model.parameters())
    clean(learn)

def test_calibration_is_no_spiral():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn = learner(cbs=Poison(range(10), 'backward')).to_fp16_dynamic(on_spiral='raise')
        fit(learn, 3)
    assert learn.mixed_precision.skipped==10

# --- from fit to fit, and in checkpoints

def test_scale_and_counts_survive_from_fit_to_fit():
    learn = learner(cbs=Poison({0,1,5}, 'backward')).to_fp16_dynamic()
    fit(learn, 1)
    assert learn.mixed_precision.scaler.get_scale()==2**14
    fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): learn.validate()
    assert learn.mixed_precision.scaler.get_scale()==2**13 and learn.mixed_precision.skipped==3
    assert learn.mixed_precision.history.step.tolist()==list(range(8))

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

@pytest.mark.parametrize('opt_func', [AdamW16, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['AdamW16','Adam','OptimWrapper'])
def test_checkpoints(tmp_path, opt_func):
    def new(): return learner(path=tmp_path, opt_func=opt_func, cbs=Poison({0,1,2}, 'backward'))
    a = fit(new().to_fp16_dynamic(), 2)
    a.save('a')
    assert a.mixed_precision.scaler.get_scale()==2**13
    saved = torch.load(tmp_path/'models/a.pth', weights_only=False)
    assert set(saved)=={'model','opt'} and all(v.dtype in (torch.float32,torch.int64) for v in saved['model'].values())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='Could not load') # fastai's way to say that an optimizer's state was not loaded
        plain = new().load('a') # fastai alone, `weights_only=True`
        plain.save('plain')
        b,c = new().to_fp16_dynamic().load('a'),new().to_fp16_dynamic().load('plain')
    assert b.mixed_precision.scaler.state_dict()==a.mixed_precision.scaler.state_dict() and c.mixed_precision.scaler.get_scale()==2**16
    for o in (plain,b,c): assert equal(state(a), state(o))
    c.mixed_precision.scaler.load_state_dict(a.mixed_precision.scaler.state_dict())
    for o in (a,b,c): fit(set_poison_off(o), 1)
    assert not hasattr(a.opt, 'scaler')

def set_poison_off(learn):
    set_seed(1, reproducible=True)
    return learn.remove_cb(Poison)

def test_resumed_is_uninterrupted(tmp_path):
    def new(): return learner(path=tmp_path, shuffle=False).to_fp16_dynamic(growth_interval=3)
    a = fit(new(), 2)
    a.save('a')
    b = new().load('a')
    fit(a, 2), fit(b, 2)
    assert equal(state(a), state(b)) and a.mixed_precision.scaler.state_dict()==b.mixed_precision.scaler.state_dict()

def test_export(tmp_path):
    learn = fit(learner(path=tmp_path).to_fp16_dynamic(), 1)
    learn.export()
    clean(learn)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fp32,fp16 = load_learner(tmp_path/'export.pkl'),load_learner(tmp_path/'export.pkl', cpu=False)
    assert not fp32._grab_cbs(MixedPrecision) and len(fp16._grab_cbs(DynamicMixedPrecision))==1
    assert equal(weights(learn), weights(fp32)) and fp16.mixed_precision.scaler.state_dict()==learn.mixed_precision.scaler.state_dict()
    pickle.loads(pickle.dumps(learn.model))
    fit(learn, 1)

# --- callbacks beside us

class CountReads(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default: self.n += 1
        return func(*args, **(kwargs or {}))

@pytest.mark.parametrize('to', [partial(Learner.to_fp16_dynamic, hysteresis=2, growth_interval=2), Learner.to_bf16_dynamic], ids=['fp16','bf16'])
@pytest.mark.parametrize('cbs', [[], [GradientNormClip(0.1)]], ids=['','clip'])
def test_one_host_read_a_step(to, cbs):
    "More steps, skipped ones among them: one more read for each and nothing else"
    def reads(to, n):
        learn = to(learner(n=16*n, cbs=[*cbs, Poison({1,3}, 'backward'), Poison2({2})]))
        with CountReads() as c: fit(learn, 1)
        return c.n
    assert reads(to, 20)-reads(to, 8)==12+reads(Learner.to_fp32, 20)-reads(Learner.to_fp32, 8)

class Poison2(Poison):
    def __init__(self, steps): super().__init__(steps, 'forward')

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16_dynamic], ids=['fp32','fp16'])
def test_accumulated_gradients_equal_the_large_batch(to):
    def run(bs, cbs):
        return weights(fit(to(learner(plain_mlp, bs=bs, cbs=cbs, shuffle=False, opt_func=partial(SGD, mom=0.9))), 3))
    for p,q in zip(run(32, None), run(8, GradientAccumulation(32))): torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)

@pytest.mark.parametrize('where', ['forward','backward'])
def test_overflow_in_one_of_several_accumulated_batches_drops_the_step(where):
    watch = Watch()
    learn = fit(learner(bs=8, cbs=[GradientAccumulation(16), Poison({2}, where), watch], shuffle=False).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True,False,False]
    stepped = [any('weight' in str(k) for k in c) for c in watch.changed]
    assert stepped==[False,True,False,False,False,True,False,True]
    assert learn.mixed_precision.scaler.get_scale()==(2**16 if where=='forward' else 2**15)
    assert all(b.isfinite().all() for b in learn.model.buffers())

@pytest.mark.parametrize('early', [False, True])
def test_tail_of_accumulated_batches_does_not_enter_the_next_fit(early):
    class Early(Callback):
        "As EarlyStoppingCallback does"
        def after_epoch(self): raise CancelFitException()
    class First(Callback):
        order = 20
        def before_step(self):
            self.learn.first_grads = [p.grad.clone() for p in self.model.parameters()]
            raise CancelFitException()
    a,b = [learner(plain_mlp, bs=8, cbs=GradientAccumulation(24), shuffle=False, lr=0.).to_fp16_dynamic() for _ in range(2)]
    fit(a, 1+early, cbs=Early() if early else None) # 8 batches, 3 a step: two are left
    if not early: assert all(p.grad is None for p in a.model.parameters())
    for o in (a,b): fit(o, 1, cbs=First())
    assert equal(a.first_grads, b.first_grads)

def test_losses_of_accumulated_batches_stay_finite():
    "The overflow is in a batch before the one that steps"
    learn = fit(learner(bs=8, cbs=[GradientAccumulation(16), Poison({0,4}, 'forward'), TerminateOnNaNCallback()], shuffle=False).to_fp16_dynamic(), 2)
    assert len(learn.mixed_precision.history)==8 and all(math.isfinite(v[0]) for v in learn.recorder.values)

def test_a_cancelled_batch_is_not_part_of_the_next_step():
    class Cancel(Callback):
        def after_loss(self):
            if self.training and self.train_iter==0: raise CancelBatchException()
    class Stats(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.model[1].num_batches_tracked.item())
    stats = Stats()
    fit(learner(cbs=[Cancel(), Poison({1}, 'backward'), stats]).to_fp16_dynamic(), 1)
    assert stats.seen==[1,1,2,3]

def test_norm_statistics_of_all_accumulated_batches_are_put_back():
    class Stats(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.model[1].num_batches_tracked.item())
    stats = Stats()
    fit(learner(bs=8, cbs=[GradientAccumulation(16), Poison({3}, 'backward'), stats], shuffle=False).to_fp16_dynamic(), 1)
    assert stats.seen==[1,2,3,2,3,4,5,6]

def test_fastais_gradient_clip():
    "Clips true gradients"
    class Norms(Callback):
        order = 90
        def before_step(self): self.learn.seen = max(getattr(self.learn, 'seen', 0), math.hypot(*[p.grad.norm().item() for p in self.model.parameters()]))
    learn = fit(learner(cbs=[GradientClip(0.1), Norms()]).to_fp16_dynamic(), 2)
    assert learn.seen==pytest.approx(0.1, rel=1e-3) and learn.mixed_precision.history.grad_norm.max()>0.1

@pytest.mark.parametrize('order', [-20, 5, 10.5, 70])
@pytest.mark.parametrize('event,ex', [('before_step',CancelStepException), ('before_backward',CancelBackwardException)])
def test_steps_cancelled_by_others(order, event, ex):
    class Cancel(Callback):
        def before_fit(self): self.i = 0
        def cancel(self):
            self.i += 1
            if self.i in (1,3): raise ex()
    cb = Cancel()
    cb.order = order
    setattr(cb, event, cb.cancel)
    learn = fit(learner(cbs=cb).to_fp16_dynamic(), 2)
    assert learn.mixed_precision.skipped==0 and all(p.isfinite().all() for p in learn.model.parameters())
    clean(learn)

@pytest.mark.parametrize('e', [KeyboardInterrupt, RuntimeError, CancelFitException])
@pytest.mark.parametrize('event', ['before_batch','forward','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'])
@pytest.mark.parametrize('order', [-30, 99])
def test_interrupts(e, event, order):
    class Interrupt(Callback):
        def raise_at(self):
            if self.armed and self.training and self.learn.train_iter==1:
                self.armed = False
                raise e('now')
    cb,model = Interrupt(),mlp()
    cb.armed,cb.order = True,order
    if event=='forward': model[2].register_forward_pre_hook(lambda *a: cb.raise_at())
    else: setattr(cb, event, cb.raise_at)
    learn = learner(model, cbs=cb).to_fp16_dynamic()
    if e is CancelFitException: fit(learn, 2)
    else:
        with pytest.raises(e): fit(learn, 2)
    assert not cb.armed
    clean(learn)
    before = weights(learn)
    model[2]._forward_pre_hooks.clear()
    learn.remove_cb(cb)
    pickle.loads(pickle.dumps(learn.model))
    fit(learn, 1)
    assert not equal(before, weights(learn))
    x = torch.randn(4,8)
    model.eval()
    assert torch.equal(model(x), copy.deepcopy(model)(x)) and model(x).dtype==torch.float32

def test_batch_that_the_model_cannot_be_called_with():
    class Bad(Callback):
        def before_batch(self): self.learn.xb = 5
    learn = learner(cbs=Bad()).to_fp16_dynamic()
    with pytest.raises(TypeError): fit(learn)
    clean(learn)

def test_interrupted_while_waiting_for_the_gradients(monkeypatch):
    "Between the unscaling of the gradients and the update of the scale"
    learn = learner().to_fp16_dynamic()
    unscale = torch.amp.GradScaler.unscale_
    def interrupt(self, opt):
        unscale(self, opt)
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(torch.amp.GradScaler, 'unscale_', interrupt)
        fit(learn)
    clean(learn)
    pickle.loads(pickle.dumps(learn.mixed_precision.scaler))
    fit(learn, 1)
    assert len(learn.mixed_precision.history)==4

@pytest.mark.parametrize('e', [CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize('event', ['after_backward','before_step'])
def test_scaled_gradients_never_enter_another_fit(e, event):
    class Stop(Callback):
        def stop(self): raise e()
    stop = Stop()
    setattr(stop, event, stop.stop)
    learn = learner(plain_mlp, opt_func=SGD, cbs=stop).to_fp16_dynamic()
    if e is CancelFitException: fit(learn, 1)
    else:
        with pytest.raises(e): fit(learn, 1)
    before = weights(learn)
    fit(learn.to_fp32().remove_cb(stop), 1)
    assert max((a-b).abs().max() for a,b in zip(before, weights(learn)))<0.1

def test_norm_statistics_noted_in_an_interrupted_fit_are_forgotten():
    class Stop(Callback):
        def after_backward(self): raise KeyboardInterrupt
    class Mean(Callback):
        def after_batch(self):
            if self.training: self.seen.append(self.model[1].running_mean.mean().item())
    stop,mean = Stop(),Mean()
    mean.seen = []
    learn = learner(cbs=stop).to_fp16_dynamic()
    with pytest.raises(KeyboardInterrupt): fit(learn)
    learn.model[1].running_mean.fill_(5.)
    fit(learn.remove_cb(stop), 1, cbs=[Poison({0}, 'backward'), mean])
    assert mean.seen[0]==5 and mean.seen[1]!=5

def test_gradients_of_before_a_load_do_not_enter_the_next_step(tmp_path):
    "Half of an accumulated step was made at the scale of before"
    class GoBack(Callback):
        def after_batch(self):
            if self.training and self.train_iter==1: self.learn.load('one')
    learn = learner(bs=8, path=tmp_path, cbs=GradientAccumulation(16), shuffle=False).to_fp16_dynamic(init_scale=1.)
    learn.create_opt()
    learn.save('one')
    learn.to_fp16_dynamic()
    fit(learn, 1, cbs=GoBack())
    assert learn.mixed_precision.history.grad_norm.max()<10

def test_text_learner_loads_its_scale(tmp_path):
    from fastai.callback.rnn import RNNCallback,RNNRegularizer
    from fastai.text.learner import TextLearner
    ds = Items([(torch.randint(0, 9, (5,)),torch.tensor(1)) for _ in range(16)])
    class Model(nn.Sequential):
        def reset(self): pass
    def new():
        model = Model(nn.Embedding(9,4), nn.Flatten(), nn.Linear(20,2))
        return TextLearner(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)), model, loss_func=nn.CrossEntropyLoss(), path=tmp_path, splitter=lambda m: [list(m.parameters())]).remove_cbs([RNNCallback, RNNRegularizer])
    a = fit(new().to_fp16_dynamic(init_scale=8.), 1)
    a.save('t')
    assert new().to_fp16_dynamic().load('t').mixed_precision.scaler.get_scale()==8

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

def test_module_can_be_reloaded():
    import subprocess,sys
    code = ("import warnings; warnings.simplefilter('ignore')\nimport importlib,fastai_amp16.callback as c\nimportlib.reload(c)\nfrom fastai_amp16.demo import digits_dls\n"
            "learn = c.Learner(digits_dls(), c.nn.Sequential(c.nn.Flatten(), c.nn.Linear(64,10)))\nlearn = c._use(learn, c.DynamicMixedPrecision())\n"
            "with learn.no_bar(), learn.no_logging(): learn.fit(1)\nassert len(learn.mixed_precision.history)==22")
    assert subprocess.run([sys.executable, '-c', code]).returncode==0

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

# --- one mixed precision, and no other

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

# --- history, metrics, plot

def test_history_metrics_and_plot():
    import matplotlib.pyplot as plt
    learn = learner(cbs=[Poison({1,2,5}, 'backward'), GradientNormClip(0.25)], metrics=[LossScale(), SkippedSteps(), GradNorm()]).to_fp16_dynamic()
    fit(learn, 2)
    df = learn.mixed_precision.history
    assert list(df.columns)==['step','loss_scale','skipped','grad_norm']
    assert learn.recorder.metric_names==['epoch','train_loss','valid_loss','loss_scale','skipped_steps','grad_norm','time']
    assert [v[2] for v in learn.recorder.values]==[2**14,2**13] and [v[3] for v in learn.recorder.values]==[2,1]
    for v,d in zip(learn.recorder.values, (df[:4],df[4:])): assert v[4]==pytest.approx(d.grad_norm[~d.skipped].mean())
    _,axs = plt.subplots(2, 1)
    learn.mixed_precision.plot(axs)
    assert axs[0].get_yscale()=='log' and axs[0].lines[1].get_xdata().tolist()==[1,2,5] and set(axs[1].lines[1].get_ydata())=={0.25}
    fit(learn.to_fp32(), 1)
    assert learn.recorder.values[-1][2:]==[None]*3

def test_true_gradients_after_order_10():
    "Callbacks behind us see what fp32 sees"
    class Grads(Callback):
        order = 15
        def before_step(self): self.learn.seen = [p.grad.clone() for p in self.model.parameters()]; raise CancelFitException()
    a,b = [fit(to(learner(plain_mlp, cbs=Grads())), 1).seen for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    for x,y in zip(a, b): torch.testing.assert_close(x, y, rtol=5e-3, atol=1e-3)

# --- bad input

@pytest.mark.parametrize('kw', [dict(init_scale=0.), dict(init_scale=-2.), dict(min_scale=-1.), dict(min_scale=8., max_scale=4.), dict(on_spiral='hope'), dict(patience=0),
                                dict(patience=1.5), dict(keep_fp32='lin')])
def test_bad_arguments_change_nothing(kw):
    learn = learner().to_bf16_dynamic()
    before = learn.mixed_precision
    with pytest.raises(ValueError) as e: learn.to_fp16_dynamic(**kw)
    assert any(f'{k}={v!r}' in str(e.value) for k,v in kw.items()) and '\n' not in str(e.value)
    assert learn.mixed_precision is before

def test_unknown_argument():
    with pytest.raises(TypeError, match='loss_scale'): learner().to_fp16_dynamic(loss_scale=512)

@pytest.mark.parametrize('mode', ['fp8', None, 16])
def test_unknown_amp_mode(mode):
    with pytest.raises(ValueError, match=f"amp_mode={mode!r}.*'fp16' or 'bf16'"): DynamicMixedPrecision(mode)

@pytest.mark.parametrize('model,says', [(nn.ReLU(), 'no parameters'), (mlp().half(), 'torch.float16'), (mlp().bfloat16(), 'torch.bfloat16')])
def test_models_that_cannot_be(model, says):
    with pytest.raises(ValueError, match=says): learner(model).to_fp16_dynamic()
    if says!='no parameters':
        with pytest.raises(ValueError, match=says): fit(learner(model, cbs=DynamicMixedPrecision()))

def test_optimizer_of_another_model():
    learn = learner().to_fp16_dynamic()
    learn.create_opt()
    learn.model = mlp()
    with pytest.raises(ValueError, match='none of the model'): fit(learn)
    learn.create_opt()
    fit(learn)

def test_emulated_bf16(monkeypatch):
    "The hardware is made up, the decision is not"
    from fastai_amp16.callback import _emulates_bf16
    for capability,emulated in (((7,0),True), ((7,5),True), ((8,0),False), ((9,0),False)):
        monkeypatch.setattr('torch.cuda.get_device_capability', lambda d=None, c=capability: c)
        assert _emulates_bf16(torch.device('cuda'))==emulated and not _emulates_bf16(torch.device('cpu'))
    monkeypatch.setattr('fastai_amp16.callback._emulates_bf16', lambda d: True)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda d=None: 'Tesla T4')
    with pytest.warns(UserWarning, match='Tesla T4 .*only emulates'): fit(learner().to_bf16_dynamic(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fit(learner().to_fp16_dynamic(), 1)
