"However a program calls the model, its layers compute in half precision, its batches run again, and it trains as in fp32"
import copy,inspect,io,math,pickle
from collections import Counter
from types import SimpleNamespace
import pytest,torch
import torch.nn.functional as F
from fastai.basics import CancelBackwardException,CancelBatchException,CancelStepException,Callback,Learner,SGD,nn,noop,partial,set_seed
from fastai.callback.training import GradientAccumulation
from torch.optim.swa_utils import AveragedModel,get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from fastai_amp16.all import AdamW16,GradientNormClip,half_forward,register_norm
from fastai_amp16.precision.entry import Entry,outside
from fastai_amp16.precision.plan import PrecisionPlan
from fastai_amp16.util.torch_private import autocast_nesting
from common import clean,dropout,equal,fit,learner,masters,mse,state,weights
from overflows import World

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc,self.head = nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU(), dropout(0.1)),nn.Linear(16,1)
    def encode(self, x): return self.enc(x)
    def forward(self, x, gain=1.): return self.head(self.enc(x))*gain

class Dtypes(TorchFunctionMode):
    "The dtypes that linear layers compute in"
    def __init__(self):
        super().__init__()
        self.seen = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        if func is F.linear: self.seen.append(res.dtype)
        return res

class Outlier(Callback):
    "The gradients of some batches are 2^20 times as large as the others'"
    order = 5
    def __init__(self, *steps): self.steps = steps
    def before_backward(self):
        if self.train_iter in self.steps: self.learn.loss_grad = self.learn.loss_grad*2.**20

class Own(Learner):
    "A program: what it makes of a batch, and its loss"
    def predict_batch(self, x): return self.model(x)
    def penalty(self, x, y): return 0.
    def _do_one_batch(self):
        x,y = *self.xb,*self.yb
        pred = self.predict_batch(x)
        self.pred = pred
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, y)+self.penalty(x, y)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training: self._do_grad_opt()

class RDrop(Own):
    def penalty(self, x, y): return (self.pred-self.model(x)).square().mean()/16
class Parts(Own):
    def predict_batch(self, x): return self.model.head(self.model.enc(x))
class Layers(Own):
    def predict_batch(self, x):
        for m in self.model.enc: x = m(x)
        return self.model.head(x)
class Forward(Own):
    def predict_batch(self, x): return self.model.forward(x)
class PartForward(Own):
    def predict_batch(self, x): return self.model.head.forward(self.model.enc.forward(x))
class Keyword(Own):
    def predict_batch(self, x): return self.model(gain=1., x=x)
class Method(Own):
    def predict_batch(self, x): return self.model.head(self.model.encode(x))
class Attributes(Own):
    "Takes the model for the module that it is"
    def predict_batch(self, x):
        self.model.train(self.training)
        assert isinstance(self.model, Net) and self.model.enc[0].in_features==8 and len(list(self.model.children()))==2
        return self.model(x)
    def penalty(self, x, y): return 1e-3*sum(p.square().sum() for p in self.model.parameters())+1e-3*self.model.head.weight.abs().sum()
class GradientPenalty(Own):
    def penalty(self, x, y):
        if not self.training: return 0.
        x = x.detach().requires_grad_()
        grad, = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1)-1).square().mean()/160
class Functional(Own):
    def predict_batch(self, x): return torch.func.functional_call(self.model, dict(self.model.named_parameters()), (x,))
class Frozen(Own):
    "A part without gradients, as features"
    def predict_batch(self, x):
        with torch.no_grad(): x = self.model.enc(x)
        return self.model.head(x)
class Again(Own):
    def predict_batch(self, x): return self.model.head(checkpoint(self.model.enc, x, use_reentrant=False))
class Reentrant(Own):
    def predict_batch(self, x): return self.model.head(checkpoint(self.model.enc, x.requires_grad_(), use_reentrant=True))
class Entered(Own):
    "Its own autocast, as in a program that was written for it"
    def predict_batch(self, x):
        with torch.autocast(x.device.type, torch.float16): return self.model(x)

class Recompute(torch.autograd.Function):
    "As a reversible net: nothing is kept, `m` runs again in the backward pass"
    @staticmethod
    def forward(ctx, x, m, *params):
        ctx.m,ctx.state = m,torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad(): return m(x)
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.m(x)
        params = list(ctx.m.parameters())
        gx,*gs = torch.autograd.grad(y, (x,*params), grad)
        return gx,None,*gs
class Reversible(Own):
    def predict_batch(self, x): return self.model.head(Recompute.apply(x.requires_grad_(), self.model.enc, *self.model.enc.parameters()))

momentum = partial(SGD, mom=0.9)

def make(cls, to, net=Net, n=15*16, cbs=(), opt_func=momentum, **kwargs):
    learn = learner(net, n=n, shuffle=False, cbs=[GradientNormClip(1.), *cbs], opt_func=opt_func, lr=0.02, **kwargs)
    learn.__class__ = cls
    return to(learn)

hot = partial(Learner.to_fp16_dynamic, init_scale=2.**24) # so that the first batch runs again, too

def same_training(a, b, skipped=0):
    "As many steps as fp32, at the same learning rates; losses within some percent, and where it ends within one"
    assert len(b.mixed_precision.history)==len(a.recorder.losses)==len(b.recorder.losses) and b.mixed_precision.n_skipped==skipped
    assert a.recorder.lrs==b.recorder.lrs
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=3e-2, atol=1e-5)
    (_,va),(_,vb) = a.recorder.values[-1],b.recorder.values[-1]
    assert vb==pytest.approx(va, rel=1e-2)
    assert [cb.norms for cb in b.cbs if isinstance(cb, GradientNormClip)][0]==b.mixed_precision.history.grad_norm.tolist()
    if not isinstance(b.model, torch.jit.ScriptModule): clean(b) # which has a `forward` of its own

def ran_again(learn): return learn.mixed_precision.history.reruns[lambda s: s>0].index.tolist()

programs = [RDrop, Parts, Layers, Forward, PartForward, Keyword, Method, Attributes, GradientPenalty, Functional,
            Frozen, Again, Reentrant, Entered, Reversible]

@pytest.mark.parametrize('cls', programs)
def test_programs_that_call_the_model_in_their_own_way(cls):
    a = fit(make(Own if cls is Entered else cls, Learner.to_fp32, cbs=[Outlier(5)]), 1)
    b = fit(make(cls, hot, cbs=[Outlier(5)]), 1)
    same_training(a, b)
    assert {0,5}<=set(ran_again(b)) and len(ran_again(b))<=3 and not b.mixed_precision.promoted
    assert int(a.model.enc[1].num_batches_tracked)==int(b.model.enc[1].num_batches_tracked)

def test_an_autocast_of_its_own_changes_nothing():
    "The batch after the 6th is compared with fp32: calls without gradients leave no casts to those with gradients"
    a,b = [fit(make(cls, hot, cbs=[Outlier(5)]), 1) for cls in (Own,Entered)]
    assert a.mixed_precision.history.grad_norm.tolist()==b.mixed_precision.history.grad_norm.tolist()
    assert a.recorder.values==b.recorder.values

@pytest.mark.parametrize('cls', [Again,Reentrant,Reversible])
def test_what_is_recomputed_when_fp32_is_asked(cls):
    "In the 8th step"
    a,b = [fit(make(cls, to, n=18*16), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)

@pytest.mark.usefixtures('uncompared')
@pytest.mark.parametrize('cls', programs)
def test_every_call_computes_in_half_precision(cls):
    "Nothing overflows, so there is no run in fp32"
    learn = make(cls, Learner.to_fp16_dynamic, n=64)
    with Dtypes() as dtypes: fit(learn, 1)
    assert set(dtypes.seen)=={torch.float16} and len(dtypes.seen)>=10

class SAM(Callback):
    "Sharpness-aware minimization: the gradient where the loss is worst, nearby"
    order = 20
    def __init__(self, rho=0.05, at=(), by=1.): self.rho,self.at,self.by,self.steps = rho,at,by,0
    def before_step(self):
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        eps = [p.grad*(self.rho/(norm+1e-12)) for p in params]
        with torch.no_grad(): torch._foreach_add_(params, eps)
        self.opt.zero_grad()
        loss = self.learn.loss_func(self.model(*self.xb), *self.yb)
        (loss*self.by if self.train_iter in self.at else loss).backward()
        with torch.no_grad(): torch._foreach_sub_(params, eps)
        self.steps += 1

def test_sharpness_aware_minimization_runs_again_and_trains_as_in_fp32():
    a,b = [fit(make(Learner, to, cbs=[Outlier(5), SAM()]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert b.sam.steps==15 and int(b.model.enc[1].num_batches_tracked)==int(a.model.enc[1].num_batches_tracked)==30

def test_sharpness_aware_minimization_whose_second_gradient_no_precision_holds():
    "The step is skipped: statistics and weights are what they were, and it is told"
    class See(Callback):
        order = 99
        def before_fit(self): self.states = []
        def before_batch(self):
            if self.training: self.states.append(state(self.learn))
    learn = make(Learner, Learner.to_fp16_dynamic, n=6*16, cbs=[SAM(at=(3,), by=1e30), See()])
    with pytest.warns(UserWarning): fit(learn, 1)
    mp,s = learn.mixed_precision,learn.see.states
    assert mp.history.skipped.tolist()==[i==3 for i in range(6)] and mp.n_skipped==1
    assert mp.scaler.state_dict()['_growth_tracker']==len(mp.scales)==5 # the skipped step counts for nothing
    assert {k for k in s[3] if not torch.equal(s[3][k], s[4][k])}<={
        'enc.0.weight','enc.0.bias','enc.1.weight','enc.1.bias','head.weight','head.bias'}
    torch.testing.assert_close(s[4], s[3], rtol=1e-6, atol=1e-7) # SAM adds and subtracts, which rounds

def test_sharpness_aware_minimization_that_diverges_ends():
    learn = make(Learner, Learner.to_fp16_dynamic, cbs=[SAM(at=range(15), by=1e30)])
    with pytest.warns(UserWarning, match='stopped at step 3 of 15'): fit(learn, 1)
    assert learn.mixed_precision.n_skipped==3

# --- the model itself

def compiled():
    net = Net()
    net.compile(backend='eager')
    return net
def wrapped(): return torch.compile(Net(), backend='eager')
def parallel(): return nn.DataParallel(Net())

@pytest.mark.parametrize('net', [compiled,wrapped,parallel])
def test_wrapped_models_run_again(net):
    a,b = [fit(make(Learner, to, net, cbs=[Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert {0,5}<=set(ran_again(b)) and len(ran_again(b))<=3

class WithLoss(Net):
    "Returns its own loss, as Hugging Face's models do"
    def forward(self, x, labels=None):
        pred = super().forward(x)
        return dict(logits=pred, loss=mse(pred, labels), hidden=None)

class Labels(Callback):
    "The model gets the targets as well"
    def before_batch(self): self.learn.xb = self.xb[0],self.yb[0]

def its_loss(out, y): return out['loss']

def test_a_model_that_returns_its_own_loss():
    a,b = [fit(make(Learner, to, WithLoss, cbs=[Outlier(5), Labels()], loss_func=its_loss), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert {0,5}<=set(ran_again(b)) and len(ran_again(b))<=3

@pytest.mark.usefixtures('uncompared')
@pytest.mark.parametrize('net,kw', [(parallel, {}), (WithLoss, dict(cbs=[Labels()], loss_func=its_loss))], ids=['parallel','own loss'])
def test_wrapped_or_not_the_layers_compute_in_half_precision(net, kw):
    learn = make(Learner, Learner.to_fp16_dynamic, net, n=64, **kw)
    with Dtypes() as dtypes: fit(learn, 1)
    assert set(dtypes.seen)=={torch.float16} and len(dtypes.seen)>=10

def test_a_traced_model_is_refused_and_trains_on_in_fp32():
    learn = make(Learner, Learner.to_fp32,
                 lambda: torch.jit.trace(nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,1)), torch.zeros(2,8)))
    with pytest.raises(ValueError, match='ScriptModule'): learn.to_fp16_dynamic()
    assert not hasattr(learn, 'mixed_precision') and len(fit(learn, 1).recorder.losses)==15

def test_a_traced_part_of_a_model_computes_in_half_precision():
    class Traced(Net):
        def __init__(self):
            super().__init__()
            self.enc = torch.jit.trace(nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU()), torch.randn(2,8))
        def forward(self, x):
            x = self.enc(x)
            self.dtype = x.dtype
            return self.head(x)
    a,b = [fit(make(Learner, to, Traced), 1) for to in (noop, partial(Learner.to_fp16_dynamic, init_scale=2.**24))]
    assert b.model.dtype==torch.float16 and b.mixed_precision.n_rerun
    counts = [dict(o.model.named_buffers())['enc.1.num_batches_tracked'] for o in (a,b)]
    assert counts[0]==counts[1] # validations count as well: it was traced in training

class Documented(Net):
    def forward(self, x, gain:float=1.):
        "Its own words"
        return super().forward(x, gain)

def test_a_forward_is_looked_at_as_ever():
    def told(m):
        f = m.forward
        whole = inspect.signature(f),inspect.getsource(inspect.unwrap(f))
        return whole,f.__name__,f.__doc__,f.__self__ is m
    class Looks(Callback):
        def after_pred(self): self.learn.seen = told(self.model)
    learn = fit(make(Learner, hot, Documented, n=64, cbs=[Looks()]), 1)
    assert learn.seen==told(learn.model)

def test_traced_and_exported_in_the_middle_of_a_fit():
    "It computes in fp32, wherever it is brought"
    class Traces(Callback):
        def after_epoch(self):
            x = torch.ones(2,8)
            self.model.eval()
            self.traced = torch.jit.trace(self.model, x)
            if hasattr(torch.compiler, 'is_exporting'): self.exported = torch.export.export(self.model, (x,)).module()
    learn = fit(make(Learner, hot, n=64, cbs=[Traces()]), 1)
    x = torch.ones(2,8)
    learn.model.eval()
    for f in (getattr(learn.traces, k) for k in ('traced','exported') if hasattr(learn.traces, k)):
        torch.testing.assert_close(f(x), learn.model(x), rtol=1e-6, atol=1e-6)

class OwnAutocast(Net):
    "One region of it computes in fp32"
    def forward(self, x, gain=1.):
        x = self.enc(x)
        with torch.autocast(x.device.type, enabled=False): return self.head(x.float())*gain

@pytest.mark.usefixtures('uncompared')
def test_a_model_with_an_autocast_of_its_own():
    dtypes = set()
    learn = make(Learner, Learner.to_fp16_dynamic, OwnAutocast, n=64)
    for m in (learn.model.enc[0],learn.model.head): m.register_forward_hook(lambda m,i,o: dtypes.add((m.in_features,o.dtype)))
    fit(learn, 1)
    assert dtypes=={(8,torch.float16),(16,torch.float32)}

@pytest.mark.parametrize('how', ['deepcopy','pickle','torch.save'])
def test_a_copy_made_in_the_middle_of_a_fit_is_a_module_of_its_own(how):
    "It computes in fp32 with its own weights, in the fit and after it, and can be trained"
    def copied(m):
        if how=='deepcopy': return copy.deepcopy(m)
        if how=='pickle': return pickle.loads(pickle.dumps(m))
        f = io.BytesIO()
        torch.save(m, f)
        f.seek(0)
        return torch.load(f, weights_only=False)
    class Copies(Callback):
        def after_loss(self):
            if self.training and self.train_iter==2:
                self.net,self.before = copied(self.model),[p.clone() for p in self.model.parameters()]
                self.pred,self.ref = self.net.eval()(*self.xb),Net().eval()
                self.ref.load_state_dict(self.net.state_dict())
                self.exact = self.ref(*self.xb)
    learn = fit(make(Learner, hot, n=64, cbs=[Copies()]), 1)
    net,before,x = learn.copies.net,learn.copies.before,torch.randn(4,8)
    assert equal([p.detach() for p in net.parameters()], before) and not equal(before, weights(learn))
    assert not any({'forward','__reduce_ex__'} & vars(m).keys() for m in (*net.modules(),*learn.model.modules()))
    clean(learn)
    assert torch.equal(learn.copies.pred, learn.copies.exact) # not of the original, and not in half precision
    assert torch.equal(net(x), learn.copies.ref(x))
    other = make(Learner, hot, n=64)
    other.model = net
    other.create_opt()
    assert other.mixed_precision.n_rerun==0
    fit(other, 1)
    assert not equal([p.detach() for p in net.parameters()], before) and len(other.mixed_precision.history)==4
    assert equal(weights(learn), weights(learn)) and not any(isinstance(m.__dict__.get('forward'), Callback) for m in net.modules())

def test_averaged_models_see_each_step_once():
    "torch.optim.swa_utils copies the model in the fit and averages after each step"
    class EMA(Callback):
        order = 70
        def before_fit(self): self.ema = None
        def after_step(self):
            self.ema = self.ema or torch.optim.swa_utils.AveragedModel(self.model)
            self.ema.update_parameters(self.model)
    a,b = [fit(make(Learner, to, cbs=[EMA(), Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert int(a.ema.ema.n_averaged)==int(b.ema.ema.n_averaged)==15
    for p,q in zip(a.ema.ema.parameters(), b.ema.ema.parameters()): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)

def test_a_model_that_is_replaced_for_an_epoch():
    "The other one trains in half precision as well, and both are themselves again afterwards"
    class Swap(Callback):
        order = -5
        def before_fit(self): self.own,self.other,self.dtypes = self.model,None,[]
        def before_epoch(self):
            if self.epoch!=1: return
            set_seed(3)
            self.other = Net()
            self.other.head.register_forward_hook(lambda m, args, out: self.dtypes.append(out.dtype))
            self.learn.model = self.other
            self.learn.create_opt()
        def after_epoch(self):
            if self.epoch!=1: return
            self.learn.model = self.own
            self.learn.create_opt()
    learn = make(Learner, hot, n=64, cbs=[Swap(), Outlier(1)])
    fit(learn, 3)
    s = learn.swap
    assert learn.model is s.own and set(s.dtypes)<={torch.float16,torch.float32} and s.dtypes.count(torch.float16)>=5
    assert not any('forward' in m.__dict__ for o in (s.own,s.other) for m in o.modules())
    assert len(learn.mixed_precision.history)==12 and learn.mixed_precision.n_skipped==0
    assert int(s.own.enc[1].num_batches_tracked)==8 and int(s.other.enc[1].num_batches_tracked)==4

def test_layers_exchanged_in_the_middle_of_a_fit():
    "A new layer in the same model computes in half precision, from the next batch on"
    class Grow(Callback):
        def before_batch(self):
            if not self.training or self.train_iter!=2: return
            self.model.head = nn.Linear(16,1)
            self.dtypes = []
            self.model.head.register_forward_hook(lambda m, args, out: self.dtypes.append(out.dtype))
            self.learn.create_opt()
    learn = fit(make(Learner, Learner.to_fp16_dynamic, n=6*16, cbs=[Grow()]), 1)
    assert set(learn.grow.dtypes)=={torch.float16} and not any('forward' in m.__dict__ for m in learn.model.modules())
    assert len(learn.mixed_precision.history)==6

# --- callbacks that call the model

def test_a_callback_that_calls_the_model_before_the_batch():
    "An adversarial input, by the gradient at the input; dropout and statistics as in fp32"
    class Adversarial(Callback):
        order = 20
        def before_batch(self):
            if not self.training: return
            x = self.xb[0].detach().requires_grad_()
            grad, = torch.autograd.grad(self.learn.loss_func(self.model(x), *self.yb), x)
            self.learn.xb = (self.xb[0]+0.05*grad.sign(),)
    a,b = [fit(make(Learner, to, cbs=[Adversarial(), Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert int(b.model.enc[1].num_batches_tracked)==30

@pytest.mark.parametrize('event', ['after_pred','after_loss','before_backward','after_backward','after_step'])
def test_a_callback_that_predicts_within_a_batch(event):
    class Predicts(Callback):
        def before_fit(self): self.preds = []
        def see(self):
            if not self.training: return
            with torch.no_grad(): self.preds.append(self.model.eval()(*self.xb).float())
            self.model.train()
    setattr(Predicts, event, Predicts.see)
    a,b = [fit(make(Learner, to, cbs=[Predicts(), Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert len(b.predicts.preds)==len(a.predicts.preds)==15
    torch.testing.assert_close(torch.stack(b.predicts.preds), torch.stack(a.predicts.preds), rtol=5e-2, atol=5e-3)

# --- several optimizers

class TwoSteps(Learner):
    "The head first, then the body: two losses, two steps, one batch"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if not self.training: return
        for part in (self.model.enc,self.model.head):
            for m in (self.model.enc,self.model.head): m.requires_grad_(m is part)
            self.pred = self.model(*self.xb)
            self.loss_grad = self.loss_func(self.pred, *self.yb)*self.factor(part)
            self._do_grad_opt()
        self.model.requires_grad_(True)
    by,at = 1.,None
    def factor(self, part): return self.by if part is self.at and self.train_iter==3 else 1.

class Counts(Callback):
    def before_fit(self): self.steps,self.skips = 0,0
    def after_step(self): self.steps += 1
    def after_cancel_step(self): self.skips += 1

def torchs(params, **kwargs):
    from fastai.optimizer import OptimWrapper
    return OptimWrapper(params, torch.optim.Adam, **kwargs)

@pytest.mark.parametrize('opt_func', [SGD,momentum,AdamW16,torchs])
def test_two_steps_in_a_batch(opt_func):
    "The first one runs again where it overflows; the second one cannot, since weights are written: it is skipped, and told"
    def run(to, which):
        learn = make(TwoSteps, to, n=6*16, cbs=[Counts()], opt_func=opt_func)
        learn.at,learn.by = getattr(learn.model, which),2.**22
        return fit(learn, 1)
    low = partial(Learner.to_fp16_dynamic, init_scale=2.**12)
    assert run(Learner.to_fp32, 'enc').counts.steps==12
    learn = run(low, 'enc')
    assert learn.mixed_precision.n_skipped==0 and [i for i,n in enumerate(learn.mixed_precision.history.reruns) if n]==[6]
    with pytest.warns(UserWarning, match='could not run again'): learn = run(low, 'head')
    assert learn.mixed_precision.history.skipped.tolist()==[i==7 for i in range(12)]
    assert learn.counts.skips==1 and all(v.isfinite().all() for v in state(learn).values())

def test_the_first_of_two_steps_is_taken_once():
    "Where the second one overflows, nothing of the first one happens again"
    norms = []
    class Norms(Callback):
        order = 12
        def before_step(self): norms.append(self.mixed_precision.step_norm)
    learn = make(TwoSteps, Learner.to_fp16_dynamic, n=6*16, cbs=[Counts(), Norms()], opt_func=SGD)
    learn.at,learn.by = learn.model.head,2.**22
    fit(learn, 1)
    assert len(norms)==11 and learn.counts.steps==12 # fastai's `after_step` follows a cancelled step as well

@pytest.mark.parametrize('kw', [dict(dynamic=False), dict(rerun=False)], ids=['static','no rerun'])
def test_two_steps_in_a_batch_where_the_first_is_skipped(kw):
    learn = make(TwoSteps, partial(Learner.to_fp16_dynamic, **kw), n=6*16, opt_func=SGD)
    learn.at,learn.by = learn.model.enc,2.**22
    fit(learn, 1)
    assert learn.mixed_precision.history.skipped.tolist()==[i==6 for i in range(12)]

@pytest.mark.parametrize('which', ['first','second'])
def test_a_skipped_step_of_two_leaves_no_statistics(which):
    "Infinite data in the forward pass of one of two steps"
    class Inf(TwoSteps):
        def factor(self, part): return 1.
        def _do_one_batch(self):
            bad = self.training and self.train_iter==3
            self.pred = self.model(*self.xb) if not self.training else None
            if not self.training:
                self.loss = self.loss_func(self.pred, *self.yb)
                return
            for i in range(2):
                x = self.xb[0]*float('inf') if bad and i==(which=='second') else self.xb[0]
                self.pred = self.model(x)
                self('after_pred')
                self.loss_grad = self.loss_func(self.pred, *self.yb)
                self.loss = self.loss_grad.clone()
                self('after_loss')
                self._do_grad_opt()
    learn = fit(make(Inf, Learner.to_fp16_dynamic, n=6*16, opt_func=SGD), 1)
    assert learn.mixed_precision.history.skipped.tolist()==[i==6+(which=='second') for i in range(12)]
    assert all(v.isfinite().all() for v in state(learn).values()) and int(learn.model.enc[1].num_batches_tracked)==11

# --- casts of weights

def cast_of(out):
    "The node that cast the weight of a linear layer whose result `out` is"
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if 'AddmmBackward' in node.name(): return node.next_functions[2][0].next_functions[0][0]
        nodes += [o for o,_ in node.next_functions if o is not None]

class Calls(Callback):
    "Calls a layer of the model several times in a batch, with something between two calls"
    def __init__(self, n, between=lambda m: None): self.n,self.between = n,between
    def after_pred(self):
        if not self.training: return
        m,self.outs,self.exact = self.model.enc[0],[],[]
        for _ in range(self.n):
            self.outs.append(m(*self.xb))
            self.exact.append(F.linear(*self.xb, m.weight, m.bias))
            self.between(m)

def calls(*args):
    learn = fit(make(Learner, Learner.to_fp16_dynamic, n=16, cbs=[Calls(*args)]), 1)
    for a,b in zip(learn.calls.outs, learn.calls.exact): torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)
    return len({cast_of(o) for o in learn.calls.outs if o.grad_fn is not None})

def test_calls_of_one_batch_share_the_casts_of_weights():
    assert calls(40)==2 # the first call does not know whether others follow

def by_data(m): m.weight.data.mul_(0.5)
def by_new_data(m): m.weight.data = m.weight.data*0.5
@torch.no_grad()
def in_place(m): m.weight.mul_(0.5)
def swapped(m):
    "Averaged weights, say, for one prediction"
    own = m.weight.data.clone()
    m.weight.data.copy_(own*0.5)
    with torch.no_grad(): torch.testing.assert_close(m(torch.ones(1,8)), F.linear(torch.ones(1,8), m.weight, m.bias), rtol=5e-3, atol=5e-3)
    m.weight.data.copy_(own)
def one_number(m): m.weight.data[0,0] += 0.1
@torch.no_grad()
def signs(m): m.weight.neg_() # which no norm shows

@pytest.mark.parametrize('write', [by_data,by_new_data,in_place,one_number,signs])
def test_what_is_written_between_calls_is_cast_anew(write):
    assert calls(6, write)==6

def test_weights_that_are_swapped_between_calls():
    calls(6, swapped)

def test_calls_without_gradients_lose_none_of_later_calls():
    class First(Callback):
        def after_pred(self):
            if not self.training: return
            m,w = self.model.enc[0],self.model.enc[0].weight
            for grad in (False,True,False,True,True):
                with torch.set_grad_enabled(grad): out = m(*self.xb)
                if grad: assert torch.autograd.grad(out.sum(), w)[0].any()
    fit(make(Learner, Learner.to_fp16_dynamic, n=64, cbs=[First()]), 1)

def test_nothing_of_the_casts_stays_after_a_batch():
    class See(Callback):
        order = -50
        def before_fit(self): self.nesting = []
        def before_batch(self): self.nesting.append(autocast_nesting())
    learn = make(RDrop, Learner.to_fp16_dynamic, cbs=[Calls(3), See()])
    fit(learn, 1)
    assert autocast_nesting()==0 and set(learn.see.nesting)=={0}

# --- outside of fits

def test_calls_outside_a_fit_are_fp32_and_leave_no_patches():
    learn = fit(make(Learner, hot, n=64), 1)
    x = torch.randn(4,8)
    learn.model.eval()
    ref = Net().eval()
    ref.load_state_dict(learn.model.state_dict())
    assert torch.equal(learn.model(x), ref(x)) and torch.equal(learn.model.enc(x), ref.enc(x))
    clean(learn)

def test_predictions_of_parts_are_those_of_half_forward():
    "What a program computes from parts of the model in a fit is what one forward pass in half precision computes"
    class Compares(Callback):
        def before_fit(self): self.same = []
        def after_pred(self):
            if not self.training: return
            m = copy.deepcopy(self.model).eval()
            self.model.eval()
            with torch.no_grad():
                parts = self.model.head(self.model.enc(*self.xb))
                with half_forward(m): enc = m.enc(*self.xb)
                with half_forward(m): ref = m.head(enc.float()).float()
            self.model.train()
            self.same.append(torch.equal(parts, ref))
    learn = fit(make(Learner, Learner.to_fp16_dynamic, n=64, cbs=[Compares()]), 1)
    assert learn.compares.same==[True]*4

@pytest.mark.parametrize('keep', ['head','enc','enc.'])
def test_predictions_that_a_program_holds_on_to_change_no_fit(keep):
    "Their graph keeps the patched methods of another plan alive"
    class Holds(Callback):
        run_valid = False
        def before_fit(self): self.held = []
        def hold(self):
            self.model.eval()
            with half_forward(self.model, keep_fp32=keep): self.held.append(self.model(torch.ones(4, 8)))
            self.model.train()
        before_batch = after_pred = hold
    def fitted(*cbs):
        learn = fit(make(Learner, Learner.to_fp16_dynamic, n=64, cbs=cbs), 1)
        assert not learn.mixed_precision.n_rerun and not learn.mixed_precision.reports
        return weights(learn)
    holds = Holds()
    assert equal(fitted(holds), fitted()) and len(holds.held)==8

def test_accumulated_batches_of_a_program_with_two_model_calls():
    a,b = [fit(make(RDrop, to, cbs=[GradientAccumulation(48), Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    assert len(b.mixed_precision.history)==5 and b.mixed_precision.n_skipped==0
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=3e-2, atol=1e-5)
    assert mse(b.model.eval()(torch.ones(2,8)), 0*torch.ones(2,1)).isfinite()

# --- what a program does to the model in the middle of a fit

class Toggled(nn.Module):
    "Another forward pass in training than in evaluation, as networks that are fused for inference have"
    def __init__(self):
        super().__init__()
        self.m,self.calls = Net(),Counter()
        self.train()
    def train(self, mode=True):
        self.forward = self.in_training if mode else self.in_evaluation
        return super().train(mode)
    def in_training(self, x):
        self.calls['training',self.training] += 1
        return self.m(x)
    def in_evaluation(self, x):
        self.calls['evaluation',self.training] += 1
        return 2*self.m(x)

class Patch(Callback):
    "Gives a module another `forward`, around the one that it finds, and takes it away again"
    def __init__(self, name, on, off=None): self.name_,self.on,self.off,self.calls = name,on,off,World()
    def before_batch(self):
        if not self.training: return
        m = self.model.get_submodule(self.name_)
        if self.train_iter==self.on:
            forward = m.forward
            def f(x):
                self.calls.append(1)
                return 1.5*forward(x)
            m.forward = f
        elif self.train_iter==self.off: del m.forward

@pytest.mark.parametrize('to', [Learner.to_fp16_dynamic, Learner.to_bf16_dynamic], ids=['fp16','bf16'])
def test_a_forward_that_depends_on_the_mode(to):
    a,b = [fit(make(Learner, t, Toggled, n=64), 2) for t in (Learner.to_fp32, to)]
    assert a.model.calls==b.model.calls=={('training',True): 8, ('evaluation',False): 2}
    assert b.recorder.values[-1][1]==pytest.approx(a.recorder.values[-1][1], rel=2e-2)
    assert vars(b.model)['forward']==b.model.in_evaluation and 'forward' not in vars(b.model.m)

@pytest.mark.usefixtures('uncompared')
@pytest.mark.parametrize('name', ['', 'enc', 'head'])
@pytest.mark.parametrize('off', [None, 6])
def test_a_forward_that_is_exchanged_in_the_middle_of_a_fit(name, off):
    def run(to):
        learn,between = make(Learner, to, n=8*16, cbs=[Patch(name, 3, off)]),[]
        learn.model.head.register_forward_pre_hook(lambda m,args: between.append(args[0].dtype))
        with Dtypes() as dtypes: fit(learn, 1)
        return learn,{*dtypes.seen},between
    (a,*_),(b,dtypes,between) = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert {*between}=={torch.float16} and len(between)>=8 # within one forward pass, patched or not
    assert len(a.patch.calls)==len(b.patch.calls)==(6 if off is None else 3) and dtypes=={torch.float16}
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=3e-2, atol=1e-5)
    assert ('forward' in vars(b.model.get_submodule(name)))==(off is None)
    masters(b)
    with Dtypes() as dtypes: b.model(torch.randn(2, 8)) # what was given to it may hold one of ours
    assert set(dtypes.seen)=={torch.float32}

class Fuses(nn.Module):
    "Its first forward pass in training is another than the later ones"
    def __init__(self):
        super().__init__()
        self.m,self.calls = Net(),[]
    def forward(self, x):
        if self.training: self.forward = self.later
        return self.m(x)
    def later(self, x):
        self.calls.append(self.training)
        return 2*self.m(x)

class Borrow(Callback):
    "One head takes the forward pass of another"
    def before_batch(self):
        if self.training and self.train_iter==3: self.model.head.forward = self.model.other.forward

class TwoHeads(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 1)

def test_a_forward_pass_that_sets_another():
    a,b = [fit(make(Learner, to, Fuses, n=64), 1) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    same = [torch.stack(o.recorder.losses) for o in (a,b)]
    torch.testing.assert_close(*same, rtol=3e-2, atol=1e-5)
    assert a.model.calls==b.model.calls and len(b.model.calls)>3 and vars(b.model)['forward']==b.model.later

def test_a_forward_that_is_anothers():
    a,b = [fit(make(Learner, to, TwoHeads, n=8*16, cbs=[Borrow()]), 1) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=3e-2, atol=1e-5)
    b.model.eval()
    assert torch.equal(b.model(x:=torch.randn(2,8)), b.model.other(b.model.enc(x)))

class MomentumEncoder(nn.Module):
    "A copy that follows the trained one, as in MoCo, BYOL, and mean teachers"
    def __init__(self):
        super().__init__()
        self.q = Net()
        self.k = copy.deepcopy(self.q).requires_grad_(False)
    def forward(self, x):
        if self.training: self.update()
        return self.q(x)+0.1*self.k(x)
    def pairs(self): return zip(self.k.parameters(), self.q.parameters())

class ByData(MomentumEncoder):
    def update(self):
        for a,b in self.pairs(): a.data.mul_(0.9).add_(b.data, alpha=0.1)
class NewData(MomentumEncoder):
    def update(self):
        for a,b in self.pairs(): a.data = a.data*0.9+b.data*0.1
class InPlace(MomentumEncoder):
    @torch.no_grad()
    def update(self):
        for a,b in self.pairs(): a.lerp_(b, 0.1)
def follow(k, q):
    for a,b in zip(k.parameters(), q.parameters()): a.data.copy_(a.data.lerp(b.data, 0.1))
class ByFunction(MomentumEncoder):
    def update(self): follow(self.k, self.q)
class Follower:
    def __call__(self, k, q): follow(k, q)
class ByObject(MomentumEncoder):
    def __init__(self):
        super().__init__()
        self.update_k = Follower()
    def update(self): self.update_k(self.k, self.q)
class Averaged(MomentumEncoder):
    def __init__(self):
        super().__init__()
        self.k = AveragedModel(self.q, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    def update(self): self.k.update_parameters(self.q)

@pytest.mark.parametrize('to', [hot,Learner.to_bf16_dynamic], ids=['fp16','bf16'])
@pytest.mark.parametrize('net', [ByData,NewData,InPlace,ByFunction,ByObject,Averaged])
def test_what_a_forward_pass_writes_to_weights_in_any_way(net, to):
    "Once in each step, also in those that run again"
    a,b = [fit(make(Learner, t, net, n=8*16, cbs=[Outlier(5)]), 1) for t in (Learner.to_fp32, to)]
    same_training(a, b)
    assert ran_again(b)==[0,5]*(to is hot)
    for p,q in zip(a.model.k.parameters(), b.model.k.parameters()): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)

class Transformed(Callback):
    "Gradients by `torch.func`, of each sample and of all, as a penalty on the way"
    def __init__(self, how): self.how,self.norms = how,[]
    def after_pred(self):
        if not self.training: return
        m,(x,),(y,) = self.model,self.xb,self.yb
        ps,bs = dict(m.named_parameters()),{k: v.clone() for k,v in m.named_buffers()}
        def loss(ps, x, y): return F.mse_loss(torch.func.functional_call(m, (ps,bs), (x,)), y)
        g = torch.func.grad(loss)(ps, x, y) if self.how=='all' else torch.func.vmap(
            torch.func.grad(lambda ps,x,y: loss(ps, x[None], y[None])), (None,0,0), randomness='same')(ps, x, y)
        self.norms.append(sum(v.square().sum() for v in g.values()).sqrt().item())

class NormFree(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(8,16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16,1))

@pytest.mark.parametrize('how', ['all', 'each'])
def test_transforms_of_torch_func_around_the_model(how):
    a,b = [fit(make(Learner, to, NormFree, n=64, cbs=[Transformed(how)]), 1) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)]
    same_training(a, b)
    assert not b.mixed_precision.promoted and b.transformed.norms==pytest.approx(a.transformed.norms, rel=2e-2)

class Static(nn.Module):
    @staticmethod
    def forward(x): return x*2
class StaticNorm(Static): pass # its name makes it a norm

def test_a_static_forward():
    def net(): return nn.Sequential(nn.Linear(8,16), Static(), StaticNorm(), nn.Linear(16,1))
    same_training(*(fit(make(Learner, to, net, n=64), 1) for to in (Learner.to_fp32, hot)))

class NewHead(Callback):
    "Surgery between two epochs: the head is another from then on, and is called by itself"
    def before_epoch(self):
        if self.epoch!=1: return
        set_seed(1)
        self.model.head = nn.Linear(16, 1)
        self.model.norm = nn.LayerNorm(16)
        self.learn.create_opt()
        self.opt.set_hypers(lr=0.02)

class NewParts(Own):
    def predict_batch(self, x):
        h = self.model.enc(x)
        return self.model.head(self.model.norm(h) if hasattr(self.model, 'norm') else h)

@pytest.mark.usefixtures('uncompared')
def test_modules_that_are_new_in_the_second_epoch():
    a = fit(make(NewParts, Learner.to_fp32, n=64, cbs=[NewHead()]), 3)
    with Dtypes() as dtypes: b = fit(make(NewParts, Learner.to_fp16_dynamic, n=64, cbs=[NewHead()]), 3)
    same_training(a, b)
    assert set(dtypes.seen)=={torch.float16}

@pytest.mark.parametrize('how', ['in place', 'wrapped'])
def test_compiled_in_the_middle_of_a_fit(how):
    "As many graphs as in fp32, and none of them of our code"
    graphs = []
    def backend(gm, inputs):
        graphs.append([str(n.target) for n in gm.graph.nodes])
        return gm
    class Compile(Callback):
        def before_train(self):
            if self.epoch!=1: return
            if how=='in place': self.model.compile(backend=backend)
            else: self.learn.model = torch.compile(self.model, backend=backend)
    def run(to):
        torch._dynamo.reset()
        graphs.clear()
        learn = fit(make(Learner, to, n=64, cbs=[Compile()]), 3)
        return learn,len(graphs),sum('linear' in o for g in graphs for o in g)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    same_training(a[0], b[0])
    assert a[1:]==b[1:] and a[2]>=4

def test_models_for_validation_that_cannot_train_in_half_precision_run_as_they_are():
    class Swap(Callback):
        def __init__(self, other): self.other = other
        def before_validate(self): self.mine,self.learn.model = self.model,self.other(self.model)
        def after_validate(self): self.learn.model = self.mine
    def traced(m): return torch.jit.trace(copy.deepcopy(m).eval(), torch.randn(2, 8))
    class Narrow(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.m = copy.deepcopy(m).bfloat16()
        def forward(self, x): return self.m(x.bfloat16()).float()
    for other in (traced, Narrow, lambda m: nn.Sequential(m)):
        head = partial(Learner.to_fp16_dynamic, keep_fp32='head') # which the others have under another name
        a,b = [fit(make(Learner, to, n=64, cbs=[Swap(other)]), 2) for to in (Learner.to_fp32, head)]
        same_training(a, b)
        learn = make(Learner, Learner.to_fp16_dynamic, n=64)
        learn.model = other(learn.model)
        learn.validate()
        assert not learn.model.training and learn.validate()[0]<10 # and nothing is left locked

@pytest.mark.usefixtures('uncompared')
def test_batches_outside_a_fit():
    "As fastai's own tests call them"
    learn = make(Learner, Learner.to_fp16_dynamic, default_cbs=False) # these want to know when a fit begins
    b = learn.dls.one_batch()
    learn.create_opt()
    for training in (False, True):
        learn.training,before = training,weights(learn)
        learn.model.train(training)
        with Dtypes() as dtypes: learn.one_batch(0, b)
        assert set(dtypes.seen)=={torch.float16} and learn.loss.isfinite() and equal(before, weights(learn))!=training
        clean(learn)

# --- gradients outside the backward pass

class FGM(Callback):
    "An adversarial step on the first weights: its gradient is added, as in many competitions"
    def after_backward(self):
        p = self.model.enc[0].weight
        backup = p.data.clone()
        p.data.add_(0.5*p.grad/(p.grad.norm()+1e-12))
        self.learn.loss_func(self.model(*self.xb), *self.yb).backward()
        p.data = backup

class Clip(Callback):
    def __init__(self, event): setattr(self, event, self.clip)
    def clip(self): torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
class Values(Callback):
    def before_step(self): torch.nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)
class Zeros(Callback):
    "Hides infinities: fp32 has none"
    def after_backward(self):
        for p in self.model.parameters(): p.grad.nan_to_num_(0., 0., 0.)
class Reads(Callback):
    order = -5
    def __init__(self): self.seen = []
    def after_backward(self): self.seen.append(self.model.head.weight.grad.clone())
class Extra(Callback):
    "A backward pass of its own, before that of the learner"
    def after_loss(self):
        if self.training: (self.model.head.weight.square().sum()*0.1).backward()
class ByScaler(Callback):
    "A second loss, as for fastai's `MixedPrecision`"
    def after_backward(self):
        loss = 0.1*self.learn.loss_func(self.model(*self.xb), *self.yb)
        (self.learn.scaler.scale(loss) if hasattr(self.learn, 'mixed_precision') else loss).backward()
class Penalty(Callback):
    order = 50
    def before_backward(self): self.learn.loss_grad = self.loss_grad+0.01*sum(p.square().sum() for p in self.model.parameters())
class Guard(Callback):
    "Some batches have no backward pass but one of its own"
    order = 50
    def after_loss(self):
        if self.training: (self.model.head.weight.square().sum()*0.1).backward()
    def before_backward(self):
        if self.iter%3==1: raise CancelBatchException
class Halves(Callback):
    order = 5
    def __init__(self, event): setattr(self, event, self.halve)
    def halve(self):
        for p in self.model.parameters(): p.data.mul_(0.5)
class EarlySAM(SAM): order = 0
class SAMAfterBackward(SAM):
    order,before_step = 0,noop
    def after_backward(self): SAM.before_step(self)

early = {'FGM':FGM, 'clip in after_backward':partial(Clip, 'after_backward'), 'clip in before_step':partial(Clip, 'before_step'),
         'values':Values, 'zeros':Zeros, 'reads':Reads, 'extra':Extra, 'SAM':EarlySAM, 'SAM in after_backward':SAMAfterBackward,
         'scaler':ByScaler, 'penalty':Penalty, 'guard':Guard, 'halves in before_step':partial(Halves, 'before_step'),
         'halves in after_backward':partial(Halves, 'after_backward')}

accumulates = 'FGM','extra','scaler','penalty','clip in before_step'

@pytest.mark.parametrize('name,accumulated', [*((o,False) for o in early), *((o,True) for o in accumulates)])
def test_callbacks_that_use_gradients_at_once_find_true_ones(name, accumulated):
    "Whatever their order; and none of a batch that overflows"
    cbs = [GradientAccumulation(32)]*accumulated
    a,b = [fit(make(Learner, to, cbs=[Outlier(5), early[name](), *cbs], n=16*16), 1) for to in (Learner.to_fp32, hot)]
    n = 8 if accumulated else 11 if name=='guard' else 16
    assert len(b.mixed_precision.history)==n and b.mixed_precision.n_skipped==0
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=3e-2, atol=1e-5)
    for p,q in zip(weights(a), weights(b)): torch.testing.assert_close(q, p, rtol=3e-2, atol=1e-3)
    if name=='reads':
        for p,q in zip(a.reads.seen, b.reads.seen): torch.testing.assert_close(q, p, rtol=5e-2, atol=5e-2)
    norms, = [cb.norms for cb in b.cbs if isinstance(cb, GradientNormClip)]
    if 'clip' in name: assert max(norms)<=0.0101
    clean(b)

class OwnSteps(Learner):
    "Something happens between its backward pass and its step"
    def _do_grad_opt(self):
        self._with_events(self._backward, 'backward', CancelBackwardException)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

def test_a_step_of_the_learners_own_is_judged_by_what_it_leaves():
    a,b = [fit(make(OwnSteps, to, cbs=[Outlier(5)]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    assert max(b.mixed_precision.history.grad_norm)<=0.0101

@pytest.mark.parametrize('event', ['before_step','after_backward'])
def test_what_is_written_to_weights_before_a_step_is_written_once(event):
    "Also where fp32 is asked first, after a batch that no precision could use"
    class Bad(Callback):
        def before_batch(self):
            if self.training and self.iter==2: self.learn.xb = self.x*math.nan,
    def net(): return nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,1))
    learn = make(Learner, Learner.to_fp16_dynamic, net, n=160, opt_func=SGD, cbs=[Bad(), Outlier(5), Halves(event)])
    before = weights(learn)
    fit(learn, 1, 1e-6)
    assert ran_again(learn)==[2,5] and learn.mixed_precision.n_skipped==1
    for p,q in zip(before, weights(learn)):
        if p.ndim==2: assert (q.norm()/p.norm()).log2().item()==pytest.approx(-10, abs=0.01)

def test_nobody_gets_infinite_gradients_of_a_step_that_will_be_skipped():
    learn = fit(make(Learner, partial(Learner.to_fp16_dynamic, init_scale=2.**24, rerun=False), cbs=[SAMAfterBackward()]), 1)
    assert learn.mixed_precision.n_skipped and all(p.isfinite().all() for p in weights(learn))

# --- what else has gradients

class Temperature(Callback):
    "Learns a number beside the model, by an optimizer of its own"
    def __init__(self): self.t = nn.Parameter(torch.ones(1))
    def before_fit(self): self.own = torch.optim.SGD([self.t], lr=1e-4)
    def after_pred(self): self.learn.pred = self.pred*self.t
    def after_step(self):
        self.own.step()
        self.own.zero_grad()
class Centres(Callback):
    "A layer that only a loss function knows; its gradients are used every other batch"
    def before_fit(self):
        set_seed(1)
        layer = nn.Linear(1,1)
        self.layer,self.own = lambda: layer,torch.optim.SGD(layer.parameters(), lr=0.1)
        self.learn.loss_func = lambda p, y: mse(layer(p), y)
    def after_step(self):
        if self.iter%2: return
        self.own.step()
        self.own.zero_grad()
class Saliency(Callback):
    order = 20
    def __init__(self): self.seen = []
    def before_batch(self): self.learn.xb = self.x.clone().requires_grad_(self.training),
    def after_backward(self): self.seen.append(self.x.grad/self.x.grad.norm())
class Prompt(Callback):
    "Learns what the inputs are multiplied by"
    order = 20
    def __init__(self): self.prompt = torch.ones(8, requires_grad=True)
    def before_batch(self): self.learn.xb = self.x*self.prompt,
    def after_backward(self):
        with torch.no_grad(): self.prompt -= 0.1*self.prompt.grad/(1+self.prompt.grad.norm())
        self.prompt.grad = None

@pytest.mark.parametrize('cb,learned', [(Temperature, lambda o: o.t), (Centres, lambda o: o.layer().weight), (Prompt, lambda o: o.prompt),
    (Saliency, lambda o: torch.stack(o.seen))], ids=['temperature','centres','prompt','inputs'])
def test_what_has_gradients_beside_the_model(cb, learned):
    "They are true, and none of a batch that overflows"
    at = () if cb is Centres else (5,) # it would take a step that nobody can follow
    a,b = [fit(make(Learner, to, cbs=[Outlier(*at), cb()]), 1) for to in (Learner.to_fp32, hot)]
    same_training(a, b)
    of_a,of_b = [next(learned(o) for o in learn.cbs if isinstance(o, cb)) for learn in (a,b)]
    assert {0,*at}<=set(ran_again(b)) and of_a.shape==of_b.shape
    torch.testing.assert_close(of_b.detach(), of_a.detach(), rtol=3e-2, atol=1e-3) # fp16 has 11 bits

class Whitens(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
    def forward(self, x): return self.lin(x-x.mean(0))

@pytest.fixture
def entered():
    "A model that is patched: what it holds is called from outside"
    register_norm(Whitens)
    net,entry = nn.Sequential(nn.Identity(), Whitens(), nn.Linear(8, 8)),Entry()
    entry.plan = PrecisionPlan(net)
    entry.patch(net)
    yield net
    entry.leave()

def test_what_has_gradients_is_found_behind_a_module_that_returns_its_input(entered):
    prompt = torch.ones(8, requires_grad=True)
    for m in entered: assert outside(m(torch.randn(4, 8)*prompt).sum().grad_fn)==[prompt]

def test_a_module_inside_a_norm_computes_in_fp32_also_if_it_is_called_alone(entered):
    x,lin = torch.randn(4, 8),entered[1].lin
    assert torch.equal(lin(x), F.linear(x, lin.weight, lin.bias)) and not torch.equal(entered[2](x), F.linear(x, *entered[2].parameters()))

def test_the_loss_is_itself_but_in_the_backward_pass():
    class See(Callback):
        order = 99
        def look(self): assert self.loss_grad.item()==self.loss.item()
        before_backward = after_backward = before_step = after_step = after_cancel_step = look
        def after_batch(self): assert not self.training or self.loss_grad.item()==self.loss.item()
    fit(make(Learner, hot, cbs=[See()]), 1)

# --- looks

quiet_bf16 = partial(Learner.to_bf16_dynamic, on_spiral='warn')

class Writes(nn.Module):
    "Shrinks a weight that is trained, in each forward pass"
    def __init__(self):
        super().__init__()
        self.m = Net()
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.m.head.weight.mul_(0.9)
        return self.m(x)

@pytest.mark.parametrize('skipped', [(), (13,), (14,)])
def test_what_a_forward_pass_writes_is_written_once_for_each_step_that_is_taken(skipped):
    class Bad(Callback):
        def before_backward(self):
            if self.iter in skipped: self.learn.loss_grad = self.loss_grad*math.nan
    a,b = [fit(make(Learner, to, Writes, n=20*16, cbs=cbs), 1, 1e-6) for to,cbs in ((Learner.to_fp32, []), (quiet_bf16, [Bad()]))]
    assert b.mixed_precision.n_skipped==len(skipped)
    expected = a.model.m.head.weight/0.9**len(skipped) # a skipped step changes no weight
    torch.testing.assert_close(b.model.m.head.weight, expected, rtol=2e-2, atol=1e-6)

@pytest.mark.parametrize('at', [3, 16])
@pytest.mark.parametrize('every', [False, True])
def test_a_loss_that_raises_by_itself_is_not_blamed_on_half_precision(at, every, recwarn):
    "From one call on, or at every second one, as it counts calls where nothing can put that back; its exception comes as it is"
    calls = World()
    def loss(p, y):
        calls.append(1)
        if len(calls)>=at and (not every or (len(calls)-at)%2==0): raise RuntimeError('my own')
        return mse(p, y)
    learn = make(Learner, Learner.to_fp16_dynamic, n=20*16, loss_func=loss)
    with pytest.raises(RuntimeError, match='^my own$') as e: fit(learn, 1)
    assert e.traceback[-1].name=='loss' and e.value.__cause__ is None and e.value.__context__ is None
    assert not any('amp16' in w.filename for w in recwarn) and not learn.mixed_precision.promoted and not learn.mixed_precision.reports
    clean(learn)

class Unlabelled(Own):
    "A second loader, of which each batch takes one"
    def _do_epoch_train(self):
        self.unlabelled = iter(torch.randn(20, 16, 8))
        super()._do_epoch_train()
    def penalty(self, x, y): return (self.model(next(self.unlabelled))-1).square().mean()/16 if self.training else 0.

@pytest.mark.parametrize('to', [hot, Learner.to_bf16_dynamic], ids=['fp16','bf16'])
def test_another_loader_gives_each_batch_once(to):
    a,b = [fit(make(Unlabelled, how, n=20*16, cbs=[Outlier(5)]), 1) for how in (Learner.to_fp32, to)]
    same_training(a, b)

def test_a_healthy_fit_runs_code_of_the_users_once():
    """Only the model is asked again: twice in the 1st and the 8th step, since it draws random numbers, and once in the validation

    So is the loss function, with both predictions."""
    calls,inner = World(),World()
    class See(Callback):
        def after_pred(self): calls.append('pred')
        def after_loss(self): calls.append('loss')
        def before_backward(self): calls.append('backward')
    def loss_func(p, y): return calls.append('function') or mse(p, y)
    learn = make(Learner, Learner.to_bf16_dynamic, n=20*16, cbs=[See()], loss_func=loss_func)
    learn.model.head.register_forward_hook(lambda *args: inner.append(torch.is_grad_enabled()))
    fit(learn, 1)
    n_valid = len(learn.dls.valid)
    assert Counter(calls)==dict(pred=20+n_valid, loss=20+n_valid, function=20+n_valid+2*3, backward=20)
    assert sum(inner)==20 and len(inner)==20+n_valid+3+2 # with dropout, half precision runs once more in training, too

class Hyper(Callback):
    "Makes a weight of the model, and one of its own, before each batch: by layers that learn, too"
    order = 20
    def before_fit(self): self.own,self.gain,self.seen = torch.optim.SGD([w := torch.ones(1, requires_grad=True)], lr=0.1),w,[]
    def before_batch(self):
        self.model.scale = self.gain*2
        self.shifts = [self.gain.square()]
    def after_pred(self): self.learn.pred = self.pred*self.shifts[0]
    def after_step(self):
        self.seen.append(self.gain.grad.item())
        self.own.step()
        self.own.zero_grad()
class Scaled(Net):
    scale = 1.
    def forward(self, x, gain=1.): return super().forward(x, self.scale)

def test_what_was_computed_before_the_batch_keeps_its_gradients():
    "In the 8th step, too; these batches do not run again"
    a,b = [fit(make(Learner, to, Scaled, n=20*16, cbs=[Hyper()]), 1) for to in (Learner.to_fp32, Learner.to_bf16_dynamic)]
    same_training(a, b)
    assert b.hyper.seen==pytest.approx(a.hyper.seen, rel=5e-2, abs=1e-3)

def test_an_exception_that_only_a_look_meets_comes_through():
    calls = World()
    def loss(p, y):
        calls.append(1)
        if len(calls)==16: raise KeyError('my own')
        return mse(p, y)
    learn = make(Learner, Learner.to_bf16_dynamic, n=20*16, loss_func=loss)
    with pytest.raises(KeyError) as e: fit(learn, 1)
    assert e.traceback[-1].name=='loss'
    clean(learn)

class Boxed(Net):
    def forward(self, x): return SimpleNamespace(pred=super().forward(x), more=[x, None])
class Unboxes(Own):
    def predict_batch(self, x):
        res = self.model(x)
        assert res.pred.dtype==torch.float32 and res.more[1] is None
        return res.pred

def test_a_call_returns_fp32_in_whatever_it_returns():
    same_training(*(fit(make(Unboxes, to, Boxed, n=64), 1) for to in (Learner.to_fp32, Learner.to_fp16_dynamic)))
