"Other optimizers, closures, hooks, transforms and threads: what programs do with a learner besides fastai's own loop"
import asyncio,math,threading
import pytest,torch
from fastai.basics import Callback,Learner,OptimWrapper,nn,partial,set_seed
from torch.func import grad,jacrev,jvp,vjp,vmap
import fastai_amp16.all # noqa: F401 (`to_fp16_dynamic`)
from common import *

F = nn.functional
nearly = partial(pytest.approx, rel=0.02)

def ends(to, new):
    "The losses with which a program ends, and its learner"
    learn = fit(to(new()), 2)
    clean(learn)
    return [float(o) for o in learn.recorder.values[-1]],learn

def as_in_fp32(to, new, skipped=0):
    "Trains as in fp32, and loses no step; returns the learner"
    res,learn = ends(to, new)
    assert res==nearly(ends(Learner.to_fp32, new)[0]) and learn.mixed_precision.n_skipped==skipped
    return learn

halves = pytest.mark.parametrize('to', [Learner.to_fp16_dynamic, Learner.to_bf16_dynamic], ids=['fp16','bf16'])

# %% optimizers
events = 'before_batch after_pred after_loss before_backward before_step after_step after_batch'.split()
every_optimizer = pytest.mark.parametrize('opt_func', optimizers.values(), ids=optimizers)

class OutOf(nn.Module):
    "The identity; raises `ex` in the call `at`"
    def __init__(self, ex=ValueError, at=3):
        super().__init__()
        self.ex,self.at,self.n = ex,at,0
    def forward(self, x):
        self.n += 1
        if self.n>=self.at: raise self.ex('mine')
        return x

@halves
@every_optimizer
@pytest.mark.parametrize('ex', [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_a_user_raises_in_the_model_is_what_comes_out(to, opt_func, ex):
    learn = to(learner(between(OutOf(ex)), opt_func=opt_func))
    with pytest.raises(ex, match='mine'): fit(learn)
    clean(learn)

@every_optimizer
@pytest.mark.parametrize('event', events)
def test_what_a_callback_raises_is_what_comes_out(opt_func, event):
    learn = learner(opt_func=opt_func, cbs=Raise(event, ValueError)).to_fp16_dynamic()
    with pytest.raises(ValueError, match='now'): fit(learn)
    assert not learn.mixed_precision.n_rerun

@every_optimizer
def test_what_is_raised_in_a_validation_is_what_comes_out(opt_func):
    learn = fit(learner(between(OutOf(at=math.inf)), opt_func=opt_func).to_fp16_dynamic(), 1)
    learn.model[1].at = 0
    with pytest.raises(ValueError, match='mine'), learn.no_bar(): learn.validate()

@every_optimizer
def test_a_wrong_shape_is_told_as_in_fp32(opt_func):
    says = []
    for to in (Learner.to_fp32, Learner.to_fp16_dynamic):
        with pytest.raises(RuntimeError) as e: fit(to(learner(between(nn.Linear(3,3)), opt_func=opt_func)))
        says.append(str(e.value))
    assert 'shapes cannot be multiplied' in says[1] and says[0]==says[1]

@every_optimizer
@pytest.mark.warns('masked_fill.* raises in float16')
def test_what_half_precision_raises_is_healed(opt_func):
    learn = as_in_fp32(Learner.to_fp16_dynamic, lambda: learner(between(Do(masked_fill)), opt_func=opt_func))
    assert learn.mixed_precision.promoted==['1']

# %% closures
def closure_of(learn):
    def closure():
        learn.opt.zero_grad()
        loss = learn.loss_func(learn.model(*learn.xb), *learn.yb)
        loss.backward()
        return loss
    return closure

class StepWithClosure(Learner):
    def _step(self): self.opt.step(closure_of(self))

class BareClosure(Learner):
    def _do_one_batch(self):
        if self.training: self.opt.step(closure_of(self))
        self.pred = self.model(*self.xb)
        self.loss = self.loss_func(self.pred, *self.yb).detach()
        self('after_loss')

@halves
@pytest.mark.parametrize('cls', [StepWithClosure, BareClosure])
@pytest.mark.warns('through a closure')
def test_closures_train_as_in_fp32(to, cls):
    def new():
        learn = learner(between(nn.Tanh()), lr=0.5, opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS))
        return cls(learn.dls, learn.model, learn.loss_func, learn.opt_func, lr=0.5)
    trained = [weights(ends(to, new)[1]) for to in (Learner.to_fp32, to)]
    assert equal(*trained) # as all forward passes of which the optimizer knows are in fp32

def test_an_exception_in_a_closure_leaves_forward_passes_as_they_were():
    class Fails(StepWithClosure):
        def _step(self):
            def closure(): raise ValueError('mine')
            self.opt.step(closure)
    learn = learner(plain_mlp, opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS))
    learn = Fails(learn.dls, learn.model, learn.loss_func, learn.opt_func).to_fp16_dynamic()
    with pytest.raises(ValueError, match='mine'): fit(learn, 1)
    clean(learn)
    assert not learn.opt.opt._optimizer_step_pre_hooks and not learn.opt.opt._optimizer_step_post_hooks

# %% what hooks keep
class Distill(Callback):
    "Keeps an activation by a hook, and uses it in `event` as `use` says"
    def __init__(self, event, use):
        self.use,self.seen = use,0
        setattr(self, event, self.add)
    def before_fit(self):
        set_seed(1)
        self.head,self.table = nn.Linear(16,4),nn.Bilinear(16,16,2)
        self.hook = self.learn.model[0].register_forward_hook(lambda m, x, out: setattr(self, 'out', out))
    def add(self):
        self.more = self.use(self, self.out, self.learn.xb[0])
        self.seen += 1
        assert not any(map(torch.is_autocast_enabled, devices))
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+.01*self.more
    def after_fit(self): self.hook.remove()

uses = {
    'a layer': lambda self, out, x: self.head(out).square().mean(),
    'a bilinear layer': lambda self, out, x: self.table(out, out).mean(),
    'a product': lambda self, out, x: (out.T@x).square().mean(),
    'a product the other way': lambda self, out, x: torch.einsum('bi,bj->ij', x, out).abs().mean(),
    'a distance': lambda self, out, x: F.mse_loss(out[:,:8], x),
    'numpy': lambda self, out, x: out.square().mean()*float(out.numpy(force=True).std()),
}

def has_distances():
    "Can the distance between two dtypes be differentiated? torch 2.6 raises in the backward pass: there, a layer moves to fp32"
    t = torch.ones(2, dtype=torch.half, requires_grad=True)
    try: F.mse_loss(t, torch.ones(2)).backward()
    except RuntimeError: return False
    return True
if not has_distances(): del uses['a distance']

@halves
@pytest.mark.parametrize('use,event', [*zip(uses.values(), ['after_pred','after_loss']*3)], ids=uses)
def test_callbacks_may_use_what_a_hook_has_kept(to, event, use):
    class OnePlace(Distill):
        def after_loss(self):
            if event=='after_loss': self.add()
            super().after_loss()
    def new(): return learner(plain_mlp, cbs=OnePlace('after_pred' if event=='after_pred' else 'nothing', use))
    as_in_fp32(to, new)

def test_what_a_callback_writes_to_is_what_it_meant():
    "No copy is written to in the place of a tensor in half precision"
    class Write(Distill):
        refused = 0
        def add(self):
            self.more = self.head(self.out).mean()
            if self.out.dtype==torch.float32: return # in an attempt in fp32
            with pytest.raises(RuntimeError, match='dtype'): self.out.detach().lerp_(torch.ones(16), 0.5)
            Write.refused += 1
    as_in_fp32(Learner.to_fp16_dynamic, lambda: learner(plain_mlp, cbs=Write('after_pred', None)))
    assert Write.refused

def test_callbacks_that_raise_by_themselves_still_do():
    learn = learner(plain_mlp, cbs=Distill('after_pred', lambda self, out, x: out@torch.ones(3,3))).to_fp16_dynamic()
    with pytest.raises(RuntimeError, match='shapes cannot be multiplied'): fit(learn)

# %% transforms
transforms = {
    'grad': lambda f, x: grad(lambda x: f(x).sum())(x),
    'jvp': lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    'vjp': lambda f, x: vjp(f, x)[1](torch.ones(len(x), 1))[0],
    'jacrev': lambda f, x: vmap(jacrev(lambda o: f(o[None])[0]))(x),
}

@halves
@pytest.mark.parametrize('f', transforms.values(), ids=transforms)
def test_the_first_call_may_lie_within_a_transform(to, f):
    class Transformed(Learner):
        def _do_one_batch(self):
            with torch.enable_grad():
                g = f(self.model, self.xb[0])
                self.pred = self.model(*self.xb)
                self.loss_grad = self.loss_func(self.pred, *self.yb)+.01*g.square().mean()
            self.loss = self.loss_grad.detach().clone()
            self('after_loss')
            if self.training: self._do_grad_opt()
    def new():
        learn = learner(between(nn.Tanh()))
        return Transformed(learn.dls, learn.model, learn.loss_func, learn.opt_func, lr=1e-2)
    as_in_fp32(to, new)

# %% checks of values
class Checked(nn.Module):
    "What it checks holds in fp32 and in half precision, but not where numbers have three bits less; its predictions depend on rounding"
    def __init__(self, tolerance):
        super().__init__()
        self.a,self.b,self.gate,self.tolerance = nn.Linear(8,4),nn.Linear(8,4),Gate(),tolerance
    def forward(self, x):
        p = self.gate(self.a(x))
        if ((p.float().sum(-1)-1).abs()>self.tolerance).any(): raise ValueError('probabilities do not add up to 1')
        return (p*(300*self.b(x)).sin()).sum(-1, keepdim=True)

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(.3))
    def forward(self, x): return (x/self.t).softmax(-1)

@pytest.mark.filterwarnings("ignore::fastai_amp16.all.PrecisionWarning") # whether the sine of a large number is a fault is not asked here
@pytest.mark.parametrize('to,tolerance', [(Learner.to_fp16_dynamic,1e-3), (Learner.to_bf16_dynamic,1e-2)], ids=['fp16','bf16'])
def test_a_check_that_only_the_control_fails_is_not_the_batchs(to, tolerance):
    learn = fit(to(learner(lambda: Checked(tolerance))))
    assert learn.mixed_precision.n_skipped==0 and len(learn.mixed_precision.history)==8

# %% weights that forward passes write to
class Renormed(nn.Module):
    "Embeddings of unit length, and squares that fp16 cannot hold"
    def __init__(self, how):
        super().__init__()
        self.how = how
        max_norm = 1. if how=='max_norm' else None
        self.emb,self.a,self.b = nn.Embedding(20, 8, max_norm=max_norm),nn.Linear(24,32),nn.Linear(32,1)
    @torch.no_grad()
    def renorm(self, w):
        if self.how=='renorm_': w.renorm_(2, 0, 1.)
        if self.how=='copy_': w.copy_(F.normalize(w))
        if self.how=='data': w.data = F.normalize(w)
    def forward(self, x):
        self.renorm(self.emb.weight)
        h = 400*self.a(self.emb(x).flatten(1)).relu()
        return self.b(h*h/9e4)

def words(how):
    learn = learner(lambda: Renormed(how), bs=32)
    x,v = torch.randint(20, (128,3), device='cpu'),torch.randn(20, device='cpu')
    learn.dls.train.dataset = Items(zip(x, v[x[:,:1]]+v[x[:,1:2]]))
    learn.dls.valid.dataset = learn.dls.train.dataset[:32]
    for o in learn.dls: o.n = len(o.dataset)
    return learn

@pytest.mark.parametrize('how', ['max_norm','renorm_','copy_','data'])
@pytest.mark.warns('gives numbers up to')
def test_weights_that_the_forward_pass_writes_are_no_reason_to_lose_a_step(how):
    learn = as_in_fp32(Learner.to_fp16_dynamic, lambda: words(how))
    assert learn.mixed_precision.promoted==['.'] and learn.mixed_precision.n_rerun

@pytest.mark.parametrize('max_norm', [None, 1.])
def test_a_report_leaves_embeddings_as_they_are(max_norm):
    learn = words('max_norm' if max_norm else 'no')
    before = state(learn)
    learn.diagnose_fp16()
    assert equal(before, state(learn))

# %% threads
def in_threads(*fs):
    "Run functions at once, each in a thread; returns their results, and raises what one of them raises"
    res,errors = [None]*len(fs),[]
    def run(i, f):
        try: res[i] = f()
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=run, args=o) for o in enumerate(fs)]
    for o in threads: o.start()
    for o in threads: o.join()
    for e in errors: raise e
    return res

def started(to):
    "A learner whose random numbers do not depend on other threads"
    return to(learner(plain_mlp, shuffle=False, n=20*16))

@halves
def test_learners_in_threads_train_as_one_after_the_other(to):
    one_by_one = [weights(fit(started(o), 2)) for o in (to, Learner.to_fp32)]
    learners = [started(o) for o in (to, Learner.to_fp32, to)]
    at_once = [weights(o) for o in in_threads(*(partial(fit, o, 2) for o in learners))]
    assert equal(at_once[0], one_by_one[0]) and equal(at_once[2], one_by_one[0]) and equal(at_once[1], one_by_one[1])

class WhileIn(nn.Module):
    "In a forward pass of the fit, calls `f` in another thread, and waits for it"
    f = None
    def forward(self, x):
        if self.f and threading.current_thread() is threading.main_thread(): in_threads(self.f)
        return x

@halves
@pytest.mark.parametrize('inside', [True, False], ids=['within a forward pass','between'])
def test_a_model_may_predict_in_a_thread_beside_a_fit(to, inside):
    "It computes as outside the fit, in fp32, and the fit does not notice"
    alone = weights(fit(started(to)))
    learn = to(learner(between(WhileIn()), shuffle=False, n=20*16))
    learn.model[0].load_state_dict(started(to).model[0].state_dict())
    seen = []
    x = torch.randn(4,8)
    def predict():
        with torch.no_grad(): res = learn.model[0](x)
        seen.append(torch.equal(res, F.linear(x, learn.model[0].weight, learn.model[0].bias)))
    class Between(Callback):
        def after_pred(self):
            if not inside: in_threads(predict)
    if inside: learn.model[1].f = predict
    learn.add_cb(Between())
    reference = to(learner(between(WhileIn()), shuffle=False, n=20*16))
    reference.model[0].load_state_dict(started(to).model[0].state_dict())
    fit(learn), fit(reference)
    assert seen and all(seen) and equal(weights(learn), weights(reference)) and len(alone)==4

def test_a_fit_within_an_event_loop():
    alone = weights(fit(started(Learner.to_fp16_dynamic)))
    learn = started(Learner.to_fp16_dynamic)
    async def main():
        async def ticks():
            for _ in range(20): await asyncio.sleep(.001)
        await asyncio.gather(asyncio.to_thread(fit, learn), ticks())
    asyncio.run(main())
    assert equal(weights(learn), alone)

# %% a learner within another one
@halves
@pytest.mark.parametrize('event,opt_func', [*zip(['before_batch','after_pred','after_backward','before_step'], optimizers.values())])
def test_a_learner_may_train_in_a_callback_of_another_one(to, opt_func, event):
    class Inner(Callback):
        trained = None
        def train(self):
            if not self.training or self.trained: return
            with torch.random.fork_rng(): self.trained = weights(fit(to(learner(between(nn.Dropout(.2)), opt_func=opt_func)), 1))
    setattr(Inner, event, Inner.train)
    learn = to(learner(plain_mlp, opt_func=opt_func, shuffle=False, cbs=Inner()))
    fit(learn)
    clean(learn)
    assert equal(weights(learn), weights(fit(to(learner(plain_mlp, opt_func=opt_func, shuffle=False)))))
    assert equal(learn.inner.trained, weights(fit(to(learner(between(nn.Dropout(.2)), opt_func=opt_func)), 1)))
