"A batch runs again without a trace, the verdict on it is right, and what was promoted is needed, is enough and stays"
import copy,math,pickle,random,re,warnings
import numpy as np
import pytest,torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from fastai.basics import Callback,Learner,SGD,load_learner,nn,set_seed
from fastai.callback.training import GradientAccumulation
from fastai_amp16.all import AdamW16,PrecisionReport
from fastai_amp16.diagnose import Batch,Case,diagnose,first_bad,heal,replay,untouched
from fastai_amp16.precision import PrecisionPlan
import hostile
from hostile import zoo
from common import Detour,Poison,clean,equal,fit,learner,mse,state,weights

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

# %% no trace
class Stateful(nn.Module):
    "All that a forward pass may change: statistics, counts, a hidden state, a list, a parameter, random numbers from everywhere"
    def __init__(self):
        super().__init__()
        self.inp,self.bn,self.drop,self.rnn,self.out = nn.Linear(8,16),nn.BatchNorm1d(16),nn.Dropout(0.3),nn.GRU(16,16),nn.Linear(16,1)
        self.sn = nn.utils.parametrizations.spectral_norm(nn.Linear(16,16))
        self.register_buffer('calls', torch.zeros(()))
        self.ema,self.seen,self.h,self.gen = nn.Parameter(torch.zeros(16), requires_grad=False),[],torch.zeros(1,16),torch.Generator().manual_seed(0)
        self.inp.register_forward_hook(self.hook)
    def hook(self, m, x, y): self.seen.append(float(y.detach().float().mean()))
    def forward(self, x):
        self.calls += 1
        x = self.drop(self.bn(self.inp(x)))+1e-3*(random.random()+np.random.rand()+torch.rand((), generator=self.gen))
        y,self.h = self.rnn(x, self.h.detach())
        with torch.no_grad(): self.ema.mul_(0.9).add_(y.float().mean(0))
        return self.out(checkpoint(self.sn, y+self.ema, use_reentrant=False))

class Restless(Callback):
    "A callback that counts what it sees and adds to the loss"
    order = 20
    def __init__(self): self.n,self.log,self.avg = 0,[],torch.zeros(1)
    def after_pred(self): self.n += 1
    def after_loss(self):
        self.log.append(self.n)
        self.avg += 1
        self.learn.loss_grad = self.learn.loss_grad+1e-4*self.learn.pred.pow(2).mean()

def everything(learn):
    "Values of all that a replay could have touched, and the identities of what hangs on learner, model and callbacks"
    owners = [learn, *learn.cbs, *learn.model.modules()]
    ids = [{k: id(v) for k,v in vars(o).items()} for o in owners]
    inner = [{k: (list(v.items()) if isinstance(v, dict) else list(v)) for k,v in vars(o).items() if type(v) in (dict,list)} for o in learn.model.modules()]
    ts = [t.detach().clone() for t in (*learn.model.parameters(), *learn.model.buffers(), learn.model.h, *(p.grad for p in learn.model.parameters() if p.grad is not None))]
    hooks = [len(h) for m in learn.model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    hooks += [len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)]
    rng = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), learn.model.gen.get_state().tolist()]
    flags = [torch.is_autocast_enabled('cpu'), torch.is_grad_enabled(), [m.training for m in learn.model.modules()], [p.requires_grad for p in learn.model.parameters()]]
    return ids,str(inner),hooks,rng,flags,ts

def same(a, b): return a[:-1]==b[:-1] and equal(a[-1], b[-1])

@pytest.mark.parametrize('half', [None, PrecisionPlan], ids=['fp32','fp16'])
@pytest.mark.parametrize('fails', [None,'forward','loss','after_pred','backward'])
def test_no_trace(half, fails):
    learn = fit(learner(Stateful, cbs=Restless()).to_fp16_dynamic(), 1)
    learn.xb,learn.yb,learn.training = (torch.randn(4,8),),(torch.randn(4,1),),True
    learn.model.train()
    for p in learn.model.parameters(): p.grad = torch.randn_like(p) if p.requires_grad else None
    def fail(*args): raise ValueError('now')
    if fails=='forward': learn.model.out.register_forward_pre_hook(fail)
    if fails=='backward': learn.model.sn.register_forward_hook(lambda m,x,y: y.register_hook(fail) and None)
    if fails=='loss': learn.loss_func = fail
    if fails=='after_pred': learn.restless.after_pred = fail
    before = everything(learn)
    run = replay(learn, Batch.of(learn), half, inside=lambda n: True)
    assert same(before, everything(learn))
    assert (run.error is None)==(fails is None) and (fails is None or 'now' in str(run.error))
    with untouched(learn), pytest.raises(KeyboardInterrupt):
        learn.model.bn(learn.model.inp(torch.randn(4,8))).sum().backward()
        learn.restless.log.append(9), learn.restless.avg.add_(1)
        raise KeyboardInterrupt()
    assert same(before, everything(learn))

def test_a_ctrl_c_at_any_line_leaves_no_trace():
    import sys,fastai_amp16.diagnose as d
    learn = fit(learner(Stateful).to_fp16_dynamic(), 1)
    learn.xb,learn.yb,learn.training = (torch.randn(4,8),),(torch.randn(4,1),),True
    before,n = everything(learn),0
    def run(k):
        "Interrupted at the `k`-th line of diagnose.py"
        count = 0
        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename!=d.__file__: return None
            if event=='line':
                count += 1
                if count==k: raise KeyboardInterrupt()
            return trace
        sys.settrace(trace)
        try: replay(learn, Batch.of(learn), PrecisionPlan)
        finally: sys.settrace(None)
    for k in range(1, 3000, 61):
        try: run(k)
        except KeyboardInterrupt: n += 1
        assert same(before, everything(learn)), k
    assert n>20

class Replaying(Callback):
    "Has the batch run again at each event of some order"
    def __init__(self, order, which): self.order,self.which,self.n = order,which,0
    def again(self):
        if not self.training or (self.learn._replaying and self.which!='diagnose_fp16'): return
        self.n += 1
        if self.which=='replay': [replay(self.learn, Batch.of(self.learn), plan, 4.) for plan in (None,PrecisionPlan)]
        elif self.which=='diagnose_fp16': self.learn.diagnose_fp16()
        else: heal(c) if diagnose(c:=Case(self.learn, Batch.of(self.learn), scale=1e9)).verdict!='healthy' else None
for event in ('before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'):
    setattr(Replaying, event, Replaying.again)

@pytest.mark.parametrize('which', ['replay','diagnose_fp16','heal'])
@pytest.mark.parametrize('order', [-5, 99])
@pytest.mark.parametrize('to', ['to_fp32','to_fp16_dynamic'])
def test_a_fit_with_replays_is_bit_identical_to_one_without(to, order, which):
    def run(*cbs):
        learn = getattr(learner(Stateful, n=32, cbs=[Restless(), *cbs], opt_func=AdamW16), to)()
        fit(learn, 2)
        return learn
    a,b = run(),run(again:=Replaying(order, which))
    assert again.n==4*8 and equal(state(a), state(b)) and a.recorder.values[-1][:2]==b.recorder.values[-1][:2]
    assert a.restless.log==b.restless.log and a.model.seen==b.model.seen and torch.equal(a.restless.avg, b.restless.avg)
    if to!='to_fp32': assert a.mixed_precision.history.equals(b.mixed_precision.history)
    clean(b)

# %% verdicts
def case(model, x=None, y=None, loss_func=None, scale=2.**16, min_scale=2.**-14, keep_fp32=None, dtype=torch.float16, **kwargs):
    learn = learner(model, loss_func=loss_func, **kwargs)
    learn.create_opt()
    learn.training = learn.model.train().training
    x = torch.randn(8,8) if x is None else x
    return Case(learn, Batch((x,), (torch.randn(8,1) if y is None else y,)), keep_fp32, dtype, scale, min_scale)

def mlp(*mid): return lambda: nn.Sequential(nn.Linear(8,16), *mid, nn.Linear(16,1))
class Do(nn.Module):
    "`f`, named like a module of the user's"
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

def with_nan(t, *at):
    t = t.clone()
    for i in at: t[i] = math.nan
    return t

def poisoned():
    model = mlp(nn.ReLU())()
    with torch.no_grad(): model[2].weight[0,3] = math.inf
    return model

class Aux(nn.Module):
    "The loss function uses an activation, in half precision"
    def __init__(self):
        super().__init__()
        self.lin,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x):
        self.aux = self.lin(x)*400
        return self.out(self.aux/400)
class AuxLoss:
    def __call__(self, p, t): return mse(p, t)+1e-9*self.model.aux.pow(2).mean()

def rms(x):
    x = 1e3*x
    return x*torch.rsqrt((x*x).mean(-1, keepdim=True))

def norm_of_zero(x): return x*torch.sqrt((x*0).pow(2).sum())

verdicts = dict(
    weights=(lambda: case(poisoned), 'weights', '2', None, r'2\.weight \(1 of 16 numbers\)'),
    inputs=(lambda: case(mlp(nn.ReLU()), with_nan(torch.randn(8,8), 2, 5)), 'data', None, None, r'inputs .* in 2 of its 8 samples: 2, 5\.'),
    targets=(lambda: case(mlp(nn.ReLU()), y=with_nan(torch.randn(8,1), 7)), 'data', None, None, r'targets .* in 1 of its 8 samples: 7\.'),
    divergence=(lambda: case(mlp(Do(lambda x: x*1e30), Do(lambda x: x*1e30)), lr=0.5), 'divergence', '2', None, r'not finite in fp32 either, first in 2 \(Do\).*learning rate 0\.5'),
    singular=(lambda: case(mlp(Do(norm_of_zero))), 'divergence', '1', None, r'backward pass is not finite in fp32 either, first in 1 \(Do\)'),
    scale=(lambda: case(mlp(nn.ReLU()), loss_func=lambda p,t: 1e4*mse(p, t)), 'scale', None, None, r'65536 is too high .* fits'),
    forward=(lambda: case(mlp(Do(lambda x: x*1e6), Do(lambda x: x*1e-6))), 'forward', '1', 'mul', r'`mul` in 1 \(Do\) gives numbers up to .*65504'),
    intermediate=(lambda: case(mlp(Do(lambda x: x*1e6/1e6))), 'forward', '1', 'mul', r'`mul` in 1 \(Do\)'),
    underflow=(lambda: case(mlp(Do(lambda x: x/(x.detach()*0+1e-9)*1e-9))), 'forward', '1', 'div', r'`(true)?div` in 1 \(Do\)'),
    raises=(lambda: case(mlp(Do(lambda x: x.masked_fill(x>1, -1e9).clamp(min=-1)))), 'forward', '1', 'masked_fill', r'`masked_fill` in 1 \(Do\) raises in float16'),
    backward=(lambda: case(mlp(Do(lambda x: torch.sqrt((x*1e-5)**2+1e-12)*1e5))), 'backward', '1', 'sqrt', r'derivative of `sqrt` in 1 \(Do\)'),
    silent=(lambda: case(mlp(Do(rms)), scale=1.), 'forward', '1', 'mul', r'finite numbers of that, wrong ones'),
    loss=(lambda: case(Aux, loss_func=AuxLoss()), 'loss', None, 'pow', r'`pow` in the loss function'),
    healthy=(lambda: case(mlp(nn.ReLU())), 'healthy', None, None, r'Everything is finite in float16 at the loss scale 65536\. The least room is in'),
)

@pytest.mark.parametrize('name', verdicts)
def test_verdict(name):
    make,verdict,producer,op,sentence = verdicts[name]
    set_seed(0)
    c = make()
    if name=='loss': c.learn.loss_func.model = c.model
    before = state(c.learn)
    r = diagnose(c, inside=(lambda n: True) if name=='silent' else None)
    assert (r.verdict,r.producer)==(verdict,producer) and re.search(sentence, r.sentence), r
    assert op is None or r.op in (op,'true'+op)
    assert str(r).startswith(f'{verdict}: ') and r.sentence in str(r) and (verdict=='healthy' or r.remedy in str(r)) and equal(before, state(c.learn))
    if name in ('inputs','targets'): assert r.samples==([2,5] if name=='inputs' else [7])
    if verdict=='scale':
        assert c.run(scale=r.new_scale).finite and r.new_scale>=2**-14 and not c.run(scale=r.new_scale*64).finite
    if verdict in ('forward','backward','loss'):
        promoted,scale = heal(c)
        assert c.sound(c.run(promoted, scale)) and promoted==['.' if name=='loss' else producer]
