"Small trainings in which half precision overflows in one way or another"
import random
from collections import Counter,OrderedDict,defaultdict,deque
import numpy as np
import pytest,torch
from fastai.basics import L,Callback,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,SGD,default_device,nn,partial,set_seed
from fastai.callback.all import GradientAccumulation,MixUp
from fastai_amp16.all import GradientNormClip
from common import Items,clean,dropout

fp32,fp16,bf16 = Learner.to_fp32,Learner.to_fp16_dynamic,Learner.to_bf16_dynamic
hot = partial(fp16, init_scale=2.**24)
momentum = partial(SGD, mom=0.9)

class Passes:
    "How often the model is called in training"
    def __init__(self, model):
        self.n = 0
        model.register_forward_pre_hook(self.note)
    def note(self, m, args): self.n += m.training

class Outlier(Callback):
    "The gradients of some batches are a million times as large as the others'"
    order = 5
    def __init__(self, *steps, by=1e6): self.steps,self.by = steps,by
    def before_backward(self):
        if self.iter in self.steps: self.learn.loss_grad = self.learn.loss_grad*self.by

class World(list):
    "Something in the world outside: not put back, since it is no plain list"

class Steps(Callback):
    "What each optimizer step was, and the loss of each batch"
    order = 80
    def before_fit(self): self.rates,self.at,self.losses = [],[],[]
    def after_step(self):
        self.rates.append(self.opt.hypers[-1]['lr'])
        self.at.append(self.iter)
    def after_batch(self):
        if self.training: self.losses.append(self.learn.loss.item())

class Sees(Callback):
    "Remembers in all ways that callbacks have; what it sees in events of a batch"
    def __init__(self, order): self.order = order
    def before_fit(self):
        self.n,self.counter,self.log,self.rows,self.hist = 0,Counter(),[],defaultdict(list),[0]*100
        self.total,self.array,self.queue,self.stats = torch.zeros(1),np.zeros(3),deque(maxlen=4),{'mean':torch.zeros(1), 'n':0}
        self.set,self.ordered,self.l,self.lazy,self.moved = set(),OrderedDict(),L(),None,None
        self.rng,self.gen,self.np_rng,self.drawn = random.Random(0),torch.Generator().manual_seed(0),np.random.default_rng(0),[]
    def note(self, event):
        if not self.training: return
        i = self.train_iter
        self.n += 1
        self.counter[event] += 1
        self.counter.update(range(5000*(event=='after_pred')))
        self.log.append((event,i))
        self.rows[event].append(i)
        self.hist[i%100] += 1
        self.total += 1
        self.array[0] += 1
        self.queue.append((event,i))
        self.stats['mean'] += 1
        self.stats['n'] += 1
        self.set.add((event,self.n))
        self.ordered[event] = self.n
        self.l.append(i)
        self.lazy = torch.zeros(1) if self.lazy is None else self.lazy.add_(1)
        self.moved = torch.full((1,), float(self.n))
        self.drawn.append((self.rng.random(), torch.rand((), generator=self.gen, device='cpu').item(), self.np_rng.random()))
    def after_pred(self): self.note('after_pred')
    def after_loss(self): self.note('after_loss')
    def before_backward(self): self.note('before_backward')
    def after_backward(self): self.note('after_backward')
    def before_step(self): self.note('before_step')
    def after_step(self): self.note('after_step')
    def after_batch(self): self.note('after_batch')

    @property
    def memory(self):
        return dict(n=self.n, counter=dict(self.counter), log=self.log, rows=dict(self.rows), hist=self.hist, total=self.total.tolist(),
            array=self.array.tolist(), queue=list(self.queue), mean=self.stats['mean'].tolist(), count=self.stats['n'], set=self.set,
            ordered=dict(self.ordered), l=list(self.l), lazy=self.lazy.tolist(), moved=self.moved.tolist(), drawn=self.drawn)

class Early(Sees): name = 'early'
class Late(Sees): name = 'late'

class Draws(nn.Module):
    "Noise and stochastic depth, by all generators there are; remembers what was drawn"
    def __init__(self):
        super().__init__()
        self.drawn = []
        self.own,self.gen = random.Random(1),torch.Generator().manual_seed(1)
    def forward(self, x):
        if not self.training: return x
        drawn = (random.random(),float(np.random.rand()),float(np.random.randn()),float(torch.rand(())),self.own.random(),
                 float(torch.rand((), generator=self.gen, device='cpu')))
        self.drawn.append(drawn)
        return x*(0.9+0.2*sum(drawn)/6)

class Big(nn.Module):
    "Numbers of 1e6 in the forward pass"
    def forward(self, x): return (x*1e6).relu()/1e6
class Fills(nn.Module):
    "Raises on half precision: the value does not fit"
    def forward(self, x): return x.masked_fill(x<0, -1e9).clamp(min=0)
class Refuses(nn.Module):
    def forward(self, x):
        if x.dtype==torch.float16: raise NotImplementedError('there is no kernel for Half')
        return x.relu()
class Plain(nn.Module):
    def forward(self, x): return x.relu()

def net(act, out=4):
    return nn.Sequential(nn.Linear(8,32), nn.BatchNorm1d(32), act(), dropout(0.2), Draws(),
                         nn.Linear(32,16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16,out))

def classifier(make, to, cbs=(), n=15, k=1., opt_func=momentum, lr=0.05, n_valid=256):
    set_seed(0, reproducible=True)
    model = make()
    x = torch.randn(16*n+n_valid, 8)
    y = (x[:,0]*x[:,1]>0).long()*2+(x[:,2]>0).long()
    items = Items(zip(x, y))
    loaders = DataLoader(items[:16*n], bs=16, shuffle=True),DataLoader(items[16*n:], bs=n_valid)
    dls = DataLoaders(*loaders, device=default_device())
    loss = CrossEntropyLossFlat() if k==1. else Times(CrossEntropyLossFlat(), k)
    return to(Learner(dls, model, loss, opt_func, lr=lr, cbs=[GradientNormClip(1.), Steps(), *cbs]))

class Times:
    def __init__(self, loss_func, k): self.loss_func,self.k = loss_func,k
    def __call__(self, *args, **kwargs): return self.loss_func(*args, **kwargs)*self.k

def same_training(a, b):
    "Steps, learning rates, losses, validation loss, random numbers and statistics of `b` are those of the fp32 training `a`"
    mp = b.mixed_precision
    assert mp.n_skipped==0 and not mp.history.skipped.any() and len(mp.history)==len(a.steps.rates)
    assert a.steps.rates==b.steps.rates and a.steps.at==b.steps.at and a.recorder.lrs==b.recorder.lrs and a.recorder.iters==b.recorder.iters
    assert b.steps.losses==pytest.approx(a.steps.losses, rel=3e-2, abs=1e-4) and len(b.recorder.losses)==len(a.recorder.losses)
    assert [v[-1] for v in b.recorder.values]==pytest.approx([v[-1] for v in a.recorder.values], rel=1e-2)
    assert (b.gradient_norm_clip.norms==pytest.approx(mp.history.grad_norm.tolist())
            and len(a.gradient_norm_clip.norms)==len(b.gradient_norm_clip.norms))
    for m,o in zip(a.model.modules(), b.model.modules()):
        if isinstance(m, Draws): assert m.drawn==o.drawn and m.own.getstate()==o.own.getstate()
        if isinstance(m, nn.BatchNorm1d):
            assert torch.equal(m.num_batches_tracked, o.num_batches_tracked)
            torch.testing.assert_close(o.running_var, m.running_var, rtol=2e-2, atol=1e-3)
    clean(b)

setups = {'plain':(lambda: [], 15), 'mixup':(lambda: [MixUp(0.4)], 15), 'accumulated':(lambda: [GradientAccumulation(32)], 30),
          'both':(lambda: [MixUp(0.4), GradientAccumulation(48)], 45)}
faults = {'scale':(Plain, hot, []), 'outliers':(Plain, fp16, [4,9,10]), 'large numbers':(Big, fp16, []), 'masked_fill':(Fills, fp16, []),
          'raises':(Refuses, hot, [7]), 'all':(Big, hot, [3])}
