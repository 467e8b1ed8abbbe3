"Programs of kinds that people report as broken in half precision, against fp32"
from functools import partial
import pytest,torch
from fastai.basics import Callback,CancelBatchException,Learner,OptimWrapper,nn,set_seed
from fastai_amp16.all import *
from common import Do,between,both,fit,learner,plain_mlp,weights

def ends(learn): return learn.recorder.values[-1][-1]

def as_in_fp32(make, to='to_fp16_dynamic', n=2, tol=1e-2, **kwargs):
    "A learner after a fit in half precision that ends as in fp32"
    ref,learn = fit(make(), n),getattr(make(), to)(**kwargs)
    fit(learn, n)
    mp = learn.mixed_precision
    assert ends(learn)==pytest.approx(ends(ref), rel=tol) and len(mp.history)==4*n and not mp.n_skipped
    return learn

# Exceptions

class Unsuitable(Exception): pass
def asserts(x):
    assert x.dtype==torch.float32, 'wants floats'
    return x
def by_dtype(x): return {torch.float32: 1., torch.float64: 1.}[x.dtype]*x
def own_check(x):
    if x.dtype!=torch.float32: raise Unsuitable
    return x

@both
@pytest.mark.parametrize('f,says', [(asserts,'AssertionError (wants floats)'), (by_dtype,'KeyError (torch.'), (own_check,'Unsuitable.')])
def test_what_the_model_raises_in_half_precision_alone_is_healed(f, says, to, dtype):
    mp = as_in_fp32(lambda: learner(between(Do(f))), to).mixed_precision
    assert mp.promoted==['1'] and says in mp.reports[0].sentence and len(mp.reports)==1

def test_what_the_model_raises_in_fp32_as_well_comes_through(uncompared):
    calls = []
    def third(x):
        calls.append(x.dtype)
        if len(calls)>2: raise KeyError('now')
        return x
    learn = learner(between(Do(third)), cbs=[]).to_fp16_dynamic(init_scale=2.)
    with pytest.raises(KeyError, match='now') as e: fit(learn)
    assert calls[2:]==[torch.float16, torch.float32] and e.traceback[-1].name=='third'

events = 'before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch'.split()

@pytest.mark.parametrize('event', events)
def test_what_a_callback_raises_runs_no_batch_again(event):
    calls = []
    class Raises(Callback):
        def now(self):
            calls.append(1)
            if len(calls)>2: raise ValueError('mine')
    setattr(Raises, event, Raises.now)
    learn = learner(cbs=Raises()).to_fp16_dynamic(init_scale=2.)
    with pytest.raises(ValueError, match='mine'): fit(learn)
    assert len(calls)==3 and not learn.mixed_precision.n_rerun

def test_what_a_metric_or_the_optimizer_raises_runs_no_batch_again(monkeypatch):
    def metric(p, y): raise ValueError('mine')
    learn = learner(metrics=metric).to_fp16_dynamic(init_scale=2.)
    with pytest.raises(ValueError, match='mine'): fit(learn)
    def step(self, *args, **kwargs): raise ValueError('mine')
    other = learner().to_fp16_dynamic(init_scale=2.)
    other.create_opt()
    monkeypatch.setattr(type(other.opt), 'step', step)
    with pytest.raises(ValueError, match='mine'): fit(other)
    assert not learn.mixed_precision.n_rerun and not other.mixed_precision.n_rerun

def test_a_hook_that_raises_is_named():
    def wants_floats(m, args, out): assert out.dtype==torch.float32
    def make():
        learn = learner(plain_mlp)
        learn.model[0].register_forward_hook(wants_floats)
        return learn
    assert as_in_fp32(make).mixed_precision.reports[0].sentence.startswith('The hook `wants_floats` (line ')

def zeros(learn): learn.opt.zero_grad()
def cancels(learn): raise CancelBatchException
def raises(learn): raise ValueError('another')

@pytest.mark.parametrize('then', [zeros, cancels, raises])
def test_an_attempt_that_was_left_is_left_whoever_catches_it(then):
    "As code does that drops what raises"
    class Drops(Learner):
        def _do_one_batch(self):
            try: super()._do_one_batch()
            except: then(self)
    def make():
        learn = learner()
        learn.__class__ = Drops
        return learn
    assert as_in_fp32(make, init_scale=2.**24).mixed_precision.n_rerun>0

# Hooks on parameters

@pytest.mark.parametrize('first', [True,False])
def test_hooks_on_parameters_see_true_gradients(first):
    "Those of batches that ran again may be infinite"
    def fitted(to, **kwargs):
        learn,seen = learner(plain_mlp),[]
        def hook(g):
            seen.append(g.norm().item())
            return g.nan_to_num(0., 0., 0.).clamp(-2e-3, 2e-3) # which hides an overflow
        def add(): return [p.register_hook(hook) for p in learn.model.parameters()]
        if first: add()
        if to: learn.to_fp16_dynamic(**kwargs)
        if not first: add()
        fit(learn)
        return learn,seen
    (ref,in_fp32),(learn,in_fp16) = fitted(False),fitted(True, init_scale=2.**12)
    again,_ = fitted(True, init_scale=2.**30, max_scale=2.**30)
    assert sorted(in_fp16[-4:])==pytest.approx(sorted(in_fp32[-4:]), rel=2e-2)
    assert again.mixed_precision.n_rerun>0
    for o in (learn,again):
        for p,q in zip(weights(o), weights(ref)): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.Embedding(8, 4, sparse=True),nn.Linear(8, 1)
    def forward(self, x): return self.head(self.emb(x[:,:2].abs().long()).flatten(1))

def test_hooks_on_sparse_gradients_see_true_ones():
    def fitted(to):
        learn,seen = learner(Words, opt_func=partial(OptimWrapper, opt=torch.optim.SGD)),[]
        learn.model.emb.weight.register_hook(lambda g: (seen.append(g.to_dense().norm().item()), g/2)[1])
        fit(learn.to_fp16_dynamic(init_scale=2.**10) if to else learn, 1)
        return seen[-4:]
    assert fitted(True)==pytest.approx(fitted(False), rel=2e-2)

# Half precision that is meant

class HalfBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Linear(8, 8).half().requires_grad_(False),nn.Linear(8, 1)
    def forward(self, x): return self.head(self.body(x.half()).float())

def test_frozen_parts_may_be_half():
    learn = as_in_fp32(lambda: learner(HalfBackbone))
    assert learn.model.body.weight.dtype==torch.float16
    learn.model.body.requires_grad_(True)
    with pytest.raises(ValueError, match='fp32 master weights'): fit(learn)

# Layouts, objects and infinities

class Graph(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.inp,self.out = nn.Linear(8, 8),nn.Linear(8, 1)
        a = torch.eye(8)/2+torch.eye(8).roll(1, 0)/3
        self.register_buffer('a', getattr(a, f'to_sparse_{layout}')())
    def forward(self, x): return self.out((self.a@self.inp(x).T).T)

@pytest.mark.parametrize('layout', ['coo','csr','csc'])
def test_adjacency_matrices_in_sparse_layouts(layout):
    mp = as_in_fp32(lambda: learner(partial(Graph, layout))).mixed_precision
    assert mp.n_rerun<=2 # and not one for each batch

def test_objects_in_objects_hold_fp32():
    "The parts of a mixture"
    D,seen = torch.distributions,set()
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 9)
        def forward(self, x):
            weights,means,scales = self.net(x).split(3, -1)
            return D.MixtureSameFamily(D.Categorical(logits=weights), D.Normal(means, scales.exp()))
    def loss(p, y):
        seen.add(p.component_distribution.loc.dtype)
        return -p.log_prob(y[:,0]).mean()/16
    def make():
        learn = learner(Mixture, loss_func=loss)
        learn.dls.loaders[1] = []
        return learn
    ref,learn = fit(make()),fit(make().to_fp16_dynamic())
    assert seen=={torch.float32} and not learn.mixed_precision.promoted
    assert learn.recorder.losses[-1].item()==pytest.approx(ref.recorder.losses[-1].item(), rel=1e-2)

def test_infinities_that_are_meant_are_known_once_fp32_has_shown_them():
    calls = []
    def masked(x):
        calls.append(1)
        return x.masked_fill(torch.arange(4)==3, -torch.inf)
    def count(to):
        set_seed(0)
        learn = learner(lambda: nn.Sequential(nn.Linear(8, 4), Do(masked)), loss_func=lambda p,y: (p[:,:3]-y).square().mean()/16)
        learn.dls.valid.bs = 1
        if to: learn.to_fp16_dynamic()
        calls.clear()
        fit(learn, 3)
        return len(calls)
    assert count(True)<=count(False)+16 # and not each of the 48 batches of validation again
