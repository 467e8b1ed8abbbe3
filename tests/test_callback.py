"`DynamicMixedPrecision` in a `Learner`: what a user runs, beside fp32, plain PyTorch and fastai itself"
import copy,warnings
from functools import partial
from unittest.mock import patch
import pytest,torch
from fastai.basics import Callback,CancelFitException,Learner,nn
from fastai_amp16.all import DynamicMixedPrecision,DynamicScaler,GradientNormClip
from torch.utils._python_dispatch import TorchDispatchMode
from common import *

class Spy(nn.Module):
    "Notes dtypes of what passes"
    seen = None
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x):
        out = self.m(x)
        row = type(self.m).__name__,self.training,x.dtype,getattr(self.m, 'weight', x).dtype,out.dtype
        if self.seen is not None: self.seen.append(row)
        return out

@both
def test_half_precision_in_training_and_validation(to, dtype):
    spies = [Spy(o) for o in mlp()]
    seen = []
    for o in spies: o.seen = seen
    losses = []
    def loss_func(p, t):
        losses.append((p.dtype, torch.is_autocast_enabled(default_device().type)))
        return (p-t).pow(2).mean()
    learn = fit(getattr(learner(nn.Sequential(*spies), loss_func=loss_func), to)(), 1)
    f = torch.float32
    ours = [('Linear',f,f,dtype), ('BatchNorm1d',dtype,f,dtype), ('ReLU',dtype,dtype,dtype), ('Linear',dtype,f,dtype)] # weights are masters
    for i,(name,train,*dts) in enumerate(seen): assert (name,*dts)==ours[i%4] and train==(i<16)
    assert len(seen)==20 and set(losses)=={(f,False)}
    clean(learn)
    seen.clear()
    preds,_ = learn.get_preds()
    learn.validate()
    assert [s[4] for s in seen[::4]]==[dtype]*2 and preds.dtype==f
    clean(learn)

def test_trains_as_a_hand_written_loop():
    "autocast, GradScaler and AdamW of torch, bit by bit the same loss and to rounding the same weights"
    model = mlp(bn=False)
    decays = dict(wd=0.1, wd_bn_bias=True)
    ours = learner(copy.deepcopy(model), shuffle=False, opt_func=AdamW16, cbs=GradientNormClip(0.5), **decays).to_fp16_dynamic()
    losses = []
    class Losses(Callback):
        def after_batch(self):
            if self.training: losses.append(self.loss.item())
    fit(ours, 3, cbs=Losses())

    dev = default_device().type
    opt,scaler,ref = torch.optim.AdamW(model.parameters(), 1e-2, (0.9,0.99), 1e-5, 0.1),torch.amp.GradScaler(dev),[]
    for _ in range(3):
        for xb,yb in ours.dls.train:
            with torch.autocast(dev, torch.float16): pred = model(xb)
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

counts = pytest.mark.cpu_only('counts its operators; test_cuda counts synchronizations')

class Count(TorchDispatchMode):
    "Counts operators and reads by the host; what a forward or a backward pass dispatches is apart"
    apart = False
    def __init__(self):
        super().__init__()
        self.ops = self.reads = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += not (self.apart or func.is_view) # a view computes nothing
        self.reads += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))
    def tolist(self, t, of=torch.Tensor.tolist):
        self.reads += 1 # on a CPU no operator shows it
        with torch._C.DisableTorchFunction(): return of(t) # each mode would call this method again
    def backward(self, t, *args, of=torch.Tensor.backward, **kwargs):
        self.apart = True
        of(t, *args, **kwargs)
        self.apart = False
    def of(self, learn):
        "Operators and reads of each training batch"
        rows = []
        class Begin(Callback):
            order = -1000
            def before_batch(cb): cb.learn.at = self.ops,self.reads
        class End(Callback):
            order = 1000
            def after_batch(cb):
                if cb.training: rows.append((self.ops-cb.learn.at[0],self.reads-cb.learn.at[1]))
        def apart(on): return lambda *args: setattr(self, 'apart', on)
        learn.model.register_forward_pre_hook(apart(True)), learn.model.register_forward_hook(apart(False))
        methods = patch.multiple(torch.Tensor, tolist=lambda t: self.tolist(t), backward=lambda t, *a, **kw: self.backward(t, *a, **kw))
        with self, methods: fit(learn, 1, cbs=[Begin(), End()])
        return [list(o) for o in zip(*rows)]

@counts
@pytest.mark.parametrize('to', ['to_fp16_dynamic','to_bf16_dynamic'])
@pytest.mark.parametrize('cbs', [[], [GradientNormClip(0.1)]], ids=['','clip'])
@poisoned('forward', 'backward')
def test_one_host_read_a_step(to, cbs):
    "And no step but the 1st and the 8th, whose predictions are compared with fp32's, runs anything twice; nor after a skipped batch"
    def reads(to, *bad): return Count().of(getattr(learner(n=18*16, cbs=[*cbs, *bad]), to)())[1]
    assert reads('to_fp32')==[0]*18
    n = reads(to)
    assert n[1:7]+n[8:]==[1]*16 and max(n)<=16
    n = reads(to, Poison({1}, 'backward'), Poison2({4}))
    assert [o for i,o in enumerate(n) if i not in (0,1,4,7)]==[1]*14 and max(n)<=80

class Carries(nn.Module):
    "An average in a buffer, a hidden state, a list of tensors and a number, which go from batch to batch"
    def __init__(self):
        super().__init__()
        self.lin,self.out,self.mean,self.last,self.n = nn.Linear(8,8),nn.Linear(8,1),torch.zeros(8),[torch.zeros(8)],0.
        self.register_buffer('average', torch.zeros(8))
    def forward(self, x):
        h = self.lin(x)
        if self.training:
            self.average.lerp_(h.detach().float().mean(0), 0.1)
            self.mean,self.n = h.detach().mean(0),self.n+1.
            self.last = [self.mean]
        return self.out(h+self.average)

@counts
def test_what_modules_carry_is_judged_in_the_same_read():
    "From the second step of a fit on; in the first one, predictions are compared"
    learn = learner(Carries()).to_fp16_dynamic()
    assert Count().of(learn)[1][1:]==[1]*3 and Count().of(learn)[1][1:]==[1]*3

class Poison2(Poison):
    def __init__(self, steps): super().__init__(steps, 'forward')

@counts
def test_each_attempt_reads_once():
    "A scale that is too high: in each attempt of the search, what can run again is asked besides"
    learn = learner().to_fp16_dynamic(init_scale=2.**24)
    first,*rest = Count().of(learn)[1]
    n = learn.mixed_precision.n_rerun
    assert 0<n<8 and first<=2*(n+1)+16 and rest==[1]*3

@counts
def test_at_most_30_operators_a_step():
    "However many tensors there are: all but forward and backward pass, so noting what a batch may change, loss, clipping and optimizer"
    def block(): return nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.ReLU())
    def deep(n): return nn.Sequential(nn.Linear(8,16), *[block() for _ in range(n)], nn.Linear(16,1))
    def ops(n):
        learn = learner(lambda: deep(n), cbs=GradientNormClip(1e-3)).to_fp16_dynamic(init_scale=1.)
        learn.remove_cb(learn.recorder)
        _,*ops = Count().of(learn)[0] # the first makes the optimizer's state, and learns where buffers change
        return ops
    assert ops(2)==ops(20) and max(ops(20))<=30

def test_modules_can_be_reloaded(tmp_path, in_a_process):
    code = """import importlib
import fastai_amp16.callback,fastai_amp16.learner
for m in (fastai_amp16.callback, fastai_amp16.learner): importlib.reload(m)
from common import fit,learner
mp = fit(learner().to_fp16_dynamic(), 1).mixed_precision
assert type(mp) is fastai_amp16.callback.DynamicMixedPrecision and len(mp.history)==4
"""
    in_a_process(code, tmp_path)

def test_true_gradients_after_order_10():
    "Callbacks behind us see what fp32 sees"
    class Grads(Callback):
        order = 15
        def before_step(self): self.learn.seen = [p.grad.clone() for p in self.model.parameters()]; raise CancelFitException()
    a,b = [fit(to(learner(plain_mlp, cbs=Grads())), 1).seen for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    for x,y in zip(a, b): torch.testing.assert_close(x, y, rtol=5e-3, atol=1e-3)

@pytest.mark.parametrize('kw', [dict(init_scale=0.), dict(init_scale=-2.), dict(min_scale=-1.), dict(min_scale=8., max_scale=4.),
                                dict(on_spiral='hope'), dict(patience=0), dict(patience=1.5), dict(rerun='no'), dict(keep_fp32='lin')])
def test_bad_arguments_change_nothing(kw):
    learn = learner().to_bf16_dynamic()
    before = learn.mixed_precision
    with pytest.raises(ValueError) as e: learn.to_fp16_dynamic(**kw)
    assert any(f'{k}={v!r}' in str(e.value) for k,v in kw.items()) and '\n' not in str(e.value)
    assert learn.mixed_precision is before

scaling = '`init_scale`, with `dynamic=False`'
@pytest.mark.parametrize('kw,says', [
    (dict(loss_scale=512.),scaling), (dict(max_noskip=1000),'`growth_interval`'), (dict(max_scal=2.**24),'`max_scale`'), # fastai 1
    (dict(scale_wait=500),'`growth_interval`'), (dict(max_loss_scale=2.**24),'`max_scale`'), (dict(flat_master=True),'fp32 masters'), # 2
    (dict(clip=1.),'GradientNormClip(1.)'), (dict(div_factor=2.),'`growth_factor` and `backoff_factor`'),
    (dict(enabled=False),'to_fp32()'), (dict(device='cuda'),'the model has one'), # torch
    (dict(opt_level='O1'),'to_bf16_dynamic()'), (dict(keep_batchnorm_fp32=True),'all norms'), # apex
    (dict(min_loss_scale=1.),'`min_scale`'),
    (dict(precision='16-mixed'),'to_bf16_dynamic()'), (dict(gradient_clip_val=1.),'GradientNormClip(1.)'), # Lightning
    (dict(loss_scale_window=1000),'`growth_interval`'), (dict(initial_scale_power=16),'`init_scale`, 2 to that power'), # DeepSpeed
    (dict(growth_intervall=500),'use `growth_interval`'), (dict(colour=1),'the arguments are keep_fp32, on_spiral')])
def test_a_keyword_of_others_names_ours(kw, says):
    "As a user types it; nothing changes"
    learn,(name,) = learner().to_bf16_dynamic(),kw
    before = learn.mixed_precision
    for to,who in ((learn.to_fp16_dynamic,'to_fp16_dynamic'), (DynamicMixedPrecision,'DynamicMixedPrecision')):
        with pytest.raises(TypeError) as e: to(**kw)
        text = str(e.value).replace('amp_mode, ', '')
        assert text.startswith(f'{who}() got an unexpected keyword argument {name!r}: ') and says in text
        assert '\n' not in text and text.endswith('.')
    assert learn.mixed_precision is before

@pytest.mark.parametrize('kw', [dict(loss_scale=512.), dict(init_scale=512.), dict(scale_wait=500), dict(dynamic=False)])
def test_bf16_needs_no_loss_scale(kw):
    with pytest.raises(TypeError, match=f"'{[*kw][0]}': leave it out, since bf16 needs no loss scale"): learner().to_bf16_dynamic(**kw)

def test_several_unknown_keywords_are_all_told():
    with pytest.raises(TypeError, match="'clip': .*; 'patient': use `patience`"): learner().to_bf16_dynamic(clip=1., patient=3)

def test_what_the_messages_name_exists():
    "The arguments named are arguments, and what they say to write runs"
    learn = learner().to_fp16_dynamic(init_scale=512., dynamic=False, growth_interval=500, max_scale=2.**20, min_scale=1.)
    learn.add_cb(GradientNormClip(1.))
    fit(learn.to_bf16_dynamic(keep_fp32='0', on_spiral='warn', patience=2, rerun=False).to_fp32(), 1)

@pytest.mark.parametrize('value,static', [(512,'512.0'), (1024.,'1024.0'), ('512','…')])
def test_dynamic_is_not_a_scale(value, static):
    for f in (learner().to_fp16_dynamic, partial(DynamicScaler, 'cpu')):
        with pytest.raises(ValueError) as e: f(dynamic=value)
        assert f'dynamic={value!r}' in str(e.value) and f'dynamic=False, init_scale={static}' in str(e.value)

@pytest.mark.parametrize('mode', ['fp8', None, 16])
def test_unknown_amp_mode(mode):
    with pytest.raises(ValueError, match=f"amp_mode={mode!r}.*'fp16' or 'bf16'"): DynamicMixedPrecision(mode)

@pytest.mark.parametrize('model,says', [(nn.ReLU(), 'no parameters'), (mlp().half(), 'torch.float16'),
                                        (mlp().bfloat16(), 'torch.bfloat16')], ids=['none','fp16','bf16'])
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

def test_autocast_is_that_of_the_models_device():
    "Also before and after a fit, where nobody is at work"
    learn,device = learner().to_fp16_dynamic(),default_device().type
    for _ in range(2):
        with learn.mixed_precision.autocast: assert torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)==torch.float16
        fit(learn, 1)

def test_emulated_bf16(monkeypatch):
    "The hardware is made up, the decision is not"
    from fastai_amp16.diagnosis.messages import emulates_bf16
    for capability,emulated in (((7,0),True), ((7,5),True), ((8,0),False), ((9,0),False)):
        monkeypatch.setattr('torch.cuda.get_device_capability', lambda d=None, c=capability: c)
        assert emulates_bf16(torch.device('cuda'))==emulated and not emulates_bf16(torch.device('cpu'))
    monkeypatch.setattr('fastai_amp16.diagnosis.messages.emulates_bf16', lambda d: True)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda d=None: 'Tesla T4')
    with pytest.warns(UserWarning, match='Tesla T4 .*only emulates'): fit(learner().to_bf16_dynamic(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fit(learner().to_fp16_dynamic(), 1)
