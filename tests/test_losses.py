"What is wrong is told by what the loss makes of it: losses of the model's own, linear ones, and those whose gradients are signs"
import math
from collections import Counter
from types import SimpleNamespace
import pytest,torch
import torch.nn.functional as F
from fastai.basics import DataLoader,DataLoaders,Learner,MSELossFlat,default_device,nn,set_seed
from fastai_amp16.all import DynamicMixedPrecision
from fastai_amp16.diagnosis.compare import far_from,nothing
from fastai_amp16.diagnosis.deviation import loss_change
from common import both,clean,few,fit,in_turn

def learner(ts, model, loss_func, n_inp=1, bs=32, **kwargs):
    "Three quarters of the samples are for training"
    items = list(zip(*ts))
    n = len(items)*3//4
    dls = DataLoaders(DataLoader(items[:n], bs=bs, shuffle=True), DataLoader(items[n:], bs=64), device=default_device())
    dls.n_inp = n_inp
    return Learner(dls, model, loss_func, lr=1e-2, **kwargs)

def beside(make, to, n):
    "The same learner in fp32 and in half precision, after `n` epochs"
    res = []
    for use in (Learner.to_fp32,to):
        set_seed(0, reproducible=True)
        res.append(fit(use(make()), n))
    return res

def valid(learn): return learn.recorder.values[-1][-1]
def half(to): return getattr(Learner, to)

# %% losses that are linear in predictions
class OwnLoss(nn.Module):
    "Returns the loss of each sample; the squares overflow in fp16, which makes zeros of what they divide"
    def __init__(self, wrap):
        super().__init__()
        self.a,self.b,self.wrap = nn.Linear(8, 32),nn.Linear(32, 1),wrap
    def forward(self, x, y):
        h = 300*self.a(x)
        h = h/(h*h).mean(1, keepdim=True).sqrt()
        return self.wrap((self.b(h)-y).square().mean(1))

own = { # what the model returns, and what makes a loss of it
    'a loss': (lambda l: l, lambda p, y: p.mean()), 'minus a likelihood': (lambda l: -l, lambda p, y: -p.mean()),
    'losses by name': (lambda l: dict(main=l, small=l/10), lambda p, y: sum(o.mean() for o in p.values())),
    'one number': (lambda l: l.mean(), lambda p, y: p)}

@pytest.mark.parametrize('name', few(own, 'minus a likelihood', 'one number'))
@pytest.mark.warns('`mul` in the code of the model itself')
def test_a_loss_of_the_models_own_is_compared(name):
    "Nothing but its value shows that it is wrong"
    wrap,loss_func = own[name]
    def make():
        x = torch.randn(256, 8)
        return learner((x, 5*x[:,:1], 5*x[:,:1]), OwnLoss(wrap), loss_func, n_inp=2)
    fp32,learn = beside(make, Learner.to_fp16_dynamic, 10)
    mp = learn.mixed_precision
    assert mp.promoted==['.'] and mp.n_skipped==0
    near = 0.15 if name=='one number' else 0.1 # which tells less, and later
    assert mp.history.reruns.any() and float(valid(learn))==pytest.approx(float(valid(fp32)), rel=near)
    clean(learn)

class Coarse(nn.Module):
    "Numbers fall together in half precision"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 1)
    def forward(self, x): return self.b(torch.tanh((self.a(x)+3000.)-3000.))

linear = {'critic': lambda p, y: -(p*y.sign()).mean(), 'L1': F.l1_loss, 'Huber': F.smooth_l1_loss,
          'hinge': lambda p, y: F.relu(1-p*y.sign()).mean(), 'pinball': lambda p, y: torch.maximum(0.9*(y-p), 0.1*(p-y)).mean()}

@pytest.mark.parametrize('loss_func', [nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()])
@pytest.mark.warns('`2` .Linear. gives numbers up to')
def test_infinite_predictions_are_no_step_though_all_gradients_are_finite(loss_func):
    "Gradients are signs, so they are finite where a prediction overflows; every loss is fp32's"
    def make():
        x = torch.randn(1024, 8)
        return learner((4000*x, 1e6*x[:,:1]), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), loss_func)
    fp32,learn = beside(make, Learner.to_fp16_dynamic, 3)
    mp = learn.mixed_precision
    assert mp.promoted==['2'] and mp.n_skipped==0 and float(valid(learn))==pytest.approx(float(valid(fp32)), rel=1e-3)
    assert torch.stack(learn.recorder.losses).tolist()==pytest.approx(torch.stack(fp32.recorder.losses).tolist(), rel=1e-3)
    clean(learn)

@both
def test_a_step_of_a_loss_that_is_infinite_in_fp32_as_well_is_taken(to, dtype):
    "The infinite targets of a few samples leave the gradients finite: they count as in fp32, without a word"
    def make():
        x = torch.randn(256, 8)
        y = x[:,:1].clone()
        y[::50] = math.inf
        return learner((x, y), nn.Linear(8, 1), nn.L1Loss())
    fp32,learn = beside(make, half(to), 3)
    mp = learn.mixed_precision
    assert len(mp.history)==3*6 and mp.n_skipped==0 and mp.history.reruns.astype(bool).sum()==1 and not mp.reports and not mp.promoted
    torch.testing.assert_close(learn.model.weight, fp32.model.weight, rtol=0.02, atol=0.02)
    clean(learn)

@in_turn(linear)
@pytest.mark.warns('`add` in the code of the model itself')
def test_losses_with_constant_gradients(name, to, dtype):
    def make():
        x = torch.randn(256, 8)
        return learner((x, 2*x[:,:1]), Coarse(), linear[name])
    fp32,learn = beside(make, half(to), 4)
    assert learn.mixed_precision.promoted==['.']
    assert float(valid(learn))==pytest.approx(float(valid(fp32)), rel=0.1, abs=0.02)

# %% gradients that are signs
class Forecast(nn.Module):
    "Three quantiles of the next numbers"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Linear(2, 16),nn.LSTM(16, 16, batch_first=True),nn.Linear(16, 3)
    def forward(self, x):
        h = self.rnn(self.emb(x))[0]
        mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).triu(1)
        a = (h@h.transpose(1, 2)/4).float().masked_fill(mask, -1e9).to(h)
        return self.out(a.softmax(-1)@h)[:,-4:]

def quantiles(p, y):
    q,e = torch.tensor([0.1,0.5,0.9], device=p.device),y[...,None]-p
    return torch.maximum(q*e, (q-1)*e).sum(-1).mean()
def median(p, y): return F.l1_loss(p[...,1], y)

@both
@pytest.mark.parametrize('loss_func', [quantiles,median])
@pytest.mark.parametrize('seed', few([0,1,3], 0))
def test_signs_that_flip_near_the_targets_are_no_fault(loss_func, seed, to, dtype):
    set_seed(seed, reproducible=True)
    t = torch.arange(20)[None]+6*torch.rand(256, 1)
    s = (t*0.6).sin()+0.1*torch.randn(256, 20)
    learn = learner((torch.stack([s[:,:16],t[:,:16]/20], -1), s[:,16:]), Forecast(), loss_func)
    mp = fit(half(to)(learn), 6).mixed_precision
    assert isinstance(mp, DynamicMixedPrecision) and not mp.promoted and not mp.reports

class Gated(nn.Module):
    "Squeeze-and-excitation, whose gate hardly moves from 0.5 at first"
    def __init__(self, n):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(n, n//4), nn.ReLU(), nn.Linear(n//4, n), nn.Sigmoid())
        nn.init.zeros_(self.gate[0].bias)
        nn.init.normal_(self.gate[2].weight, std=0.02)
        nn.init.zeros_(self.gate[2].bias)
    def forward(self, x): return x*self.gate(x)

@both
@pytest.mark.parametrize('seed', few([1,5,7], 1))
def test_few_values_in_a_statistic_are_no_fault(seed, to, dtype):
    "Batch norms over 8 values make much of rounding"
    set_seed(seed, reproducible=True)
    x,y = torch.randn(64, 8),torch.randn(64, 10)*0.5+torch.linspace(-1, 1, 10)
    dls = DataLoaders(*(DataLoader([*zip(x, y)], bs=bs, shuffle=bs==8) for bs in (8,64)), device=default_device())
    blocks = [o for n in [8,*[32]*8] for o in (nn.Linear(n, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), Gated(32))]
    learn = Learner(dls, nn.Sequential(*blocks, nn.Linear(32, 10)), F.mse_loss, lr=1e-3)
    assert not fit(half(to)(learn), 3).mixed_precision.reports

# %% levels
def iou(a, b):
    "Of boxes as left, top, right and bottom"
    def area(o): return (o[:,2:]-o[:,:2]).clamp(min=0).prod(1)
    both = area(torch.cat([torch.maximum(a[:,:2], b[:,:2]), torch.minimum(a[:,2:], b[:,2:])], 1))
    return both/(area(a)+area(b)-both)

class Boxes(nn.Module):
    "Moves boxes, and compares them in the precision of its layers"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 32),nn.Linear(32, 4)
    def forward(self, x, y):
        move = self.b(self.a((x-320)/40).relu())
        return 1-iou(x.to(move)+move, y.to(move))

@pytest.mark.warns('in the code of the model itself')
@pytest.mark.cpu_only('the loss rises by a few percent only, which is found in some draws of numbers')
def test_what_is_wrong_in_all_samples_alike():
    "The overlap of boxes near 320, where bf16 has steps of 2"
    def make():
        centre,size = 320+40*torch.rand(256, 2),10+20*torch.rand(256, 2)
        y = torch.cat([centre-size/2,centre+size/2], 1)
        return learner((y+2*torch.randn(256, 4), y, y), Boxes(), lambda p, y: p.mean(), n_inp=2)
    fp32,learn = beside(make, Learner.to_bf16_dynamic, 3)
    assert learn.mixed_precision.promoted==['.'] and float(valid(learn))==pytest.approx(float(valid(fp32)), rel=0.05)

@both
@pytest.mark.warns('`2` .Linear. computes with numbers up to')
def test_where_all_targets_are_one_number(to, dtype):
    "Then rounding this number is most of what is left of the loss"
    def make():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad(): model[2].bias.fill_(499.)
        return learner((torch.randn(256, 8), torch.full((256, 1), 500.)), model, MSELossFlat())
    fp32,learn = beside(make, half(to), 10)
    assert learn.mixed_precision.promoted==['2'] and float(valid(learn))<1.3*float(valid(fp32))

class Denormalizes(nn.Module):
    "A forecast, brought back to the level of its series in its own code"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(16, 32),nn.Linear(32, 4)
    def forward(self, x):
        mean,std = x.mean(1, keepdim=True),x.std(1, keepdim=True)
        h = self.b(self.a((x-mean)/std).relu())
        return h*std.to(h)+mean.to(h)

@both
@pytest.mark.warns('the code of the model')
def test_arithmetic_of_the_models_own_code_is_named(to, dtype):
    def make():
        t = torch.arange(20)[None]+6*torch.rand(256, 1)
        s = 1000+10*torch.rand(256, 1)+3*(t*0.6).sin()
        return learner((s[:,:16], s[:,16:]), Denormalizes(), MSELossFlat())
    fp32,learn = beside(make, half(to), 6)
    mp = learn.mixed_precision
    assert mp.promoted==['.'] and 'the code of the model' in mp.reports[0].warning and 'identified' not in mp.reports[0].warning
    assert float(valid(learn))==pytest.approx(float(valid(fp32)), rel=0.1)

# %% state, and what is called how often
class Gate(nn.Module):
    "Opens after 300 batches, counted in the precision of its layers"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 1)
        self.register_buffer('n', torch.tensor(250.))
    def forward(self, x):
        h = self.a(x).relu()
        if self.training: self.n = (self.n+1).to(h.dtype)
        return self.b(h)*(1+(self.n>300))

@pytest.mark.warns('The change of `n`')
def test_a_count_that_stops_goes_on():
    "At 256, the next number of bf16 is 258"
    def make():
        x = torch.randn(256, 8)
        return learner((x, x[:,:1]), Gate(), MSELossFlat())
    fp32,learn = beside(make, Learner.to_bf16_dynamic, 12)
    mp = learn.mixed_precision
    assert mp.promoted==['.'] and 'The change of `n`' in mp.reports[0].warning and mp.reports[0].sentence.count('identified')==0
    assert fp32.model.n==322 and learn.model.n==322-1 and learn.model.n.dtype==torch.float32 # it stood in step 7

class Remembers(nn.Module):
    "Writes to a weight of its own; `called` is told of each call"
    def __init__(self, called):
        super().__init__()
        self.called = called
        self.a,self.b,self.mean = nn.Linear(8, 8),nn.Linear(8, 1),nn.Parameter(torch.zeros(8))
    def forward(self, x):
        self.called()
        h = self.a(x)
        self.mean.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.b(h-self.mean)

def test_with_everything_in_fp32_nothing_is_compared():
    "A loss function that counts its calls, and a model that writes to its weights, end as in fp32"
    n = Counter()
    def loss(p, y):
        n['calls'] += 1
        return F.mse_loss(p, y)*(1+0.1*(n['calls']%3))
    def make():
        n.clear()
        x = torch.randn(256, 8)
        return learner((x, x[:,:1]), Remembers(lambda: n.update(['passes'])), loss)
    fp32,learn = beside(make, lambda l: l.to_fp16_dynamic(keep_fp32=['.','a','b']), 3)
    assert torch.equal(learn.model.mean, fp32.model.mean) and valid(learn)==valid(fp32) and n==dict(calls=3*7, passes=3*7)

def test_infinities_that_are_meant_cost_one_call():
    "Masked logits, in a validation; predictions after it cost none"
    calls = []
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 5)
        def forward(self, x):
            calls.append(1)
            return torch.cat([self.a(x)[:,:4],torch.full((len(x),1), -math.inf, device=x.device)], 1)
    set_seed(0)
    x = torch.randn(1024, 8)
    learn = learner((x, x[:,:4].argmax(1)), Masks(), F.cross_entropy).to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging():
        learn.validate()
        assert len(calls)==4+1
        learn.get_preds()
    assert len(calls)==4+1+4 and not learn.mixed_precision.reports

# %% the measure
def test_a_loss_that_is_off_is_wrong_where_no_sample_is():
    "Each by a fifth of what differs from sample to sample, in one direction; not if that is as often the other one"
    torch.manual_seed(0)
    y,sign = 1+0.9*torch.randn(256, 1),torch.ones(256, 1)
    learn = SimpleNamespace(loss_func=lambda p, y: p.mean(), yb=(y,))
    def run(pred): return SimpleNamespace(dtype=torch.float16, pred=pred, states={})
    def wrong(sign): return far_from(learn, run(y+0.2*sign), run(y), {}).exceeds(nothing)
    assert wrong(sign) and not wrong(torch.cat([sign[:128],-sign[128:]]))

def test_what_a_loss_makes_of_a_difference():
    "Beside the same in float64; in chunks, it is the same"
    torch.manual_seed(0)
    p,y,d = torch.randn(64, 5),torch.randn(64, 5),0.1*torch.randn(64, 5)
    learn = SimpleNamespace(loss_func=F.mse_loss, yb=(y,))
    c,res,d64 = loss_change(learn, p+d, p),(p-y).double(),d.double()
    loss = res.square().mean().item()
    assert c.bend==pytest.approx(d64.square().mean().item()/loss, rel=1e-3)
    assert c.rise==pytest.approx((F.mse_loss(p+d, y)-F.mse_loss(p, y)).item()/loss, rel=1e-3)
    assert c.chance==pytest.approx((2*res*d64/d.numel()).sum(1).norm().item()/loss, rel=1e-3)
    learn.loss_func = lambda p, y: (3*p).mean()
    c = loss_change(learn, p+d, p)
    assert c.bend<1e-6 and c.rise==pytest.approx((3*d.mean()/abs(3*p.mean())).item(), rel=1e-2)
    learn.loss_func = lambda p, y: p.missing
    assert loss_change(learn, p+d, p) is None
