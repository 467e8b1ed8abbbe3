"What a diagnosis says is true: what it names is at fault, is what stays in fp32, and computes in half precision"
import itertools,math,random,re,warnings
import pytest,torch
import torch.nn.functional as F
from fastai.basics import Callback,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,default_device,nn,noop,partial,set_seed
from fastai_amp16.all import PrecisionWarning
from fastai_amp16.diagnosis.diagnose import diagnose
from fastai_amp16.diagnosis.report import code_hint
from fastai_amp16.precision.names import covers
from common import both,clean,fit,slow
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
    assert re.fullmatch(f'The {where} of the batch {says} in 1 of its 8 samples \\(index 3\\)\\.', r.sentence) and r.samples==[3]

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
    both = 'The inputs and targets of the batch are not finite, or too large for fp32, in 2 of its 8 samples (indices 3, 5).'
    assert said(math.inf, 1e30)==both
    assert said(1e30, math.nan)=='The targets of the batch are not finite in 1 of its 8 samples (index 5).'

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

every = {f'every {k}':lambda k=k: counting(lambda n: n%k==0) for k in (2,3,5,7)}
def in_one_of(k, seed):
    draw = random.Random(seed).random
    return counting(lambda n: draw()<1/k)
drawn = {f'one in {k}, seed 0': partial(in_one_of, k, 0) for k in (2,3)}
often = [*itertools.product([*every,*drawn], [1,3], [False,True], ['to_fp16_dynamic','to_bf16_dynamic'])]

# a fifth has each name, and with different ones each number, pass and precision
@pytest.mark.parametrize('name,n,backward,to', [pytest.param(*o, marks=() if i%5==0 else slow) for i,o in enumerate(often)])
def test_what_fails_now_and_then(name, n, backward, to):
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
    # a loss scale answers gradients that overflow: where three of four passes do, it falls until gradients become 0
    if mp.history.loss_scale.min()<2**-10: return
    assert mp.n_skipped==0 and float(learn.recorder.values[-1][1])==pytest.approx(float(fp32.recorder.values[-1][1]), rel=0.03)
    clean(learn)

# %% what is named
class Trend(nn.Module):
    "Adds what follows a level to the level"
    def __init__(self):
        super().__init__()
        self.level,self.f = nn.Linear(1,1),nn.Sequential(nn.Linear(16,32), nn.ReLU(), nn.Linear(32,4))
        nn.init.ones_(self.level.weight)
        nn.init.zeros_(self.level.bias)
    def forward(self, x): return self.f(x-x[:,-1:])+self.level(x[:,-1:])

@pytest.mark.parametrize('level', [1500,300])
def test_what_is_kept_is_named_and_not_the_loss_that_computes_in_fp32(level):
    set_seed(0, reproducible=True)
    t = torch.arange(20.)[None]+6*torch.rand(512, 1)
    s = level*(1+.05*torch.randn(512, 1))+(t*.6).sin()
    learn = fit(learner(s[:,:16], s[:,16:], model=Trend(), loss_func=nn.MSELoss(), lr=3e-3).to_bf16_dynamic(), 15)
    reports = learn.mixed_precision.reports
    assert reports and all(r.promoted for r in reports)
    consistent(learn)
    for r in reports: assert 'mse_loss' not in r.sentence and r.sentence.startswith('bfloat16 is too coarse for what'), r

class Nearest(nn.Module):
    "The product is rounded, and what comes after it is in fp32"
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)
    def forward(self, x):
        xx = x.square().sum(-1)
        return self.a((2*x@x.transpose(1, 2)-xx[:,:,None]-xx[:,None]).topk(4, -1).values).mean(1)

@both
def test_numbers_that_are_named_are_in_half_precision(to, dtype):
    set_seed(0, reproducible=True)
    x = 4*torch.randn(96, 16, 3)+torch.tensor([80.,-60.,20.])
    y = torch.cdist(x, x).topk(2, largest=False).values[...,1].mean(1, keepdim=True)
    mp = fit(half(to)(learner(x, y, model=Nearest(), loss_func=nn.MSELoss()))).mixed_precision
    said = mp.reports[0].sentence
    assert mp.promoted==['.'] and 'topk' not in said
    steps = re.search('up to ([^,]*), which .* in steps of ([0-9.]*[0-9])', said) # those that are too coarse
    assert 'is too coarse for what' in said or (float(steps[1])>1e4 and float(steps[2])>=8), said

class Inner(nn.Module):
    "Calls a head; its own code is at fault"
    def __init__(self):
        super().__init__()
        self.head,self.out = nn.Linear(8, 8),nn.Linear(8, 1)
    def forward(self, x):
        h = self.head(x)
        return self.out((h+3000.)-3000.)

@both
def test_what_the_code_of_the_model_rounds(to, dtype):
    set_seed(0, reproducible=True)
    x = torch.randn(256, 8)
    learn = fit(half(to)(learner(x, x[:,:1], model=Inner(), loss_func=nn.MSELoss())), 1)
    r, = learn.mixed_precision.reports
    consistent(learn)
    assert r.promoted==['.'] and '`add` in the code of the model itself' in r.sentence and r.hint==''

# %% infinite predictions
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)
    def forward(self, x, m):
        h = self.a(x)
        return h+(1-m.to(h.dtype))*-1e8 # actions that are not allowed

class Exp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 1)
    def forward(self, x): return (1+self.a(x).abs())*1e5

class Never(nn.Module):
    "The last class never occurs"
    def __init__(self, level=0.):
        super().__init__()
        self.a,self.level = nn.Linear(8, 3),level
    def forward(self, x):
        h = self.a(x)
        return torch.cat([h[:,:2]+self.level-self.level, -1e6*(1+h[:,2:].abs())], 1)

def masked():
    x,m = torch.randn(256, 8),torch.ones(256, 4)
    y = x[:,:4].argmax(1)
    m[torch.arange(256),(y+1)%4] = 0
    return learner(x, m, y, n_inp=2, model=Masked(), loss_func=CrossEntropyLossFlat())

def clamped():
    x = torch.randn(256, 8)
    return learner(x, x[:,:1], model=Exp(), loss_func=lambda p,y: F.l1_loss(p.clamp(max=10.), y))

def never(level=0.):
    x = torch.randn(256, 8)
    return learner(x, (x[:,0]>0).long(), model=Never(level), loss_func=CrossEntropyLossFlat())

infinite = {'mask':masked, 'clamp':clamped, 'a class that never occurs':never, 'two faults':partial(never, 2000.)}

def predictions(learn):
    with learn.no_bar(): return learn.get_preds(act=noop)[0]

@both
@pytest.mark.parametrize('trained', [True,False], ids=['fit','predictions alone'])
@pytest.mark.parametrize('name', infinite)
def test_predictions_that_only_half_precision_makes_infinite(name, trained, to, dtype):
    "Though the loss is finite; said once, as it is"
    set_seed(0, reproducible=True)
    learn = half(to)(infinite[name]())
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        if trained: fit(learn)
        assert predictions(learn).isfinite().all()
    said = [str(o.message) for o in w if o.category is PrecisionWarning]
    if dtype==torch.bfloat16: assert not said or name=='two faults'
    else:
        assert len(said)==1 and learn.mixed_precision.promoted==['.'], said
        assert "are infinite or NaN where fp32's are finite" in said[0] and 'into finite numbers' not in said[0]
        assert learn.diagnose_fp16().verdict=='healthy' # with what is kept
    if trained: clean(learn)

@both
def test_a_mask_that_is_infinite_in_fp32_as_well_is_no_fault(to, dtype):
    class Own(Masked):
        def forward(self, x, m): return self.a(x).masked_fill(m==0, -math.inf)
    set_seed(0, reproducible=True)
    learn = masked()
    learn.model = Own()
    fit(half(to)(learn))
    assert predictions(learn).isinf().any() and not learn.mixed_precision.reports and not learn.mixed_precision.n_rerun

class Apart(nn.Module):
    "An infinity that a sigmoid makes 1, as it should be, beside a level that takes all bits"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 1)
    def forward(self, x):
        h = self.a(x)
        one = (h.abs()*1e6+1e6).sigmoid()
        return self.b((h+2000.-2000.)*one)

def test_an_infinity_that_does_no_harm_is_not_blamed_for_another_fault():
    set_seed(0, reproducible=True)
    x = torch.randn(256, 8)
    learn = fit(learner(x, x[:,:1], model=Apart(), loss_func=nn.MSELoss()).to_fp16_dynamic(), 1)
    r, = learn.mixed_precision.reports
    assert '`add` in the code' in r.sentence and '2002' in r.sentence and 'into finite numbers' not in r.sentence, r

# %% hints
class Filled(nn.Module):
    "Puts a layer's result where a tensor in fp32 waits for it"
    def __init__(self, f):
        super().__init__()
        self.a,self.f = nn.Linear(8, 8),f
    def forward(self, x): return self.f(self, x)[:,:1]

def filled(m, x):
    out = torch.zeros(len(x), 8, device=x.device)
    out[torch.arange(len(x), device=x.device)] = m.a(x)
    return out

def of_index(m, x):
    i = (4-1e-6*torch.ones_like(m.a(x))).long() # 3, or 4 where 1e-6 is nothing beside 4
    return m.a(x).float().gather(1, i+4)

def said_of(f, to):
    set_seed(0, reproducible=True)
    x = torch.randn(256, 8)
    learn = fit(half(to)(learner(x, x[:,:1], model=Filled(f), loss_func=nn.MSELoss())), 1)
    return learn.mixed_precision.reports[0].warning

@both
def test_a_hint_follows_what_is_the_matter(to, dtype):
    said = said_of(filled, to)
    assert 'raises in' in said and '.to(x.dtype)' in said and 'finfo' not in said

@both
@pytest.mark.cpu_only('a wrong index ends all work on a GPU')
def test_a_hint_at_an_index_that_is_rounded(to, dtype):
    rounded = said_of(of_index, to)
    assert re.search('out of bounds.*, since an index comes from a number that b?float16 rounds', rounded), rounded

def test_a_hint_for_each_matter():
    assert code_hint('matmul') and not code_hint('matmul', 'coarse') and not code_hint('div', 'coarse')
    assert 'float()' in code_hint('var', 'coarse') and 'float()' in code_hint('sum', 'coarse')
    assert '.to(x.dtype)' in code_hint('matmul', 'dtypes')==code_hint('relu', 'dtypes') and not code_hint('gather', 'raises')

# %% what cannot run again
class Shrinks(Callback):
    "Writes to a weight between forward and backward pass"
    def after_loss(self):
        if self.training: self.model.b.weight.data.mul_(0.9)

class Words(nn.Module):
    def __init__(self, large):
        super().__init__()
        self.emb,self.large = nn.Embedding(20, 8),large
        self.a,self.b = nn.Linear(24, 32),nn.Linear(32, 1)
    def forward(self, x):
        h = self.a(self.emb(x).flatten(1)).relu()
        return self.b(1e3*h*(1e3*h)/1e6) if self.large else self.b(h)

@pytest.mark.parametrize('large', [True,False], ids=['forward','gradients'])
def test_a_lower_scale_is_advised_only_where_it_helps(large):
    set_seed(0, reproducible=True)
    x = torch.randint(20, (256, 3))
    y = torch.randn(256, 1)*(1 if large else 1e4)
    learn = learner(x, y, model=Words(large), loss_func=nn.MSELoss()).add_cb(Shrinks())
    with pytest.warns(PrecisionWarning, match='could not run again') as w: fit(learn.to_fp16_dynamic(), 1)
    said, = [str(o.message) for o in w if 'could not run again, because' in str(o.message)]
    assert ('init_scale' in said)!=large and ('which no loss scale avoids' in said)==large

# %% slow
class Solver(nn.Module):
    "Iterates until it changes no more"
    def __init__(self):
        super().__init__()
        self.inp,self.f,self.out = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(8, 1)
        nn.init.orthogonal_(self.f.weight, 0.5)
    def forward(self, x):
        x = self.inp(x)
        z = torch.zeros_like(x, dtype=torch.float32)
        for _ in range(60):
            new = torch.tanh(self.f(z)+x).float()
            if (new-z).abs().max()<1e-4: break
            z = (z+new)/2
        return self.out(new)

def test_a_solver_that_takes_longer_is_told_of():
    set_seed(0, reproducible=True)
    x = torch.randn(256, 8)
    learn = learner(x, x[:,:1], model=Solver(), loss_func=nn.MSELoss())
    r = learn.to_bf16_dynamic().diagnose_fp16()
    assert r.verdict=='healthy' and re.search(r' `f` \(Linear\) is called 60 times, and \d\d times in fp32', r.sentence), r.sentence
    assert 'is called' not in small_learner().to_bf16_dynamic().diagnose_fp16().sentence
