"Programs of kinds that people report as broken in half precision, against fp32"
import math,warnings
from functools import partial
import pytest,torch
from fastai.basics import SGD,Callback,CancelBatchException,Learner,OptimWrapper,nn,noop,set_seed
from fastai.callback.mixup import MixUp
from fastai_amp16.all import *
from common import Do,between,both,equal,fit,learner,mlp,plain_mlp,state,times_and_back,weights
from overflows import Outlier

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
@pytest.mark.warns('raises in')
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

@pytest.mark.warns('raises in')
def test_a_hook_that_raises_is_named():
    def wants_floats(m, args, out): assert out.dtype==torch.float32
    def make():
        learn = learner(plain_mlp)
        learn.model[0].register_forward_hook(wants_floats)
        return learn
    assert as_in_fp32(make).mixed_precision.reports[0].sentence.startswith('The hook `wants_floats` (line ')

class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)) for _ in range(2)])
        self.out = nn.Linear(8, 1)
    def forward(self, x):
        for b in self.blocks: x = b(x)
        return self.out(x)

@both
@pytest.mark.parametrize('model,hooked,before,kept', [
    (mlp,'3',True,'2'), (plain_mlp,'1',True,'0'), (Nested,'blocks.1.1',True,'blocks.1.0.1'), (Nested,'out',True,'.'),
    (Nested,'blocks.0',False,'blocks.0.1')])
@pytest.mark.warns('raises in')
def test_for_a_hook_that_raises_the_module_before_it_is_enough(model, hooked, before, kept, to, dtype):
    def wants_floats(m, args, out=None): assert (args[0] if before else out).dtype==torch.float32
    def make():
        learn = learner(model)
        m = learn.model.get_submodule(hooked)
        (m.register_forward_pre_hook if before else m.register_forward_hook)(wants_floats)
        return learn
    mp = as_in_fp32(make, to, tol=2e-2).mixed_precision
    assert mp.promoted==[kept] and len(mp.reports)==1 and mp.reports[0].sentence.startswith('The hook `wants_floats` (line ')

class ManifoldMixUp(Callback):
    "Mixes what a layer gives, by a hook that is removed when the loss is known"
    run_valid = False
    def __init__(self, raises): self.raises = raises
    def before_batch(self):
        perm,lam = torch.randperm(len(self.x)),torch.rand(len(self.x), 1).to(self.x)
        def mixes(m, args, out): return torch.lerp(out[perm], out, lam if self.raises else lam.to(out))
        self.hook = self.model[0].register_forward_hook(mixes)
        self.learn.yb = torch.lerp(self.y[perm], self.y, lam),
    def after_loss(self): self.hook.remove()

@both
@pytest.mark.warns('raises in')
def test_a_hook_of_one_batch_that_raises_is_healed(to, dtype):
    learn = as_in_fp32(lambda: learner(plain_mlp, cbs=[ManifoldMixUp(raises=True)]), to)
    assert learn.mixed_precision.promoted==['0'] and not learn.model[0]._forward_hooks

def test_a_batch_that_runs_again_has_the_hook_that_was_removed():
    def make(): return learner(plain_mlp, loss_func=nn.MSELoss(), cbs=[ManifoldMixUp(raises=False)])
    ref,learn = fit(make(), 1),fit(make().to_fp16_dynamic(init_scale=2.**24), 1)
    assert learn.mixed_precision.history.reruns[0] and not learn.mixed_precision.promoted
    assert learn.recorder.losses[0].item()==pytest.approx(ref.recorder.losses[0].item(), rel=1e-2)

def test_a_report_leaves_no_hook_behind():
    learn = learner(plain_mlp, cbs=[ManifoldMixUp(raises=True)]).to_fp16_dynamic()
    assert learn.diagnose_fp16().promoted==['0'] and not learn.model[0]._forward_hooks

@both
@pytest.mark.warns('raises in')
def test_a_hook_on_gradients_that_raises_is_named(to, dtype):
    def wants_floats(g): assert g.dtype==torch.float32
    def hooks(m, args, out):
        if out.requires_grad: out.register_hook(wants_floats)
    def make():
        learn = learner(plain_mlp)
        learn.model[0].register_forward_hook(hooks)
        return learn
    mp = as_in_fp32(make, to).mixed_precision
    assert mp.promoted==['0'] and mp.reports[0].sentence.startswith('The hook `wants_floats` (line ')

def test_a_hook_that_refuses_infinite_gradients_asks_for_a_lower_scale():
    def check(g): assert g.isfinite().all()
    def make():
        learn = learner()
        for p in learn.model.parameters(): p.register_hook(check)
        return learn
    mp = as_in_fp32(make, init_scale=2.**24).mixed_precision
    assert not mp.promoted and mp.scaler.get_scale()<2.**24 and mp.n_rerun

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

class Root(nn.Module):
    "The derivative of a root at 0 is infinite: times 0 it is NaN, in fp32 as well; and half precision cannot hold what is in `mid`"
    def __init__(self):
        super().__init__()
        self.inp,self.mid,self.out = nn.Linear(8, 16),Do(times_and_back),nn.Linear(16, 1)
    def forward(self, x):
        h = self.inp(x).relu()
        return self.out(self.mid(h)+0*(h-h).sqrt())

@both
@pytest.mark.filterwarnings('ignore:`mul` in mid')
def test_a_hook_may_replace_nan_where_fp32_needs_it(to, dtype):
    "While the batch is diagnosed, healed and runs in fp32; half precision adds no infinity that it could hide"
    def make():
        learn = learner(Root)
        for p in learn.model.parameters(): p.register_hook(lambda g: g.nan_to_num(0., 0., 0.).clamp(-1e-2, 1e-2))
        return learn
    assert as_in_fp32(lambda: fit(make(), 1), to).mixed_precision.promoted==['mid']*(dtype==torch.float16)

def seen_after(learn):
    "What hooks see that come when a gradient was added, and clip it"
    seen = []
    def hook(p):
        seen.append(p.grad.norm().item())
        p.grad = p.grad.clamp(-3e-3, 3e-3)
    for p in learn.model.parameters(): p.register_post_accumulate_grad_hook(hook)
    return seen

@both
@pytest.mark.parametrize('first', [True,False])
def test_hooks_after_gradients_see_true_ones_and_may_change_them(first, to, dtype):
    def fitted(to, **kwargs):
        learn = learner(plain_mlp)
        if first: seen = seen_after(learn)
        if to: getattr(learn, to)(**kwargs)
        if not first: seen = seen_after(learn)
        return fit(learn),seen
    (ref,in_fp32),(learn,in_half) = fitted(None),fitted(to)
    assert sorted(in_half[-4:])==pytest.approx(sorted(in_fp32[-4:]), rel=5e-2)
    again,in_half = fitted('to_fp16_dynamic', init_scale=2.**30, max_scale=2.**30)
    assert again.mixed_precision.n_rerun>0 and all(map(math.isfinite, in_half))
    for o in (learn,again): assert ends(o)==pytest.approx(ends(ref), rel=1e-2)

def test_hooks_after_sparse_gradients_see_true_ones():
    def fitted(to):
        learn,seen = learner(Words, opt_func=partial(OptimWrapper, opt=torch.optim.SGD)),[]
        learn.model.emb.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_dense().norm().item()))
        fit(learn.to_fp16_dynamic(init_scale=2.**10) if to else learn, 1)
        return seen[-4:]
    assert fitted(True)==pytest.approx(fitted(False), rel=2e-2)

@both
def test_hooks_may_take_the_step(to, dtype):
    "An optimizer for each parameter, whose gradients never exist all at once; batches that overflow before any step run again"
    def make():
        learn = learner(plain_mlp)
        opts = {p: torch.optim.AdamW([p], lr=5e-3) for p in learn.model.parameters()}
        def hook(p):
            opts[p].step()
            opts[p].zero_grad()
        for p in opts: p.register_post_accumulate_grad_hook(hook)
        return learn
    with warnings.catch_warnings():
        warnings.simplefilter('error', PrecisionWarning)
        learn = as_in_fp32(make, to)
        again = as_in_fp32(make, init_scale=2.**24).mixed_precision
    assert not learn.mixed_precision.n_rerun and again.n_rerun==1 and again.scaler.get_scale()<2.**24

# Half precision that is meant

class HalfBackbone(nn.Module):
    "A frozen half-precision body; casts what goes in and out if `casts_in` and `casts`"
    def __init__(self, half, body, mid=noop, casts=True, casts_in=True):
        super().__init__()
        self.half_type,self.casts,self.casts_in,self.seen = half,casts,casts_in,set()
        self.body = nn.Sequential(*body()).to(half).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 16), Do(mid), nn.Linear(16, 1))
    def forward(self, x):
        h = self.body(x.to(self.half_type) if self.casts_in else x)
        self.seen.add(h.dtype)
        return self.head(h.float() if self.casts else h)

def dense(norm): return lambda: (nn.Linear(8, 12), norm(12), nn.ReLU(), nn.Linear(12, 8))
def convolved(): return nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 8)
class Evals(Callback):
    def before_batch(self): self.model.body.eval()

bodies = {'dense': lambda: (nn.Linear(8, 8),), 'batch norm': dense(nn.BatchNorm1d), 'layer norm': dense(nn.LayerNorm),
          'instance norm': dense(lambda n: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3), nn.Flatten())), 'conv': convolved}
halfs = pytest.mark.parametrize('half', [torch.float16,torch.bfloat16], ids=['half','bfloat16'])

def half_learner(half, body='batch norm', cbs=(), half_inputs=False, **kwargs):
    learn = learner(partial(HalfBackbone, half, bodies[body], casts_in=not half_inputs, **kwargs), cbs=cbs)
    for dl in learn.dls.loaders if half_inputs else (): dl.dataset[:] = [(x.to(half),y) for x,y in dl.dataset]
    return learn

@both
@halfs
@pytest.mark.parametrize('body,evals', [*zip(bodies, [False,True]*3),('batch norm',False)])
def test_a_frozen_half_part_computes_as_in_fp32(body, evals, half, to, dtype):
    def make(): return half_learner(half, body, Evals() if evals else ())
    ref,learn = fit(make()),as_in_fp32(make, to)
    a,b = learn.model.body.state_dict(),ref.model.body.state_dict()
    assert all(torch.equal(t, b[k]) and t.dtype==b[k].dtype for k,t in a.items()) and learn.model.seen=={half}
    assert not learn.mixed_precision.promoted and not learn.mixed_precision.n_rerun
    with learn.no_bar(), ref.no_bar(): (preds,_),(wanted,_) = learn.get_preds(),ref.get_preds()
    torch.testing.assert_close(preds, wanted, rtol=0, atol=2e-2)
    learn.model.body.requires_grad_(True)
    with pytest.raises(ValueError, match='fp32 master weights'): fit(learn)

@both
@halfs
@pytest.mark.warns('raises in')
def test_half_parts_and_half_inputs_run_in_fp32(half, to, dtype):
    "In comparisons, where a batch is diagnosed and healed, in a report and for the doctor; whether or not the model casts what it gets"
    for casts,half_inputs in ((True,half==dtype),(False,half!=dtype)):
        learn = getattr(half_learner(half, half_inputs=half_inputs, mid=asserts, casts=casts), to)()
        before = learn.model.body[1].running_var.clone()
        assert learn.diagnose_fp16().promoted==['head.1'] and 'AssertionError' in str(learn.fp16_doctor())
        assert torch.equal(learn.model.body[1].running_var, before)
        fit(learn)
        ref = fit(half_learner(half, half_inputs=half_inputs))
        assert learn.mixed_precision.promoted==['head.1'] and ends(learn)==pytest.approx(ends(ref), rel=1e-2)
        for t,o in zip(learn.model.body.buffers(), ref.model.body.buffers()): torch.testing.assert_close(t, o, rtol=0, atol=0)

@both
def test_beside_a_half_part_everything_else_can_stay_in_fp32(to, dtype):
    ref,learn = fit(half_learner(dtype)),getattr(half_learner(dtype), to)(keep_fp32=['*','.'])
    assert equal(state(fit(learn)), state(ref)) and not learn.mixed_precision.scaler.is_enabled()

@pytest.mark.warns('`mul` in `head.1`')
def test_half_inputs_are_compared_with_fp32():
    "Squares beyond 65504 make this 0 in fp16, without a sign"
    def hidden(x): return 100*x/(1e5*x*x).sum(1, keepdim=True).add(1).sqrt()
    mp = as_in_fp32(lambda: half_learner(torch.float16, half_inputs=True, mid=hidden)).mixed_precision
    assert mp.promoted==['head.1']

@pytest.mark.warns('raises in')
def test_a_half_teacher_of_a_callback_stays_half():
    class Teaches(Callback):
        def before_fit(self):
            set_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).half()
        def after_pred(self):
            with torch.no_grad(): self.learn.yb = (self.y/2+self.net(self.x.half()).float()/2,)
    def make(): return learner(between(Do(asserts)), cbs=Teaches())
    learn = as_in_fp32(make)
    assert learn.mixed_precision.promoted==['1'] and {t.dtype for t in learn.teaches.net.buffers()}=={torch.float16,torch.int64}

# Layouts, objects and infinities

class Graph(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.inp,self.out = nn.Linear(8, 8),nn.Linear(8, 1)
        a = torch.eye(8)/2+torch.eye(8).roll(1, 0)/3
        self.register_buffer('a', getattr(a, f'to_sparse_{layout}')())
    def forward(self, x): return self.out((self.a@self.inp(x).T).T)

@pytest.mark.parametrize('layout', ['coo','csr','csc'])
@pytest.mark.filterwarnings('ignore:`matmul` in the code of the model itself')
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

def test_infinities_that_are_meant_are_known_from_validation_to_validation():
    calls = []
    def masked(x):
        calls.append(1)
        return x.masked_fill(torch.arange(4)==3, -torch.inf)
    def loss(p, y): return (p[:,:3]-y).square().mean()/16
    learn = learner(lambda: nn.Sequential(nn.Linear(8, 4), Do(masked)), loss_func=loss).to_fp16_dynamic()
    def count():
        calls.clear()
        learn.validate()
        return len(calls)
    assert [count(), count(), count()]==[2,1,1] # the first one is compared with fp32
    fit(learn, 1) # which changes weights, and compares its own validation
    assert count()==1

# Words

def named(learn, lr, samples=()):
    "What a fit that no precision can learn from says"
    with pytest.warns(PrecisionWarning): fit(learn.to_fp16_dynamic(), 2, lr)
    r = learn.mixed_precision.reports[0]
    assert r.samples==[*samples]
    return r.sentence

def test_numbers_too_large_for_fp32_are_named_in_the_data_and_not_blamed_on_the_learning_rate():
    assert named(learner(plain_mlp, scale=1e25, shuffle=False), 1e-2, range(16)).startswith('The targets of the batch reach ')
    learn = learner(plain_mlp, shuffle=False)
    learn.dls.train.dataset[21][0][3] = 3e27
    says = 'The inputs of the batch reach 3e+27, which is too much for fp32, in 1 of its 16 samples (index 21 of the data set).'
    assert named(learn, 1e-2, [21])==says

def test_before_a_step_no_learning_rate_is_blamed():
    def make(by):
        learn = learner(plain_mlp)
        with torch.no_grad(): learn.model[0].weight.mul_(by)
        return learn
    assert 'learning rate' not in named(make(1e30), 1e-2) and 'at a learning rate of 1e+15' in named(make(1.), 1e15)

def test_weights_that_a_step_has_made_infinite_were_not_so_to_begin_with():
    learn = learner(plain_mlp, opt_func=SGD, loss_func=lambda p,y: 1e4*(p-y).square().mean())
    assert 'not finite after a step at a learning rate of 1e+38: ' in named(learn, 1e38)

@pytest.mark.parametrize('number', [torch.inf,torch.nan])
def test_weights_that_are_not_finite_to_begin_with_are_named(number):
    learn = learner(plain_mlp)
    with torch.no_grad(): learn.model[0].weight[0,1] = number
    assert named(learn, 1e-2)=='Weights or buffers are not finite to begin with: `0.weight` (1 of 128 numbers).'

@pytest.mark.usefixtures('as_in_programs') # a process of a loader has no GPU
@pytest.mark.parametrize('shuffle', [False,True])
@pytest.mark.parametrize('num_workers', [0,1])
def test_samples_are_named_by_their_place_in_the_data_set(shuffle, num_workers):
    learn = learner(plain_mlp, shuffle=shuffle)
    learn.dls.loaders[0] = learn.dls.train.new(num_workers=num_workers)
    learn.dls.train.dataset[40][0][2] = torch.nan
    assert named(learn, 1e-2, [40]).endswith('in 1 of its 16 samples (index 40 of the data set).')

def test_samples_of_a_batch_that_you_give_are_named_by_their_place_in_it():
    learn = learner(plain_mlp)
    x,y = learn.dls.one_batch()
    x[5,0] = torch.nan
    r = learn.diagnose_fp16((x, y))
    assert r.samples==[5] and r.sentence.endswith('in 1 of its 16 samples (index 5).')

@pytest.mark.parametrize('keep', ['', [''], ['head','']])
def test_the_whole_model_in_fp32_is_refused(keep):
    with pytest.raises(ValueError, match=r'keep_fp32=.* is not valid; .*learn\.to_fp32\(\)'): learner().to_fp16_dynamic(keep_fp32=keep)

def test_large_gradients_run_no_batch_again_where_everything_is_in_fp32():
    learn = learner(n=12*16, cbs=[Outlier(9)]).to_fp16_dynamic(keep_fp32=nn.Module)
    assert fit(learn, 1).mixed_precision.n_rerun==0

def test_a_report_that_keeps_everything_names_to_fp32():
    learn = learner(lambda: nn.Linear(8,1), loss_func=lambda p,y: 1e13*(p-y).square().mean())
    assert 'learn.to_fp32()' in learn.diagnose_fp16().remedy

# Before the first fit

class Annealed(Callback):
    "A loss that needs what fastai sets in a fit"
    def __init__(self, note): self.note = note
    def after_loss(self):
        self.note((self.opt.hypers[-1]['lr'],self.epoch,self.iter,self.train_iter,self.pct_train,self.n_epoch,self.n_iter,len(self.dl)))
        self.learn.loss_grad = self.learn.loss_grad*(1+self.pct_train)

@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('half', [False,True])
def test_a_report_runs_as_the_first_batch_of_a_fit(ask, fitted, half):
    expected,seen,learn = [],[],learner(plain_mlp)
    fit(learner(plain_mlp, cbs=Annealed(lambda o: expected.append(o))), 1) # fastai in fp32
    if half: learn.to_fp16_dynamic()
    if fitted: fit(learn, 1)
    learn.add_cb(Annealed(lambda o: seen.append(o)))
    before = {**vars(learn)}
    assert 'Without' not in str(getattr(learn, ask)()) and {*seen}=={expected[0]}
    assert vars(learn).keys()==before.keys() and all(vars(learn)[k] is v for k,v in before.items())

class Counts(Callback):
    def before_fit(self): self.n = 0
    def after_pred(self): self.n += 1

@pytest.mark.parametrize('cb', [Counts,partial(MixUp,.4)], ids=['counts','mixup'])
@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
def test_reports_before_the_first_fit_run_as_in_its_first_batch(cb, ask):
    learn = learner(plain_mlp, cbs=cb())
    before,mine = {**vars(learn)},{**vars(learn.cbs[-1])}
    assert 'Without' not in str(getattr(learn, ask)())
    assert vars(learn)==before and vars(learn.cbs[-1])==mine and learn.opt is None

class Needs(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad*self.learn.of_another_callback

@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
def test_a_callback_that_cannot_run_is_left_out_and_named(ask):
    learn = learner(plain_mlp, cbs=[Needs(),Counts()])
    assert 'Without callbacks that raise outside a fit: Needs.' in str(getattr(learn, ask)())
    assert [*learn.cbs[-2:].map(type)]==[Needs,Counts]
    learn.of_another_callback,asked = 2.,[]
    assert 'Needs' not in str(getattr(learn, ask)())
    class Ask(Callback):
        def after_batch(self):
            if self.training and self.iter==1: asked.append(str(getattr(self.learn, ask)()))
    fit(learn.add_cb(Ask()), 1)
    assert len(asked)==1 and 'Without' not in asked[0]
