"What the pages on moving share: a small training, and tables whose lines are run and checked"
import math,tempfile
from contextlib import redirect_stdout
from io import StringIO
import torch
from fastai.basics import *
from fastai.callback.all import *
from fastai_amp16.all import *
from fastai_amp16.precision.names import find_modules # noqa: F401 (for the checks)
from fastai_amp16.precision.plan import is_norm # noqa: F401
from fastcore.test import *
from IPython.display import Markdown
from sklearn.datasets import load_breast_cancer

torch.set_num_threads(1) # the same numbers on any number of cores
x,y = load_breast_cancer(return_X_y=True)
x = torch.tensor((x-x.mean(0))/x.std(0), dtype=torch.float32)
y = torch.tensor(y)
tmp = tempfile.TemporaryDirectory() # for the checkpoints

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16,2))

class Rows(torch.utils.data.TensorDataset):
    def new_empty(self): return Rows(*[t[:0] for t in self.tensors]) # `learn.export` calls it

def learner(bs=64, shuffle=False, loss_func=F.cross_entropy, **kwargs):
    train,valid = [Rows(x[o], y[o]) for o in (slice(384), slice(384,None))]
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=shuffle), DataLoader(valid, bs=bs), device=default_device())
    learn = Learner(dls, network(), loss_func, path=Path(tmp.name), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

class Keep(Callback):
    "The loss of each training batch, and the true gradients of the last step, as the optimizer sees them"
    run_valid,order = False,MixedPrecision.order+2
    def __init__(self): self.losses = []
    def before_step(self): self.grads = [p.grad.clone() for p in self.learn.model.parameters()]
    def after_batch(self): self.losses.append(self.loss.item())

def params(learn): return [p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return all(torch.equal(p.to(q.device), q) for p,q in zip(a,b))

# %% tables
shown = { # names of these pages, and what a reader has instead
    'learner(': 'Learner(dls, model,', 'torchs': "torch.load('scaler.pt')", 'apexs': "torch.load('model.pt')"}

def moves(there, rows, does=None, **names):
    """A table of `rows` (what you wrote, what to write here, what changes, a check); with `does` as the heading of what the old code does

    Each row first runs the code in "here", with a fresh learner, and then its check"""
    heads = [there, does, 'here'] if does else [there, 'here', 'what changes']
    table = ['| '+' | '.join(heads)+' |', '|---|---|---|']
    for was,here,changes,check in rows:
        ns = {**globals(), **names, 'learn': learner() if 'learn.to_' in here else learner().to_fp16_dynamic()}
        with redirect_stdout(StringIO()): # says what replaces what
            exec(here, ns)
            exec(check, ns)
        for k,v in shown.items(): here = here.replace(k, v)
        was,here = ['<br>'.join(f'`{o}`' for o in code.split('\n')) for code in (was,here)]
        table.append('| '+' | '.join([was, changes, here] if does else [was, here, changes])+' |')
    return Markdown('\n'.join(table))

# %% what the checks need
def out_dtypes(learn):
    "The dtype that each module returns in training"
    seen,hooks = {},[]
    for n,m in learn.model.named_modules():
        hooks.append(m.register_forward_hook(lambda m,i,o,n=n: seen.update({n: o.dtype}) if m.training else None))
    learn.fit(1)
    for h in hooks: h.remove()
    return seen

fp16_inside = '''
d = out_dtypes(learn)
test_eq([d['0'], d['3'], learn.model[0].weight.dtype], [torch.float16, torch.float16, torch.float32])
'''

class InsideNorm(nn.BatchNorm1d):
    "Tells in which dtype it computes"
    def forward(self, x):
        if self.training: self.inside = x.dtype
        return super().forward(x)

class Whiten(nn.Module):
    "A norm that no name gives away"
    def forward(self, x):
        self.inside = x.dtype
        return (x-x.mean(0))/(x.std(0)+1e-3)

class Cancelled(Callback):
    "Counts the steps that were cancelled"
    def __init__(self): self.times = 0
    def after_cancel_step(self): self.times += 1

def huge(p, t): return F.cross_entropy(p, t)*1e6 # its gradients fit into fp32, and not into fp16 at a scale of 2**16
def lost(p, t): return F.cross_entropy(p, t)*math.inf # no precision can use it
short = ShortEpochCallback(.1) # two batches an epoch
mp_default = learner().to_fp16_dynamic().mixed_precision
