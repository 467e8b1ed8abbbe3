"A batch runs again without a trace of the first attempt: modules, learner and callbacks, accumulated batches"
import math,threading,warnings,weakref
from collections import deque
import pytest,torch
from fastai.basics import Callback,Learner,nn,partial,set_seed
from fastai.callback.all import GradientAccumulation,MixUp
from fastai_amp16.train import rerun
from fastai_amp16.all import AdamW16,GradientNormClip
from common import Poison,equal,fit,learner,mlp,mse,state,weights
from overflows import *

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

# --- bit for bit what a training gives in which nothing overflows

def bits(learn):
    p = learn.mixed_precision.history
    return [*weights(learn), *[torch.as_tensor(v) for o in learn.opt.state_dict()['state'] for v in o.values()], *learn.recorder.losses,
            torch.tensor(p.grad_norm), torch.tensor(p.loss_scale)]

@pytest.mark.parametrize('setup', setups)
def test_a_scale_that_was_searched_for_leaves_no_trace(setup):
    "Bit for bit the training that starts at the scale that was found"
    cbs,n = setups[setup]
    def run(scale):
        set_seed(2)
        return fit(classifier(lambda: net(Plain), partial(fp16, init_scale=scale), cbs(), n=n, opt_func=AdamW16, lr=1e-3), 1)
    a = run(2.**24)
    b = run(a.mixed_precision.history.loss_scale[0])
    assert a.mixed_precision.history.reruns[0]>0==b.mixed_precision.history.reruns[0]
    assert equal(bits(a), bits(b)) and equal(state(a), state(b)) and a.model[4].drawn==b.model[4].drawn

@pytest.mark.parametrize('setup,act', [*zip(setups, [Big,Fills]*2)]) # which numbers are too large has nothing to do with the setup
def test_a_fault_that_was_healed_leaves_no_trace(setup, act):
    "Bit for bit the training that keeps in fp32 from the start what healing promoted"
    cbs,n = setups[setup]
    def run(**kwargs):
        set_seed(2)
        return fit(classifier(lambda: net(act), partial(fp16, **kwargs), cbs(), n=n, opt_func=AdamW16, lr=1e-3), 1)
    a = run()
    b = run(keep_fp32=a.mixed_precision.promoted)
    assert a.mixed_precision.n_rerun==1 and b.mixed_precision.n_rerun==0
    assert equal(bits(a), bits(b)) and equal(state(a), state(b)) and a.model[4].drawn==b.model[4].drawn

# --- what modules remember

class Remembers(nn.Module):
    "In all ways that modules have"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16,16)
        self.register_buffer('mean', torch.zeros(16))
        self.register_buffer('replaced', torch.zeros(16))
        self.register_buffer('count', torch.zeros((), dtype=torch.long))
        self.register_buffer('large', torch.zeros(70000))
        self.register_buffer('mask', torch.ones(1).expand(16)) # cannot be written
        self.h,self.n,self.log,self.hist,self.last,self.mem,self.pair = (None,0,[],[0]*100,deque(maxlen=3),
                                                                         {'mean':torch.zeros(16), 'n':0},(0.,0))
        self.late,self.ring = None,[torch.zeros(16) for _ in range(3)]
    def forward(self, x):
        x = self.lin(x)*self.mask
        if self.training:
            m = x.detach().float().mean(0)
            self.mean.lerp_(m, 0.1)
            self.replaced = self.replaced*0.9+m*0.1
            self.count += 1
            self.large[:16] += m
            self.h = m if self.h is None else 0.5*self.h+0.5*m
            self.n += 1
            self.log.append(self.n)
            self.hist[self.n%100] += 1
            self.last.append(self.n)
            self.mem['mean'].lerp_(m, 0.1)
            self.mem['n'] += 1
            self.pair = self.pair[0]+0.5,self.pair[1]+1
            if self.n>=6: self.late = torch.zeros(1) if self.late is None else self.late.add_(1)
            self.ring[self.n%3].add_(m)
        return x+0.01*self.mean
    @property
    def memory(self):
        return dict(count=self.count.item(), n=self.n, log=self.log, hist=self.hist, last=list(self.last),
                    mem=self.mem['n'], pair=self.pair, late=self.late.tolist())
    @property
    def means(self): return [self.mean, self.replaced, self.large, self.h, self.mem['mean'], *self.ring]

@pytest.mark.parametrize('setup', ['plain','both'])
@pytest.mark.parametrize('fault', ['scale','outliers','all'])
def test_what_modules_remember_has_each_batch_once(setup, fault):
    act,to,steps = faults[fault]
    cbs,n = setups[setup]
    def run(to):
        set_seed(2)
        def make(): return nn.Sequential(nn.Linear(8,16), act(), Remembers(), nn.BatchNorm1d(16), nn.Linear(16,4))
        return fit(classifier(make, to, [*cbs(), Outlier(*steps)], n=n), 1)
    a,b = run(fp32),run(to)
    assert b.mixed_precision.n_skipped==0 and b.mixed_precision.n_rerun>2
    assert a.model[2].memory==b.model[2].memory and torch.equal(a.model[3].num_batches_tracked, b.model[3].num_batches_tracked)
    for v,w in zip(a.model[2].means, b.model[2].means): torch.testing.assert_close(w, v, rtol=2e-2, atol=2e-3)

def test_what_a_loss_function_remembers_has_each_batch_once():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('mean', torch.zeros(1))
            self.n = 0
        def forward(self, p, t):
            self.n += self.training
            if p.requires_grad: self.mean.lerp_((p-t).detach().mean(0), 0.1)
            return mse(p-0.1*self.mean, t)
    def run(to): return fit(to(learner(n=15*16, loss_func=Loss(), opt_func=momentum, cbs=[GradientNormClip(1.), Outlier(4)])), 1)
    a,b = run(fp32),run(hot)
    assert a.loss_func.n==b.loss_func.n
    torch.testing.assert_close(b.loss_func.mean, a.loss_func.mean, rtol=2e-2, atol=1e-4)

def test_inputs_that_are_written_in_place_are_what_they_were():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = mlp()
        def forward(self, x):
            x.mul_(2).add_(1)
            return self.m(x)
    class Writing(Callback):
        "Targets, too, and from the fourth batch on"
        def after_backward(self):
            if self.iter>=3: self.yb[0].mul_(0.5)
    def run(to): return fit(to(learner(Writes, n=15*16, opt_func=momentum, cbs=[GradientNormClip(1.), Writing(), Outlier(5,9)])), 1)
    a,b = run(fp32),run(partial(fp16, init_scale=2.**10))
    assert b.mixed_precision.n_skipped==0 and b.mixed_precision.history.reruns[5]>0
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=1e-2, atol=1e-4)

# --- a learner's own way with a batch

class Locked(Learner):
    "Two calls of the model, one of parts, its own losses, locals that it uses after the step, a lock that is not to be taken twice"
    def _do_one_batch(self):
        with self.lock:
            self.calls.append('begin')
            self.pred = self.model(*self.xb)
            self('after_pred')
            first = self.loss_func(self.pred, *self.yb)
            h = self.xb[0]
            for m in self.model: h = m(h)
            loss = (first+self.loss_func(h, *self.yb)+self.loss_func(self.model(*self.xb), *self.yb))/3
            self.loss_grad,self.loss = loss,loss.detach().clone()
            self('after_loss')
            if not self.training: return
            self.begun.append(self.iter)
            before = [p.detach().clone() for p in self.model.parameters()]
            self._do_grad_opt()
            self.moved.append(math.sqrt(sum((p.detach()-q).square().sum().item() for p,q in zip(self.model.parameters(), before))))
            self.local.append(loss.item())
            self.calls.append('end')
            self.count += 1

def locked(to, **kwargs):
    learn = learner(n=15*16, opt_func=momentum, shuffle=False, cbs=[GradientNormClip(1.), Steps(), Outlier(4)])
    learn.__class__ = Locked
    learn.lock,learn.calls,learn.begun,learn.local,learn.moved,learn.count = threading.Lock(),World(),[],[],[],0
    return to(learn)

def test_a_learners_own_method_runs_again_as_it_is():
    a,b = [fit(locked(to), 1) for to in (fp32, hot)]
    assert b.mixed_precision.n_skipped==0 and a.steps.rates==b.steps.rates and b.count==a.count==15
    assert not b.lock.locked() and b.begun==a.begun==[*range(15)] # noted in each attempt, put back with the learner's attributes
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=1e-2, atol=1e-4)
    assert b.local==b.steps.losses and b.moved==pytest.approx(a.moved, rel=2e-2, abs=1e-5)
    assert int(b.model[1].num_batches_tracked)==45

def test_the_attempt_that_counts_is_one_uninterrupted_call():
    learn = fit(locked(hot), 1)
    calls,n = list(learn.calls),learn.mixed_precision.n_rerun
    assert calls.count('end')==15 and calls.count('begin')>=15+n
    for i,c in enumerate(calls):
        if c=='end': assert calls[i-1]=='begin'

# --- accumulated gradients

@pytest.mark.parametrize('at', [6,7,8])
def test_a_micro_batch_whose_loss_is_not_finite_in_half_precision(at):
    "The first, the second or the third of three; all since the last step run again, as in fp32"
    class Sometimes(nn.Module):
        n = 0
        def forward(self, x):
            self.n += self.training
            return x*2.**20/2.**20 if self.n==at+1 else x
    def run(to): return fit(classifier(lambda: net(Sometimes), to, [MixUp(0.4), GradientAccumulation(48)], n=18), 1)
    a,b = run(fp32),run(fp16)
    same_training(a, b)
    assert b.mixed_precision.history.reruns.tolist()==[0,0,1,0,0,0] and b.model[2].n==18

@pytest.mark.parametrize('at', [6,8])
def test_a_micro_batch_that_fp32_cannot_hold_either(at):
    "The step is skipped with all its batches, once; the others are taken"
    learn = classifier(lambda: net(Plain), fp16, [GradientAccumulation(48), Poison({at}, 'forward'), Early(-5)], n=18)
    seen = []
    class See(Callback):
        order = 90
        def after_batch(self):
            if self.training: seen.append((equal(weights(self.learn), self.before), int(self.model[1].num_batches_tracked)))
        def before_batch(self): self.before = weights(self.learn)
    learn.add_cb(See())
    fit(learn, 1)
    assert learn.mixed_precision.history.skipped.tolist()==[False,False,True,False,False,False]
    assert [i for i,(same,_) in enumerate(seen) if not same]==[2,5,11,14,17]
    assert seen[8][1]==seen[5][1]==6 and seen[17][1]==15 and learn.early.rows['after_pred']==list(range(18))
    assert all(v.isfinite().all() for v in state(learn).values())

def test_a_validation_amid_accumulated_gradients_leaves_them():
    "Also one whose batches run again: three batches an epoch, two a step"
    class Only(nn.Module):
        def forward(self, x): return x if self.training else x*2.**20/2.**20
    def run(to): return fit(classifier(lambda: net(Only), to, [GradientAccumulation(32)], n=3), 4)
    a,b = run(fp32),run(fp16)
    same_training(a, b)
    assert b.mixed_precision.promoted==['2'] and b.gradient_norm_clip.norms==pytest.approx(a.gradient_norm_clip.norms, rel=2e-2)

def test_what_is_kept_of_accumulated_batches_is_bounded(monkeypatch):
    "Beyond the bound nothing is held, an overflow is skipped, and it is said"
    monkeypatch.setattr(rerun, '_most_bytes', 4*16*(8*4+8)) # inputs and targets of four batches
    refs,held = [],[]
    class See(Callback):
        def before_batch(self):
            if not self.training: return
            refs.append(weakref.ref(self.xb[0]))
            held.append(sum(r() is not None for r in refs))
    def run(steps):
        refs.clear(), held.clear()
        learn = classifier(lambda: net(Plain), fp16, [GradientAccumulation(8*16), See(), Outlier(*steps)], n=24)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            fit(learn, 1)
        return learn.mixed_precision.history,[str(w.message) for w in said if 'accumulated' in str(w.message)]
    history,said = run([5]) # the sixth of the eight
    assert history.skipped.tolist()==[True,False,False] and len(said)==1
    assert max(held)<=6
    for steps in ([],[3]): # the fourth is within it
        history,said = run(steps)
        assert not history.skipped.any() and not said

def test_within_the_bound_all_accumulated_batches_run_again():
    learn = classifier(lambda: net(Plain), fp16, [GradientAccumulation(8*16), Outlier(3,8)], n=24)
    passes = Passes(learn.model)
    fit(learn, 1)
    h = learn.mixed_precision.history
    assert not h.skipped.any() and h.reruns[0]>0
    assert 24+4*h.reruns.sum()<=passes.n<24+8*h.reruns.sum() # an attempt ends at the batch that overflows

# --- what else may hold gradients, modules or learning rates

class Scaled(nn.Module):
    "A loss function with weights of its own"
    def __init__(self):
        super().__init__()
        self.t,self.c = nn.Parameter(torch.ones(1)),nn.Parameter(torch.zeros(4))
    def forward(self, pred, y): return nn.functional.cross_entropy(pred*self.t+self.c, y)

@pytest.mark.parametrize('act,steps,acc', [(Plain, [2], 16), (Big, [], 16), (Big, [], 48), (Refuses, [3], 48)])
def test_weights_of_a_loss_function_have_the_gradients_of_the_run_that_counts(act, steps, acc):
    class Grads(Callback):
        order = 11
        def before_fit(self): self.seen = []
        def before_step(self): self.seen.append(self.loss_func.c.grad.clone())
    def run(to):
        set_seed(3)
        loss = Scaled()
        learn = classifier(lambda: net(act), fp32, [Grads(), Outlier(*steps), GradientAccumulation(acc)], n=6)
        learn.loss_func,learn.splitter = loss,lambda m: [list(m.parameters()),list(loss.parameters())]
        return fit(to(learn), 1)
    a,b = run(fp32),run(fp16)
    same_training(a, b)
    assert b.mixed_precision.n_rerun>0
    torch.testing.assert_close(torch.stack(b.grads.seen), torch.stack(a.grads.seen), rtol=3e-2, atol=1e-3)

class Adversarial(Learner):
    "Learns from inputs that were made worse"
    def _do_one_batch(self):
        x, = self.xb
        if self.training:
            x.requires_grad_()
            self.loss_func(self.model(x), *self.yb).backward()
            self.opt.zero_grad()
            self.norms.append(x.grad.norm().item())
            x = (x+0.5*x.grad/x.grad.norm(dim=1, keepdim=True)).detach()
        self.pred = self.model(x)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.detach().clone()
        self('after_loss')
        if self.training: self._do_grad_opt()

@pytest.mark.parametrize('act,steps', [(Plain, [2]), (Big, [])])
def test_gradients_of_inputs_are_those_of_the_run_that_counts(act, steps):
    def run(to):
        learn = classifier(lambda: net(act), fp32, [Outlier(*steps)], n=6)
        learn.__class__,learn.norms = Adversarial,[]
        return fit(to(learn), 1)
    a,b = run(fp32),run(fp16)
    assert b.mixed_precision.n_rerun>0==b.mixed_precision.n_skipped and len(b.norms)==6
    assert b.norms==pytest.approx(a.norms, rel=3e-2) and b.steps.losses==pytest.approx(a.steps.losses, rel=3e-2)

class Teacher(Callback):
    def __init__(self): self.nets = [nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8,4)) for _ in range(2)]
    def after_loss(self):
        for net in self.nets*self.training: self.learn.loss_grad = self.loss_grad+0.1*mse(self.pred, net(*self.xb).detach())

@pytest.mark.parametrize('act', [Plain, Big])
def test_modules_beside_the_model_have_each_batch_once(act):
    "Those of a callback, of a learner, of a `partial`, and in a list of a loss function, also in looks where nothing overflows"
    class Loss:
        def __init__(self): self.parts = [nn.BatchNorm1d(4)]
        def __call__(self, pred, y): return nn.functional.cross_entropy(pred, y)+0.1*self.parts[0](pred).mean()
    def penalised(pred, y, loss, bn): return loss(pred, y)+0.1*bn(pred).mean()
    def run(to):
        learn = classifier(lambda: net(act), fp32, [Teacher(), Outlier(4)], n=20)
        learn.loss_func = partial(penalised, loss=Loss(), bn=nn.BatchNorm1d(4))
        return fit(to(learn), 1)
    def norms(learn): return *(m[0] for m in learn.teacher.nets),learn.loss_func.keywords['bn'],learn.loss_func.keywords['loss'].parts[0]
    a,b = run(fp32),run(hot)
    assert b.mixed_precision.n_rerun>0==b.mixed_precision.n_skipped
    for m,o in zip(norms(a), norms(b)):
        assert int(o.num_batches_tracked)==int(m.num_batches_tracked)
        torch.testing.assert_close(o.running_var, m.running_var, rtol=3e-2, atol=1e-3)

def test_a_state_in_a_tuple_is_restored():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell,self.out,self.state = nn.LSTMCell(8,16),nn.Linear(16,4),(torch.zeros(16,16),torch.zeros(16,16),torch.zeros(1))
        def forward(self, x):
            if not self.training: return self.out(self.cell(x)[0])
            *now,n = self.state
            new = self.cell(x, tuple(o.clone() for o in now))
            for o,v in zip(now, new): o.copy_(v.detach())
            n.add_(1)
            return self.out(new[0])
    a,b = [fit(classifier(Cell, to, [Outlier(4)]), 1) for to in (fp32,hot)]
    assert b.mixed_precision.n_rerun>0 and b.model.state[2].item()==15
    torch.testing.assert_close(b.model.state[1], a.model.state[1], rtol=2e-2, atol=1e-3)

@pytest.mark.parametrize('event,order', [('before_step',5), ('after_backward',5), ('after_pred',0)])
def test_learning_rates_that_change_within_a_batch_change_once(event, order):
    def decay(self):
        if self.training: self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*0.9)
    Decays = type('Decays', (Callback,), {'order':order, event:decay})
    a,b = [fit(classifier(lambda: net(Plain), to, [Decays(), Outlier(3)], n=6), 1) for to in (fp32,hot)]
    assert b.mixed_precision.n_rerun>0 and b.steps.rates==a.steps.rates

def test_layers_that_are_not_used_have_zeros_where_fp32_has():
    "Momentum goes on there"
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first,self.m,self.sometimes,self.last = nn.Linear(8,8),nn.Linear(8,8),nn.Linear(8,8),nn.Linear(8,8)
            self.out,self.n = nn.Linear(8,4),0
        def forward(self, x):
            self.n += self.training
            return self.out(self.sometimes(self.m(x)) if self.n%2 else self.m(x))
    class Have(Callback):
        order = 90
        def before_fit(self): self.rows = []
        def before_step(self): self.rows.append([p.grad is not None for p in self.model.parameters()])
    a,b = [fit(classifier(Deep, to, [Have(), Outlier(3,5)]), 1) for to in (fp32,fp16)]
    assert b.mixed_precision.n_rerun>0 and b.have.rows==a.have.rows

# --- a learner's own `one_batch`

def test_batches_without_fastais_events_train_and_cannot_run_again():
    class Own(Learner):
        def one_batch(self, i, b):
            self.iter = i
            self._split(b)
            self('before_batch')
            self._do_one_batch()
            self('after_batch')
    def run(to, steps):
        learn = classifier(lambda: net(Plain), fp32, [Outlier(*steps)])
        learn.__class__ = Own
        return fit(to(learn), 1)
    a,b = run(fp32, []),run(fp16, [])
    assert b.steps.losses==pytest.approx(a.steps.losses, rel=3e-2) and len(b.mixed_precision.history)==15
    assert fit(run(fp16, [4]), 0).mixed_precision.n_skipped==1
