"A small learner, what makes it overflow or stops it, and what must hold of it"
import math,warnings
import pytest,torch
from fastai.basics import Adam,Callback,DataLoader,DataLoaders,Learner,OptimWrapper,default_device,nn,partial,set_seed
from fastai_amp16.optim.optimizer import AdamW16
from conftest import asked

both = pytest.mark.parametrize('to,dtype', [('to_fp16_dynamic',torch.float16), ('to_bf16_dynamic',torch.bfloat16)], ids=['fp16','bf16'])

def in_turn(names):
    "`names`, each in fp16 or in bf16, as parameters like those of `both`; the same in the other one is slow"
    halves = [('to_fp16_dynamic',torch.float16,'fp16'), ('to_bf16_dynamic',torch.bfloat16,'bf16')]
    return pytest.mark.parametrize('name,to,dtype', [pytest.param(o, to, dtype, id=f'{o}-{half}', marks=() if (i+k)%2==0 else slow)
                                   for i,o in enumerate(names) for k,(to,dtype,half) in enumerate(halves)])

devices = 'cpu','cuda'

slow = pytest.mark.slow

def few(names, *plain, without=(), reason=''):
    "`names` as parameters, slow but for the `plain` ones; those `without` a fault on CUDA are skipped where tests run as there"
    def marks(o): return [*[pytest.mark.not_as_cuda(reason)]*(o in without), *[slow]*(o not in plain)]
    return [pytest.param(o, marks=marks(o)) for o in names]

def not_as_cuda(names, without, reason): return few(names, *names, without=without, reason=reason)

def compare_nothing(monkeypatch):
    "No batch is compared with fp32"
    monkeypatch.setattr('fastai_amp16.diagnosis.compare.Comparison.make', lambda self, step, plan, call, call_by: call())

def mlp(bn=True): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16) if bn else nn.Identity(), nn.ReLU(), nn.Linear(16,1))

def plain_mlp(): return mlp(bn=False)

def between(*mid): return lambda: nn.Sequential(nn.Linear(8,16), *mid, nn.Linear(16,1))

class Do(nn.Module):
    "`f` as a module"
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

def times_and_back(x): return x*1e6*1e-6
def small_root(x):
    x = x*1e-5
    return torch.sqrt(x*x+1e-12)*1e5 # a power would be in fp32 on CUDA
def masked_fill(x): return x.masked_fill(x>1, -1e9).clamp(min=-1)

class Drop(nn.Module):
    "Dropout by the masks of a CPU, which are the same in all precisions"
    def __init__(self, p):
        super().__init__()
        self.p = p
    def forward(self, x):
        if not self.training: return x
        kept = torch.empty(x.shape, device='cpu').bernoulli_(1-self.p)
        return x*kept.to(x)/(1-self.p)

def dropout(p):
    "For fits that are compared number by number: on CUDA, PyTorch's own draws another mask in half precision than in fp32"
    return nn.Dropout(p) if asked=='cpu' else Drop(p)

class Called(nn.Module):
    "Four blocks of a layer and a function, which is `f` in two of them; `around(block, x)` calls each"
    def __init__(self, f, around):
        super().__init__()
        self.inp,self.out,self.around = nn.Linear(8,16),nn.Linear(16,1),around
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16,16), Do(f if i in (1,3) else torch.relu)) for i in range(4)])
    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks: x = self.around(b, x)
        return self.out(x)

def mse(p, t): return nn.functional.mse_loss(p, t)/16 # small enough for a loss scale of 2**16

class Items(list):
    "A dataset that can be exported"
    def new_empty(self): return Items()

def learner(model=mlp, n=64, bs=16, scale=1., loss_func=None, opt_func=None, lr=1e-2, shuffle=True, **kwargs):
    set_seed(0, reproducible=True)
    x = torch.randn(n, 8)
    y = scale*(x[:,:1]*x[:,1:2]+0.1)
    loaders = DataLoader(Items(zip(x, y)), bs=bs, shuffle=shuffle),DataLoader(Items(zip(x[:16], y[:16])), bs=bs)
    dls = DataLoaders(*loaders, device=default_device()) # without, fastai would train on the CPU
    return Learner(dls, model if isinstance(model, nn.Module) else model(), loss_func or mse, opt_func or drawn, lr=lr, **kwargs)

def fit(learn, n=2, lr=None, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, lr, **kwargs)
    return learn

def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]

def state(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}

def equal(a, b):
    if isinstance(a, list): return all(torch.equal(x, y) for x,y in zip(a, b))
    return all(torch.equal(v, b[k]) for k,v in a.items())

def masters(learn):
    "What must hold outside a forward pass, in a fit as well"
    assert not any(map(torch.is_autocast_enabled, devices))
    assert torch.backends.mha.get_fastpath_enabled() and isinstance(learn.model, nn.Module)
    held = {id(p) for pg in learn.opt.param_lists for p in pg}
    for p in learn.model.parameters():
        assert p.dtype in (torch.float32,torch.float64,torch.complex64) and (id(p) in held or not p.requires_grad)

def clean(learn):
    "What must hold outside a fit, a validation or a prediction"
    masters(learn)
    for m in learn.model.modules(): # what `torch.compile` returns has a `forward` of its own
        assert not hasattr(f := vars(m).get('forward'), 'patches') and (f is None or hasattr(m, '_orig_mod')), m

def process_wide():
    "What torch and Python keep for the whole process or thread, and a fit may not change"
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    autocast = nesting,torch.is_autocast_cache_enabled(),*((torch.get_autocast_dtype(o),torch.is_autocast_enabled(o)) for o in devices)
    modes = torch._C._len_torch_function_stack(),torch._C._len_torch_dispatch_stack(),torch._C._is_torch_function_enabled()
    grads = torch.is_grad_enabled(),torch.is_inference_mode_enabled()
    return autocast,modes,grads,torch.backends.mha.get_fastpath_enabled(),list(warnings.filters)

class Poison(Callback):
    """Makes the batches at `steps` overflow

    'forward': by an infinite input; 'backward': by a large gradient; 'precision': in fp16 only, in each `Detour`."""
    order = 5
    def __init__(self, steps, where): self.steps,self.where,self.i = steps,where,-1
    def before_batch(self):
        for m in self.model.modules():
            if isinstance(m, Detour): m.on = self.training and self.where=='precision' and self.i+1 in self.steps
        if not self.training: return
        self.i += 1
        if self.i in self.steps and self.where=='forward': self.learn.xb = tuple(x*math.inf for x in self.xb)
    def before_backward(self):
        if self.i in self.steps and self.where=='backward': self.learn.loss_grad = self.learn.loss_grad*1e30

said = {'forward':'The inputs of the batch are not finite', 'backward':'The gradients are too large for fp32 as well'}

def poisoned(*wheres):
    "A mark: the test gives the warnings of batches that `Poison` makes overflow there"
    return pytest.mark.warns(*map(said.get, wheres))

anywhere = pytest.mark.parametrize('where', [pytest.param(o, marks=poisoned(o)) for o in said])

class Elsewhere(torch.optim.Optimizer):
    "As a package of optimizers may have it: momentum, a state of numbers and tensors, and no closure"
    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None: continue
                state = self.state[p]
                if not state: state.update(n=0, mean=torch.zeros_like(p))
                state['n'] += 1
                state['mean'].lerp_(p.grad, 1-group['momentum'])
                p.mul_(1-group['lr']*group['weight_decay']).add_(state['mean']/(state['mean'].norm()+1e-4), alpha=-group['lr'])

torchs = partial(torch.optim.AdamW, eps=1e-5) # fastai's: by 1e-8, rounding decides where a weight goes whose gradient is nearly 0
optimizers = {'AdamW16':AdamW16, 'Adam':Adam, 'OptimWrapper':partial(OptimWrapper, opt=torchs),
              'from elsewhere':partial(OptimWrapper, opt=Elsewhere)}
drawn = partial(AdamW16, eps=1e-4) # as for `torchs`; the fixture `optimizer` draws another one

class Watch(Callback):
    "State before each batch and after it, and which events fired"
    order = 99
    def before_fit(self): self.changed,self.cancelled = [],[]
    def snapshot(self):
        s = {k: v.clone() for k,v in self.model.state_dict().items()}
        states = self.opt.state_dict()['state']
        states = states.values() if isinstance(states, dict) else states # as torch's own have it
        s.update({(i,k): torch.as_tensor(v).clone() for i,o in enumerate(states) for k,v in o.items()})
        return s
    def before_batch(self):
        if self.training: self.before = self.snapshot()
    def after_cancel_step(self): self.cancelled.append(self.train_iter)
    def after_batch(self):
        if self.training:
            now = self.snapshot()
            self.changed.append([k for k in now if k not in self.before or not torch.equal(now[k], self.before[k])])

class Raise(Callback):
    "Raises `ex` when `event` comes for one of the times `at`, counted from 1, events of training batches only"
    run_valid = False
    def __init__(self, event, ex, at=(2,), order=0):
        self.ex,self.at,self.order,self.times = ex,at,order,0
        setattr(self, event, self.boom)
    def boom(self, *args):
        self.times += 1
        if self.times in self.at: raise self.ex('now')

class Detour(nn.Module):
    "The identity; where `on`, by way of numbers that fp16 cannot hold"
    on = False
    def forward(self, x): return x*2.**20/2.**20 if self.on else x
