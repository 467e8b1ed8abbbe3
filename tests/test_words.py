"What a diagnosis says is true: what it names is at fault, is what stays in fp32, and computes in half precision"
import math,random,re
import pytest,torch
import torch.nn.functional as F
from fastai.basics import CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,default_device,nn,set_seed
from fastai_amp16.diagnosis.diagnose import diagnose
from fastai_amp16.precision.names import covers
from common import Do,both,clean,fit
from common import learner as small_learner
from test_diagnose import case

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

def learner(*ts, n_inp=1, model, loss_func, bs=32, lr=1e-2):
    "Three quarters of the samples are for training"
    data = list(zip(*ts))
    n = len(data)*3//4
    dls = DataLoaders(DataLoader(data[:n], bs=bs, shuffle=True), DataLoader(data[n:], bs=64), device=default_device())
    dls.n_inp = n_inp
    return Learner(dls, model, loss_func, lr=lr)

def half(to): return getattr(Learner, to)

def told(learn): return [r.warning for r in learn.mixed_precision.reports]

def consistent(learn):
    "Each sentence names what stays in fp32 and nothing else, and never says that nothing could be named"
    for r in learn.mixed_precision.reports:
        if not r.promoted: continue
        assert 'no module could be identified' not in r.sentence and 'no cause' not in r.sentence, r.warning
        kept = [o.rstrip('.') for o in r.promoted]
        assert r.producer is None or covers(r.promoted, r.producer) or r.producer in kept, r.warning

# %% data
bad = { # values, and what is said of them
    'NaN':(math.nan, 'are not finite'), 'infinity':(math.inf, 'are not finite'), 'minus infinity':(-math.inf, 'are not finite'),
    'large':(1e30, r'reach 1e\+30, which is too much for fp32,')}

def with_bad(t, value, i=3):
    t = t.clone()
    t[i] = value
    return t

@pytest.mark.parametrize('name', bad)
@pytest.mark.parametrize('where', ['inputs','targets','inputs and targets'])
def test_bad_data_is_called_what_it_is(name, where):
    value,says = bad[name]
    x,y = torch.randn(8, 8),torch.randn(8, 1)
    if 'inputs' in where: x = with_bad(x, value)
    if 'targets' in where: y = with_bad(y, value)
    r = diagnose(case(nn.Sequential(nn.Linear(8,4), nn.Linear(4,1)), x, y))
    assert re.fullmatch(f'The {where} of the batch {says} in 1 of its 8 samples: 3\\.', r.sentence) and r.samples==[3]

@pytest.mark.parametrize('name', bad)
@pytest.mark.parametrize('first', [True,False])
def test_bad_data_beside_a_clean_input(name, first):
    "In whichever order"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 1)
        def forward(self, a, b): return self.lin(a+b)
    value,says = bad[name]
    xs = with_bad(torch.randn(8, 8), value),1e3*torch.randn(8, 8)
    r = diagnose(case(Two(), xs if first else xs[::-1], torch.randn(8, 1)))
    assert re.match(f'The inputs of the batch {says} in 1 of its 8', r.sentence)

def test_data_that_is_bad_in_two_ways():
    def said(x, y):
        return diagnose(case(nn.Linear(8,1), with_bad(torch.randn(8, 8), x), with_bad(torch.randn(8, 1), y, 5))).sentence
    assert said(math.inf, 1e30)=='The inputs and targets of the batch are not finite, or too large for fp32, in 2 of its 8 samples: 3, 5.'
    assert said(1e30, math.nan)=='The targets of the batch are not finite in 1 of its 8 samples: 5.'

# %% faults that come and go
class Flaky(nn.Module):
    "Gives NaN in half precision in some of its calls, forward or backward; what counts them is not put back"
    def __init__(self, hits, backward):
        super().__init__()
        self.hits,self.backward = hits,backward
    def forward(self, x):
        if self.backward: return _FlakyGrad.apply(x, self.hits)
        return x*math.nan if x.dtype!=torch.float32 and self.hits() else x*1

class _FlakyGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hits):
        ctx.hits = hits
        return x*1
    @staticmethod
    def backward(ctx, g): return g*math.nan if g.dtype!=torch.float32 and ctx.hits() else g*1, None

def counting(f):
    "A function that returns `f(n)` in its n-th call; a batch that runs again does not put it back, as it would an iterator"
    calls = []
    def hits():
        calls.append(1)
        return f(len(calls))
    return hits

every = {f'every {k}':lambda k=k: counting(lambda n: n%k==0) for k in range(2,8)}
drawn = {f'one in {k}, seed {seed}':lambda k=k,seed=seed: counting(lambda n, r=random.Random(seed): r.random()<1/k)
         for k in (2,3) for seed in range(3)}

@both
@pytest.mark.parametrize('backward', [False,True], ids=['forward','backward'])
@pytest.mark.parametrize('n', [1,3], ids=['once','three times'])
@pytest.mark.parametrize('name', [*every,*drawn])
def test_what_fails_now_and_then(name, n, backward, to, dtype):
    "Nothing stays in fp32 for a fault that a second run does not show, and never anything else than what is at fault"
    def make():
        hits = {**every,**drawn}[name]()
        def body(): return [o for _ in range(n) for o in (Flaky(hits, backward), nn.Linear(16,16), nn.Tanh())]
        return small_learner(lambda: nn.Sequential(nn.Linear(8,16), *body(), nn.Linear(16,1)))
    fp32,learn = fit(make().to_fp32()),fit(half(to)(make()))
    mp = learn.mixed_precision
    flaky = {n for n,m in learn.model.named_modules() if isinstance(m, Flaky)}
    consistent(learn)
    assert set(mp.promoted)<=flaky, told(learn)
    if n==1 and name in every: assert not mp.promoted and not mp.reports, told(learn)
    assert mp.n_skipped==0 and float(learn.recorder.values[-1][1])==pytest.approx(float(fp32.recorder.values[-1][1]), rel=0.03)
    clean(learn)
