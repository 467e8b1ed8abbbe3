"Programs of optimizers, in fastai's `OptimWrapper`: those of PyTorch, of optimi, and of pytorch_optimizer"
import importlib
from functools import partial
import torch
import torch.nn.functional as F
from benchmarks.compatibility.library_programs.common import Adam,Callback,Learner,OptimWrapper,end,fitted,last,mlp,nn,rows,split

def wrapped(make, **kwargs): return partial(OptimWrapper, opt=make, **kwargs)
def lasting(learn, lr): return last(learn.fit(2, lr), end(learn)) # without a schedule: not all have a momentum

def fit(to, opt, lr=1e-2, cls=Learner, model=mlp, dls=rows, loss_func=F.cross_entropy, how=lasting, cbs=None):
    return how(to(cls(dls(), model(), loss_func, opt_func=opt, lr=lr, cbs=cbs)), lr)

def using(name, cls=Learner, **kwargs):
    "A program with the optimizer `name` of a library; arguments of `fit` are picked from those of the optimizer"
    of_fit = {k: kwargs.pop(k) for k in ('lr','model','dls','how','cbs') if k in kwargs}
    return lambda to,o: fit(to, wrapped(getattr(o, name), **kwargs), cls=cls, **of_fit)

class WithClosure(Learner):
    "Gives its optimizer a closure, which computes the loss and its gradients anew"
    def _again(self):
        self.opt.zero_grad()
        loss = self.loss_func(self.model(*self.xb), *self.yb)
        loss.backward()
        return loss
    def _step(self): self.opt.step(self._again)

def matrices(): return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False))

# %% PyTorch
def vectors(n=3): return nn.EmbeddingBag(20, n, mode='sum', sparse=True) # with sparse gradients
def vectors_and_more(): return nn.Sequential(vectors(8), nn.Linear(8, 3))

def words():
    "Sentences of five words out of twenty; the class is that of the first word"
    x = torch.randint(20, (80,5), generator=torch.Generator().manual_seed(0))
    items = [*zip(x, x[:,0]%3)]
    return split(items, 8)

def one_cycle(learn, lr): return fitted(learn)
def thawed(learn, lr):
    learn.freeze()
    learn.fit(1, lr)
    learn.unfreeze()
    learn.fit(1, slice(lr/10, lr))
    return end(learn)
def thawing(to, o):
    def halves(m): return [[*m[:2].parameters()],[*m[2:].parameters()]]
    return thawed(to(Learner(rows(), mlp(), F.cross_entropy, opt_func=wrapped(o.AdamW), splitter=halves)), 1e-2)

of_torch = {
    **{n: using(n, **kw) for n,kw in dict(AdamW={}, Adam={}, SGD=dict(momentum=0.9), RMSprop=dict(momentum=0.9, lr=1e-3), Adagrad={},
        Adadelta=dict(lr=1.), Adamax={}, NAdam={}, RAdam={}, ASGD={}, Rprop=dict(lr=1e-3), Adafactor={}).items()},
    **{f"{n}({', '.join(kw)})": using(n, **kw, momentum=0.9) if n=='SGD' else using(n, **kw)
       for n in ('AdamW','SGD','Adagrad') for kw in (dict(fused=True), dict(foreach=True))},
    'AdamW(amsgrad)': using('AdamW', amsgrad=True), 'SGD(nesterov)': using('SGD', momentum=0.9, nesterov=True),
    'Muon': using('Muon', model=matrices), 'SparseAdam': using('SparseAdam', model=vectors, dls=words),
    'SGD, sparse gradients': using('SGD', model=vectors_and_more, dls=words),
    'LBFGS': using('LBFGS', WithClosure, dls=partial(rows, bs=64), lr=1., max_iter=4), 'fit_one_cycle': using('AdamW', how=one_cycle),
    'freeze, unfreeze, a slice of learning rates': thawing}
of_torch = {k:v for k,v in of_torch.items() if k!='Muon' or hasattr(torch.optim, 'Muon')} # since torch 2.9

# %% what fp16 cannot hold: it raises, it overflows, its gradients overflow
class Hard(nn.Module):
    "A network with `code` between two of its layers"
    def __init__(self, code):
        super().__init__()
        self.body,self.head,self.code = nn.Linear(8, 16),nn.Linear(16, 3),code
    def forward(self, x): return self.head(F.relu(self.code(self.body(x))))

def fills(x): return x.masked_fill(x>9, -1e9) # PyTorch raises: -1e9 is no number of fp16
def squares(x): return ((1e3*x)*(1e3*x)).log1p()
def steep(p, y): return F.cross_entropy(p, y)*1e6
hard = {'`masked_fill` with -1e9': dict(model=lambda: Hard(fills)), 'squares of thousands': dict(model=lambda: Hard(squares)),
        'a steep loss': dict(loss_func=steep)}
hard_opts = {"fastai's Adam": Adam, 'AdamW': wrapped(torch.optim.AdamW), 'AdamW(fused)': wrapped(torch.optim.AdamW, fused=True),
             'SGD': wrapped(torch.optim.SGD, momentum=0.9)}
def rate(opt, loss_func=None, **_): return 1e-3 if opt!='SGD' else 1e-9 if loss_func else 1e-4
def failing(to, o, opt, **kwargs): return fit(to, hard_opts[opt], rate(opt, **kwargs), **kwargs)
of_hard = {f'{what}, {n}': partial(failing, opt=n, **kw) for what,kw in hard.items() for n in hard_opts}

# %% optimi
class Released(Callback):
    "Steps in the backward pass, as optimi's documentation does; with `n`, only in each `n`-th batch"
    def __init__(self, optimi, n=1): self.optimi,self.n = optimi,n
    def before_fit(self): self.optimi.prepare_for_gradient_release(self.learn.model, self.opt.opt)
    def before_batch(self):
        if self.n>1 and self.training: self.opt.opt.optimizer_accumulation = (self.train_iter+1)%self.n>0
    def after_fit(self): self.optimi.remove_gradient_release(self.learn.model)

def released(to, o, **kwargs): return fit(to, wrapped(o.AdamW, gradient_release=True), cbs=Released(o, **kwargs))
of_optimi = {
    **{o: using(o) for o in ('Adam','AdamW','RAdam','Ranger','Adan')},
    'StableAdamW': using('StableAdamW', triton=False), 'SGD': using('SGD', momentum=0.9),
    'Lion': using('Lion', lr=1e-3), 'AdamW(decouple_lr)': using('AdamW', decouple_lr=True, weight_decay=1e-5),
    'AdamW(kahan_sum)': using('AdamW', kahan_sum=True),
    'AdamW(gradient_release)': released, 'AdamW(gradient_release), accumulated': partial(released, n=2)}

# %% pytorch_optimizer
def around(name, base='AdamW', cls=Learner, **kwargs):
    "A program with an optimizer around one of PyTorch's"
    def make(o, params, **kw): return getattr(o, name)(getattr(torch.optim, base)(params, **kw), **kwargs)
    return lambda to,o: fit(to, wrapped(partial(make, o)), cls=cls)
def sam(name, **kwargs): return using(name, WithClosure, base_optimizer=torch.optim.AdamW, **kwargs)
of_pytorch_optimizer = {
    **{o: using(o) for o in ('AdaBelief','AdamP','AdEMAMix','ADOPT','Adan','CAME','Lamb','MADGRAD','Prodigy','SOAP',
                             'StableAdamW','ScheduleFreeAdamW','Shampoo','Yogi')},
    **{o: using(o, lr=1e-3) for o in ('Lion','Tiger')}, 'Ranger21': using('Ranger21', num_iterations=16),
    'Lookahead': around('Lookahead'), **{o: sam(o) for o in ('SAM','LookSAM')}}

def torchs(): return torch.optim
def library(name): return partial(importlib.import_module, name)
