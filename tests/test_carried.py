"What modules carry from batch to batch remembers nothing of a forward pass that half precision could not hold"
import math
import pytest,torch
from fastai.basics import Callback,Learner,nn
from fastai.callback.training import GradientAccumulation
from fastai_amp16.all import DynamicMixedPrecision
from common import Poison,fit,learner,mse

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

class Carries(nn.Module):
    "Activations up to some 1e5, and something that remembers them"
    by = 5e4
    def __init__(self):
        super().__init__()
        self.inp,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x): return self.out(self.carry(self.inp(x)*self.by)/self.by)

class Centred(Carries):
    def __init__(self):
        super().__init__()
        self.register_buffer('mu', torch.zeros(16))
    def carry(self, h):
        if self.training: self.mu.lerp_(h.detach().mean(0).float(), 0.1)
        return h-self.mu

class Hidden(Carries):
    h = None
    def carry(self, h):
        self.h = h.detach().mean(0)*0.5+(0 if self.h is None else self.h*0.5)
        return h+0.1*self.h

class Listed(Carries):
    def __init__(self):
        super().__init__()
        self.last = []
    def carry(self, h):
        self.last[:] = [*self.last[-2:], h.detach().mean(0)]
        return h+0.1*sum(self.last)

class Scaled(Carries):
    "A number of Python's; the quotient is 0 where it is inf, and no loss tells"
    by = 1e4
    def __init__(self):
        super().__init__()
        self.top = 1.
    def carry(self, h):
        if self.training: self.top = 0.9*self.top+0.1*(8*h).detach().abs().max().item()
        return h/self.top*8*self.by

class RunningVar(nn.Module):
    "A batch norm by hand: in training it divides by the batch's deviation, in validation by the running one"
    def __init__(self):
        super().__init__()
        self.register_buffer('var', torch.ones(16))
    def forward(self, h):
        var = h.var(0) if self.training else self.var
        if self.training: self.var.lerp_(var.detach().float(), 0.1)
        return (h-h.mean(0))/(var+1e-5).sqrt()

class Normed(Carries):
    def __init__(self):
        super().__init__()
        self.carry = RunningVar()
    by = 1.
    def forward(self, x): return super().forward(3e3*x)

class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(1))
    def forward(self, p, t):
        self.mean.lerp_((p-t).detach().mean(0), 0.1)
        return mse(p-0.1*self.mean, t)

class Plain(Carries):
    def carry(self, h): return h

def figure(to, model, loss):
    learn = fit(to(learner(model, n=256, loss_func=loss and loss(), scale=3.)), 12)
    return learn,learn.validate()[0]

@pytest.mark.parametrize('model,loss', [(Centred,None), (Hidden,None), (Listed,None), (Scaled,None), (Normed,None), (Plain,CentreLoss)])
def test_reaches_fp32(model, loss):
    (_,fp32),(learn,fp16) = figure(Learner.to_fp32, model, loss),figure(Learner.to_fp16_dynamic, model, loss)
    mp = learn.mixed_precision
    assert len(mp.reports)>=1 and mp.reports[0].verdict=='forward' and mp.promoted
    assert len(mp.history)==12*16 and mp.n_skipped<12
    assert fp16<1.5*fp32+0.02, (fp16, fp32)

@pytest.mark.parametrize('model', [Centred,Hidden,Listed,Scaled])
def test_a_skipped_batch_is_forgotten(model):
    "All is as before the batch, whether it changed in place or was replaced; and so is what appears in the first batch only"
    def carried(m): return [o for v in (*m._buffers.values(), *(m.__dict__.get(k) for k in ('h','last','top'))) for o in (v if isinstance(v, list) else [v])]
    class Snap(Poison):
        def before_batch(self):
            self.before = [o.clone() if isinstance(o, torch.Tensor) else o for o in carried(self.model)]
            super().before_batch()
        def after_batch(self):
            after = carried(self.model)
            same = len(after)==len(self.before) and all(torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a==b
                                                        for a,b in zip(after, self.before))
            if self.training: assert same==(self.i in self.steps), self.i
    class Small(model): by = 1.
    learn = fit(learner(Small, cbs=Snap({0,2}, 'forward')).to_fp16_dynamic(on_spiral='warn'))
    assert learn.mixed_precision.n_skipped==2

def test_accumulated_batches_are_forgotten_together():
    class Small(Centred): by = 1.
    mu = []
    class See(Callback):
        def after_batch(self):
            if self.training: mu.append(self.model.mu.clone())
    learn = fit(learner(Small, cbs=[GradientAccumulation(32), Poison({3}, 'forward'), See()]).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True]
    assert torch.equal(mu[3], mu[1]) and not torch.equal(mu[2], mu[1])

def test_a_validation_is_forgotten_where_it_runs_again():
    class Large(Carries):
        "Too large for fp16 in validation only"
        h = None
        def forward(self, x):
            y = self.inp(x)
            self.h = (y*(1. if self.training else 1e6)).detach().mean(0)+(0. if self.h is None else 0.5*self.h)
            return self.out(y+(0. if self.training else 1e-6)*self.h)
    learn = fit(learner(Large).to_fp16_dynamic())
    assert learn.mixed_precision.promoted and learn.model.h.isfinite().all() and math.isfinite(learn.recorder.values[-1][1])

class UsedLater(Carries):
    "What overflows goes into the next batch only"
    by = 300.
    def __init__(self):
        super().__init__()
        self.register_buffer('ms', torch.ones(16))
    def carry(self, h):
        res = h-1e-4*self.ms
        if self.training: self.ms.lerp_((h.detach()*h.detach()).mean(0).float(), 0.1)
        return res

def test_a_finite_loss_that_leaves_an_infinity():
    (_,fp32),(learn,fp16) = figure(Learner.to_fp32, UsedLater, None),figure(Learner.to_fp16_dynamic, UsedLater, None)
    mp = learn.mixed_precision
    assert (mp.n_skipped,mp.promoted,len(mp.reports))==(2,['.'],1)
    assert (mp.reports[0].verdict,mp.reports[0].op)==('forward','mul') and 'but ms is not any more' in mp.reports[0].sentence
    assert learn.model.ms.isfinite().all() and fp16<1.5*fp32+0.02

class FloatLater(Carries):
    "The same with a number of Python's"
    by,ms = 300.,1.
    def carry(self, h):
        res = h-1e-4*self.ms
        if self.training: self.ms = 0.9*self.ms+0.1*(h.detach()*h.detach()).max().item()
        return res

class LossLater(nn.Module):
    "The same in the loss function, with numbers that only predictions in half precision make infinite"
    def __init__(self):
        super().__init__()
        self.register_buffer('top', torch.ones(1))
    def forward(self, p, t):
        loss = mse(p[:,:1]/self.top.clone(), t)
        self.top.lerp_(p[:,1:].detach().abs().max()*1e-6, 0.1)
        return loss

class TwoOut(Carries):
    "The second prediction is too large for fp16"
    by = 1.
    def carry(self, h): return h
    def forward(self, x):
        y = self.out(self.inp(x))
        return torch.cat([y, y*1e6], 1)

@pytest.mark.parametrize('model,loss,what', [(FloatLater,None,'ms'), (TwoOut,LossLater,'loss_func.top')])
def test_whatever_is_left(model, loss, what):
    (_,fp32),(learn,fp16) = figure(Learner.to_fp32, model, loss),figure(Learner.to_fp16_dynamic, model, loss)
    mp = learn.mixed_precision
    assert mp.n_skipped<5 and mp.promoted and mp.reports[0].verdict=='forward' and f'but {what} is not any more' in mp.reports[0].sentence
    assert fp16<1.5*fp32+0.02

def test_an_infinity_that_is_meant():
    "fp32 has it as well: after two steps nobody asks any more"
    class Best(Carries):
        by = 1.
        def __init__(self):
            super().__init__()
            self.register_buffer('log_p', torch.zeros(16))
            self.register_buffer('low', torch.full((16,), math.inf)) # half of it stays so
        def carry(self, h):
            if self.training: self.low[:8] = self.low[:8].minimum(h.detach().amin(0).float()[:8])
            if self.training: self.log_p.copy_((h.detach()>0).float().mean(0).log()-math.inf)
            return h
    learn = fit(learner(Best).to_fp16_dynamic())
    assert learn.mixed_precision.history.skipped.tolist()==[True]*2+[False]*6 and learn.mixed_precision.reports==[]

def test_warn_tells_once_and_goes_on():
    learn = learner(UsedLater).to_fp16_dynamic(on_spiral='warn')
    with pytest.warns(UserWarning, match='ms is not any more'): fit(learn, 1)
    assert learn.mixed_precision.promoted==[]

def test_what_does_not_change_is_not_copied_again():
    class Constant(Carries):
        def __init__(self):
            super().__init__()
            self.register_buffer('table', torch.randn(16))
            self.mask,self.norm = torch.ones(16),nn.BatchNorm1d(16)
        by = 1.
        def carry(self, h): return self.norm(h*self.mask+self.table)
    seen = []
    class See(DynamicMixedPrecision):
        def after_batch(self):
            super().after_batch()
            if self.training: seen.append(list(self._before))
    learn = learner(Constant)
    see = See()
    learn.add_cb(see)
    fit(learn, 1)
    assert len(seen)==4 and len(seen[0])>2 and not any(seen[1:])

def test_of_any_dtype():
    class Spectrum(Carries):
        by = 1.
        def __init__(self):
            super().__init__()
            for k,dtype in dict(c=torch.complex64, d=torch.float64, i=torch.int64).items(): self.register_buffer(k, torch.ones(16, dtype=dtype))
        def carry(self, h):
            for k in 'cdi': setattr(self, k, getattr(self, k)+h.detach().mean(0).to(getattr(self, k).dtype))
            return h
    learn = fit(learner(Spectrum, cbs=Poison({2}, 'forward')).to_fp16_dynamic())
    assert learn.mixed_precision.history.skipped.tolist()==[False]*2+[True]+[False]*5 and learn.model.c.isfinite().all() and learn.model.d.isfinite().all()

class Hidden(nn.Module):
    "An LSTM that goes on with its hidden state, which is in half precision where half precision made it"
    def __init__(self): super().__init__(); self.lstm,self.out,self.hidden,self.on = nn.LSTM(8,8),nn.Linear(8,1),None,False
    def forward(self, x):
        x,hidden = self.lstm(x[None], self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        if self.on and x.dtype!=torch.float32: raise ValueError('no half precision here')
        return self.out(x[0])

def test_a_hidden_state_of_half_precision_goes_on_in_fp32():
    class On(Callback):
        def before_batch(self): self.model.on = self.iter==2
    learn = fit(learner(Hidden, cbs=On()).to_bf16_dynamic(), 1)
    assert learn.mixed_precision.reports[0].verdict=='forward' and len(learn.mixed_precision.history)==4 and not learn.mixed_precision.n_skipped
