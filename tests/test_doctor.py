"Each hazard in a small model that has it and in its twin that has not; nothing on models that are well; no trace"
import math,re
from functools import partial
from itertools import chain,repeat
from pathlib import Path
import pandas as pd
import pytest,torch
import torch.nn.functional as F
from fastai.basics import Adam,DataLoader,DataLoaders,Learner,OptimWrapper,QHAdam,RMSProp,set_seed
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.rnn import rnn_cbs
from fastai.callback.channelslast import ChannelsLast
from fastai.losses import BCEWithLogitsLossFlat,CrossEntropyLossFlat
from fastai.tabular.all import Categorify,Normalize,TabularDataLoaders,tabular_learner
from fastai.text.all import AWD_LSTM,get_text_classifier
from fastai.vision.models.xresnet import xresnet18
from torch import nn
from torchvision.models.resnet import BasicBlock,ResNet
from torchvision.models.convnext import CNBlockConfig,ConvNeXt
import fastai_amp16.exam as exam
import fastai_amp16.optim.optimizer as optimizers
from fastai_amp16.all import AdamW16,Checkup,Finding,register_norm,swap_module
from fastai_amp16.doctor import _device,_examine
from fastai_amp16.exam import Device
from common import not_as_cuda
from conftest import asked
from hostile import zoo

pytestmark = pytest.mark.cpu_only('what a GPU is slow at would be found, too')

def made_of(data, model, loss_func=None, opt_func=AdamW16, shuffle=False, **kwargs):
    "A learner on the samples `data`, all in one batch"
    dls = DataLoaders(DataLoader(data, bs=len(data), shuffle=shuffle), DataLoader(data, bs=len(data)), device=torch.device('cpu'))
    return Learner(dls, model, loss_func or nn.CrossEntropyLoss(), opt_func, **kwargs)

def learner(model, x=None, y=None, **kwargs):
    set_seed(0, reproducible=True)
    x = torch.randn(4, 8) if x is None else x
    y = torch.arange(len(x))%4 if y is None else y
    return made_of(list(zip(x, y)), model() if isinstance(model, type) or not isinstance(model, nn.Module) else model, **kwargs)

def images(model, n=4, size=32, **kwargs): return learner(model, torch.randn(n, 3, size, size), **kwargs)

def findings(learn, **kwargs): return [o for o in _examine(learn, **kwargs) if o.severity!='info']

def do(code, learn):
    exec(code, dict(learn=learn, nn=nn, torch=torch, partial=partial, swap_module=swap_module, BCEWithLogitsLossFlat=BCEWithLogitsLossFlat,
                    CrossEntropyLossFlat=CrossEntropyLossFlat, **{o: getattr(optimizers, o) for o in optimizers.__all__}))

def remedies(finding):
    "The code of a remedy, and that of its alternatives"
    code,*others = finding.remedy.split('\n# or ')
    return [code,*others]

# %% one hazard each
class Net(nn.Module):
    "`f` in the middle; `top` is the largest number that it takes, `empty` whether its last sample is 0"
    def __init__(self, f, ni=8, nf=8, top=None, empty=False):
        super().__init__()
        self.body,self.mid,self.head,self.top,self.empty = nn.Linear(ni, 8),f,nn.Linear(nf, 4),top,empty
    def forward(self, x):
        x = self.body(x)
        if self.top: x = x*(self.top/x.detach().abs().max().item())
        if self.empty: x = torch.cat([x[:-1], torch.zeros_like(x[-1:])])
        return self.head(self.mid(x))

class Code(nn.Module):
    def __init__(self, f, **kwargs):
        super().__init__()
        self.f = f
        for k,v in kwargs.items(): setattr(self, k, v)
    def forward(self, *args): return self.f(self, *args)

def code(f, top=None, empty=False, **kwargs): return lambda: Net(Code(f, **kwargs), top=top, empty=empty)
def gained(*shape): return nn.Parameter(torch.ones(*shape))

def mask(x): return torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)

def attend(how):
    "Attention among the samples of the batch, with a causal mask"
    def f(self, x): return how(self, x@x.T/8, mask(x)).softmax(-1)@x
    return f

def assign(self, x, mask, value):
    x = x.clone()
    x[mask] = value(x)
    return x

class WithMask(Code):
    def __init__(self, f, value):
        super().__init__(f)
        self.register_buffer('mask', torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1)>0, value))

class Gate(nn.Module):
    def __init__(self, n, act=nn.Sigmoid):
        super().__init__()
        self.fc1,self.fc2,self.act = nn.Conv2d(n, 4, 1),nn.Conv2d(4, n, 1),act()
    def forward(self, x): return x*self.act(self.fc2(F.relu(self.fc1(x.mean((2,3), keepdim=True)))))

class LinearGate(nn.Module):
    "As in SE-ResNet: all in a `Sequential`"
    def __init__(self, n):
        super().__init__()
        self.pool,self.fc = nn.AdaptiveAvgPool2d(1),nn.Sequential(nn.Linear(n, 4), nn.ReLU(), nn.Linear(4, n), nn.Sigmoid())
    def forward(self, x):
        y = self.fc(self.pool(x).view(x.shape[0], -1))
        return x*y.view(*y.shape, 1, 1).expand_as(x)

class MBConv(nn.Module):
    "The gate in a block's own code"
    def __init__(self, n):
        super().__init__()
        self.conv,self.reduce,self.expand = nn.Conv2d(n, n, 3, padding=1),nn.Conv2d(n, 4, 1),nn.Conv2d(4, n, 1)
    def forward(self, x):
        x = self.conv(x)
        return x*torch.sigmoid(self.expand(F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))

def gated(gate, gain=1e3):
    norm = nn.BatchNorm2d(8)
    nn.init.constant_(norm.weight, gain)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, gate, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

class Standardise(nn.Module):
    def forward(self, x): return (x-x.mean(-1, keepdim=True))/(x.var(-1, keepdim=True)+1e-5).sqrt()

class Norming(nn.Module):
    "A norm in the code of a module with children"
    def __init__(self):
        super().__init__()
        self.lin,self.weight = nn.Linear(8, 8),nn.Parameter(torch.ones(8))
    def forward(self, x): return self.lin(x*(x.pow(2).mean(-1, keepdim=True)+1e-6)**-0.5*self.weight)

@register_norm
class Registered(Standardise): pass

def probabilities(act, sure=True):
    "The logits of an untrained network, or of one that is sure"
    def make():
        lin = nn.Linear(8, 4)
        if sure: lin.weight.data *= 12
        return nn.Sequential(lin, act)
    return make
def bce(model): return dict(model=model, y=torch.rand(4, 4), loss_func=nn.BCELoss())
def nll(p, y): return F.nll_loss(p.log(), y)
def in_loss(p, y): return F.binary_cross_entropy(p.sigmoid(), y)
def with_logits(p, y): return F.binary_cross_entropy_with_logits(p, y)

min_ = lambda x: torch.finfo(x.dtype).min
hazards = dict( # what has it, where, how bad, words of the fact, of the remedy; what has not
    masked_fill=(code(attend(lambda s,x,m: x.masked_fill(m, -1e9))), 'mid', 'error', '-1e+09', 'torch.finfo',
        [code(attend(lambda s,x,m: x.masked_fill(m, min_(x)))), code(attend(lambda s,x,m: x.masked_fill(m, -torch.inf))),
         code(attend(lambda s,x,m: x.float().masked_fill(m, -1e9)))]),
    masked_add=(code(attend(lambda s,x,m: x+m.to(x.dtype)*-1e9)), 'mid', 'warning', '-1e+09', 'torch.finfo',
        [code(attend(lambda s,x,m: x+m.to(x.dtype)*-1e4)),
         code(attend(lambda s,x,m: x+(m.float()*torch.finfo(torch.float32).min).to(x.dtype)))]), # the smallest number is meant
    setitem=(code(attend(partial(assign, value=lambda x: -1e9))), 'mid', 'error', '-1e+09', 'torch.finfo',
        [code(attend(partial(assign, value=min_)))]),
    where=(code(attend(lambda s,x,m: torch.where(m, -1e9, x))), 'mid', 'warning', '-1e+09', 'torch.finfo',
        [code(attend(lambda s,x,m: torch.where(m, min_(x), x)))]),
    mask_buffer=(lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask.to(x.dtype)), -1e9)), 'mid', 'warning', '1e+09', 'torch.finfo',
        [lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask.to(x.dtype)), -1e4)),
         lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask), -1e9))]),
    fused_attention=(lambda: Net(WithMask(lambda s,x: F.scaled_dot_product_attention(x[None], x[None], x[None], s.mask)[0], -1e9)),
        'mid', 'warning', '1e+09', 'torch.finfo',
        [lambda: Net(WithMask(lambda s,x: F.scaled_dot_product_attention(x[None], x[None], x[None], s.mask)[0], -torch.inf))]),
    gain=(code(lambda s,x: x*1e6/1e6), 'mid', 'error', '1e+06', 'keep_fp32', [code(lambda s,x: x/1e6*1e6), code(lambda s,x: x*1e-6)]),
    eps_log=(code(lambda s,x: (x.relu()+1e-10).log()), 'mid', 'error', '1e-10', 'in its code', [code(lambda s,x: (x.relu()+1e-3).log())]),
    **{name: (code(f, empty=True, **kw), 'mid', 'error', fact, remedy, [code(f, **kw), *twins])
       for name,(f,kw,fact,remedy,twins) in dict(
        eps_div=(lambda s,x: x/(x.norm(dim=-1, keepdim=True)+s.eps), dict(eps=1e-8), '1e-08', 'mid\').eps = 1e-4',
            [code(lambda s,x: x/(x.norm(dim=-1, keepdim=True)+1e-4), empty=True)]),
        eps_clamp=(lambda s,x: x*x.abs().sum(-1, keepdim=True).clamp(min=1e-12).reciprocal(), {}, '1e-12', 'in its code',
            [code(lambda s,x: x.clamp(min=1e-12), empty=True), code(lambda s,x: x+1e-8, empty=True)]),
        normalize=(lambda s,x: F.normalize(x), {}, '1e-12', 'in its code',
            [code(lambda s,x: F.normalize(x, eps=1e-4), empty=True), code(lambda s,x: F.normalize(x.float()), empty=True)])).items()},
    eps_small=(code(lambda s,x: 0.1*x/(x.norm(dim=-1, keepdim=True)+1e-8), top=2e-6), 'mid', 'warning', '1e-08', 'in its code',
        [code(lambda s,x: 0.1*x/(x.norm(dim=-1, keepdim=True)+1e-8), top=1e-4)]),
    cosine=(code(lambda s,x: s.cos(x, x[:1])[:,None]*x, empty=True, cos=nn.CosineSimilarity()), 'mid.cos', 'error', '1e-08',
        "mid.cos').eps = 1e-4", [code(lambda s,x: s.cos(x, x[:1])[:,None]*x, cos=nn.CosineSimilarity()),
         code(lambda s,x: s.cos(x, x[:1])[:,None]*x, empty=True, cos=nn.CosineSimilarity(eps=1e-3)),
         code(lambda s,x: F.cosine_similarity(x, x[:1], -1, 1e-3)[:,None]*x, empty=True)]),
    logsumexp=(code(lambda s,x: x-x.exp().sum(-1, keepdim=True).log(), top=8), 'mid', 'warning', 'logsumexp', 'torch.logsumexp',
        [code(lambda s,x: x-x.exp().sum(-1, keepdim=True).log()), code(lambda s,x: x-x.logsumexp(-1, keepdim=True), top=8),
         code(lambda s,x: x-(x-x.amax()).exp().sum(-1, keepdim=True).log(), top=8)]),
    logsumexp_fails=(code(lambda s,x: x-x.exp().sum(-1, keepdim=True).log(), top=20), 'mid', 'error', 'logsumexp', 'torch.logsumexp', []),
    logsumexp_of_nothing=(code(lambda s,x: (x-16).exp().sum(-1, keepdim=True).log()+x, top=8), 'mid', 'warning', 'logsumexp',
        'torch.logsumexp', [code(lambda s,x: (x-3).exp().sum(-1, keepdim=True).log()+x)]),
    softplus=(code(lambda s,x: torch.log(1+torch.exp(x)), top=8), 'mid', 'warning', 'softplus', 'F.softplus',
        [code(lambda s,x: torch.log(1+torch.exp(x))), code(lambda s,x: F.softplus(x), top=8)]),
    log_softmax=(code(lambda s,x: x.softmax(-1).log(), top=10), 'mid', 'warning', 'softmax', 'F.log_softmax',
        [code(lambda s,x: x.softmax(-1).log()), code(lambda s,x: x.log_softmax(-1), top=10)]),
    rms=(lambda: Net(Norming(), top=60), 'mid', 'warning', 'by hand', "'mid.'",
        [lambda: Net(Norming()), lambda: Net(nn.RMSNorm(8), top=60), code(lambda s,x: x*s.weight, top=60, weight=2.)]),
    rms_fails=(lambda: Net(Norming(), top=3e3), 'mid', 'error', 'by hand', "'mid.'", [lambda: Net(nn.RMSNorm(8), top=3e3)]),
    rms_small=(lambda: Net(Norming(), top=1e-4), 'mid', 'error', 'by hand', "'mid.'", [lambda: Net(nn.RMSNorm(8), top=1e-4)]),
    standardise=(lambda: Net(Standardise(), top=60), 'mid', 'warning', 'by hand', "'mid'",
        [lambda: Net(Standardise()), lambda: Net(Registered(), top=60), code(lambda s,x: (x-0.5)/0.2, top=60),
         code(lambda s,x: x/x.float().std(), top=60)]),
    gain_first=(code(lambda s,x: s.g*x*torch.rsqrt(x.pow(2).mean(-1, keepdim=True)+1e-5), top=60, g=gained(8)),
        'mid', 'warning', 'by hand', "'mid'",
        [code(lambda s,x: s.g*x*torch.rsqrt(x.pow(2).mean(-1, keepdim=True)+1e-5), g=gained(8)),
         code(lambda s,x: s.g*x*torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)+1e-5), top=60, g=gained(8)),
         code(lambda s,x: s.g*x*s.g.pow(2).mean().rsqrt(), top=60, g=gained(8))]),
    annotated=(code(lambda s,x: s.g*(x-x.mean(-1, keepdim=True))/(x.std(-1, keepdim=True)+1e-5), top=1e-6, g=gained(8)),
        'mid', 'error', 'by hand', "'mid'",
        [code(lambda s,x: s.g*(x-x.mean(-1, keepdim=True))/(x.std(-1, keepdim=True)+1e-5), top=top, g=gained(8)) for top in (1,60)]),
    sum_of_squares=(code(lambda s,x: x/((x*x).sum(-1, keepdim=True)/8+s.eps).sqrt(), top=60, eps=nn.Parameter(torch.full((1,), 1e-5))),
        'mid', 'warning', 'by hand', "'mid'",
        [code(lambda s,x: x/((x*x).sum(-1, keepdim=True)/8+s.eps).sqrt(), eps=nn.Parameter(torch.full((1,), 1e-5)))]))

def is_harmless(learn):
    "Nothing, or something that is good to know: nothing is to be kept in fp32"
    c = learn.fp16_doctor()
    return not [o for o in c if o.severity!='info'] and not any(o.keep for o in c) and not c.remedy

fp32_on_cuda = 'eps_div eps_clamp normalize eps_small cosine logsumexp logsumexp_fails logsumexp_of_nothing softplus log_softmax rms \
rms_fails rms_small gain_first'.split()

@pytest.mark.parametrize('name', not_as_cuda(hazards, fp32_on_cuda, 'autocast computes powers, `exp`, sums, norms and `softmax` in fp32'))
def test_hazard(name):
    model,module,severity,fact,remedy,twins = hazards[name]
    found = findings(learner(model))
    if name=='where' and 'this raises an error' in found[0].fact: severity = 'error' # in torch 2.6
    assert [(o.severity,o.module) for o in found]==[(severity,module)] and fact in found[0].fact and remedy in found[0].remedy, found
    for code in remedies(found[0]):
        learn = learner(model)
        do(code, learn)
        assert not findings(learn), code
    for twin in twins: assert is_harmless(learner(twin))

@pytest.mark.parametrize('name', fp32_on_cuda)
@pytest.mark.skipif(asked=='cpu', reason='a CPU computes these in half precision')
def test_what_cuda_computes_in_fp32_is_no_hazard_there(name): assert is_harmless(learner(hazards[name][0]))

fp32_softmax = pytest.mark.not_as_cuda('autocast computes `softmax` in fp32')

@pytest.mark.parametrize('hazard,module,remedy,twins', [
    (bce(probabilities(nn.Sigmoid())), '1', 'swap_module',
     [dict(model=probabilities(nn.Identity()), y=torch.rand(4, 4), loss_func=nn.BCEWithLogitsLoss()),
      bce(probabilities(nn.Sigmoid(), sure=False))]),
    (bce(probabilities(Code(lambda s,x: x.sigmoid().clamp(1e-4, 1-1e-4)))), '1', 'BCEWithLogitsLossFlat',
     [bce(probabilities(Code(lambda s,x: x.float().sigmoid()))),
      bce(probabilities(Code(lambda s,x: x.sigmoid().clamp(1e-4, 1-1e-4)), sure=False))]),
    pytest.param(dict(model=probabilities(nn.Softmax(-1)), loss_func=nll), '1', 'CrossEntropyLossFlat',
     [dict(model=probabilities(nn.LogSoftmax(-1)), loss_func=nn.NLLLoss()),
      dict(model=probabilities(nn.Softmax(-1), sure=False), loss_func=nll)], marks=fp32_softmax)],
    ids=['module', 'code', 'softmax'])
def test_loss(hazard, module, remedy, twins):
    found = findings(learner(**hazard))
    assert [(o.severity,o.module) for o in found]==[('warning',module)] and 'loss' in found[0].fact and remedy in found[0].remedy
    for i,code in enumerate(remedies(found[0])):
        learn = learner(**hazard)
        do(code, learn)
        assert not findings(learn) or (i==0 and 'and no' in code)
    for twin in twins: assert is_harmless(learner(**twin))

@pytest.mark.parametrize('hazard', [bce(probabilities(nn.Sigmoid())),
    pytest.param(dict(model=probabilities(nn.Softmax(-1)), loss_func=nll), marks=fp32_softmax),
    pytest.param(dict(model=lambda: nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2, 4, 1), Code(lambda s,x: 12*x), nn.Softmax(1)),
                      y=torch.arange(16).view(4,2,2)%4, loss_func=nll), marks=fp32_softmax)], ids=['sigmoid','softmax','pixels'])
def test_predictions_are_probabilities_after_the_remedy_as_well(hazard):
    learn = learner(**hazard)
    code,*_ = remedies(findings(learn)[0])
    with learn.no_bar():
        before,loss = learn.get_preds()[0],learn.validate()[0]
        do(code, learn)
        assert learn.loss_func.__class__.__name__.endswith('Flat') and not torch.equal(learn.model(learn.dls.valid.one_batch()[0]), before)
        torch.testing.assert_close(learn.get_preds()[0], before)
        assert learn.validate()[0]==pytest.approx(loss, rel=1e-3)

def test_what_is_good_to_know_of_a_loss():
    "Without the numbers that make it a hazard, it has a remedy all the same"
    info, = [o for o in learner(**bce(probabilities(nn.Sigmoid(), sure=False))).fp16_doctor() if 'sigmoid' in o.fact]
    assert info.severity=='info' and info.remedy.endswith('BCEWithLogitsLossFlat()') and 'keep_fp32' not in info.remedy

def test_a_sigmoid_in_the_loss_computes_in_fp32():
    def infos(loss_func):
        return [o.fact for o in learner(nn.Linear(8, 4), y=torch.rand(4, 4), loss_func=loss_func).fp16_doctor() if 'loss' in o.fact]
    assert len(infos(in_loss))==1 and not infos(with_logits)

@pytest.mark.parametrize('gate,module', [(Gate,'2'), (LinearGate,'2'), (MBConv,'2')])
def test_gate(gate, module):
    def make(): return images(gated(gate(8)), size=8)
    found = findings(make())
    assert [(o.severity,o.module) for o in found]==[('warning',module)] and 'Squeeze' in found[0].fact
    assert ('swap_module(learn.model, nn.Sigmoid, nn.Hardsigmoid)' in found[0].remedy)==(gate is not MBConv)
    assert is_harmless(images(gated(gate(8), gain=1.), size=8))
    for code in remedies(found[0]):
        learn = make()
        do(code, learn)
        assert not findings(learn)

def test_gates_that_are_none():
    assert not findings(images(gated(Gate(8, nn.Hardsigmoid)), size=8))
    assert not findings(images(gated(nn.Sequential(nn.Conv2d(8, 16, 1), nn.GLU(1))), size=8)) # as many gates as positions

def test_a_sigmoid_elsewhere_is_not_swapped():
    found, = findings(images(gated(nn.Sequential(Gate(8), nn.Sigmoid())), size=8))
    assert 'swap_module' not in found.remedy and found.module=='2.0'

def test_equal_findings_are_one():
    found, = findings(images(gated(nn.Sequential(Gate(8), Gate(8))), size=8))
    assert (found.module,found.others)==('2.0',['2.1']) and "keep_fp32=['2.0', '2.1']" in found.remedy

def test_what_is_kept_is_added_to():
    large = code(lambda s,x: s.lin(x*1e6/1e6), lin=nn.Linear(8, 8))
    learn = learner(lambda: nn.Sequential(large(), nn.Linear(4, 4))).to_fp16_dynamic(keep_fp32=['1'])
    assert findings(learn)[0].remedy=="learn.to_fp16_dynamic(keep_fp32=['1', '0.mid.'])"

def test_a_model_that_differs_from_run_to_run():
    "As one that draws from a generator with a seed of its own: half precision is not to blame"
    factors = chain([1.], repeat(0.1))
    c = learner(code(lambda s,x: x*next(factors))).fp16_doctor()
    assert all(o.severity=='info' for o in c) and c.report.verdict=='healthy' and not c.remedy

def test_a_gradient_counts_at_a_loss_scale_that_can_move():
    "A gate with room forward: its gradient overflows at 2^16 at first, which the scale answers; a static scale does not"
    def loss(p, t): return 10*F.cross_entropy(p, t)
    def make(**kwargs): return images(gated(Gate(8), gain=100.), size=8, loss_func=loss).to_fp16_dynamic(**kwargs)
    assert is_harmless(make()) and any('Squeeze' in o.fact for o in findings(make(dynamic=False, init_scale=2.**12)))

def test_a_batch_that_overflows():
    def make(): return learner(Net(nn.Identity()), 1e6*torch.randn(4, 8))
    found, = findings(make())
    assert (found.severity,found.module)==('error','body') and make().fp16_doctor().report.verdict=='forward'
    learn = make()
    do(found.remedy, learn)
    assert learn.fp16_doctor().report.verdict!='forward'

def test_headroom():
    def make(top): return learner(code(lambda s,x: x/x.detach().abs().max()*s.by/s.by, by=top))
    found, = findings(make(5e4))
    assert (found.severity,found.module)==('warning','mid') and '0.4 bits' in found.fact
    learn = make(5e4)
    do(found.remedy, learn)
    assert not findings(learn) and not findings(make(1e4))

class Located(nn.Module):
    "Sines of positions, computed in half precision, next to a path that hides how wrong they are at first"
    def __init__(self):
        super().__init__()
        self.angles,self.head,self.skip = nn.Linear(1, 12, bias=False),nn.Linear(12, 1),nn.Linear(1, 1)
        self.angles.weight.data = torch.linspace(0.05, 2.5, 12)[:,None]
    def forward(self, t): return self.head(self.angles(t).sin())*0.01+self.skip((t-t.mean())/8)

@pytest.mark.parametrize('bf16', [False,True])
def test_what_is_lost_in_silence(bf16):
    def make(start, **kwargs):
        learn = learner(Located, torch.arange(start, start+32.)[:,None], torch.zeros(32, 1), loss_func=nn.MSELoss())
        return (learn.to_bf16_dynamic if bf16 else learn.to_fp16_dynamic)(**kwargs)
    learn = make(4000)
    found, = findings(learn)
    assert (found.severity,found.module)==('warning','angles') and '`linear` computes with numbers up to 1.008e+04' in found.fact
    assert f'in steps of {64 if bf16 else 8}: its results differ' in found.fact and 'angles' in found.remedy
    c = learn.fp16_doctor()
    row = c.report.table.set_index('module').loc['angles']
    assert [f'{row[o]:.1f}</td>' in c._repr_html_() for o in ('bits','lost')]==[True]*2 # in the table, next to each other
    do(found.remedy, learn)
    assert not findings(learn) and not findings(make(0))

def test_bits_that_modules_lose():
    "A level is all that a number loses its bits to: half of the gap between two numbers there, next to the spread of what is on it"
    net,x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)),torch.randn(64, 8)
    net[1].bias.data += 1000.
    table = learner(lambda: net, x).to_fp16_dynamic().diagnose_fp16().table.set_index('module')
    with torch.no_grad():
        y = net(x).double()
        with torch.autocast('cpu', torch.float16): off = (net(x)-y).norm()/(y-y.mean(0)).norm()
    assert table.lost['0']<1 and table.lost['1']==pytest.approx(math.log2(off*2**11), abs=0.1)

def test_bad_data_and_weights():
    found, = findings(learner(Net(nn.Identity()), torch.full((4, 8), torch.nan)))
    assert found.severity=='error' and 'inputs' in found.fact
    learn = learner(Net(nn.Identity()))
    learn.model.head.weight.data[0,0] = torch.inf
    assert [(o.severity,o.module) for o in findings(learn)]==[('error','head')]

def test_bf16_takes_what_fp16_cannot():
    for name in ('masked_fill','masked_add','gain','eps_log','eps_clamp'): assert not findings(learner(hazards[name][0]).to_bf16_dynamic())
    assert findings(learner(**bce(probabilities(nn.Sigmoid()))).to_bf16_dynamic())[0].remedy.endswith(
        "learn.to_bf16_dynamic(keep_fp32=['1'])")

# %% weights, optimizer, device
def test_half_weights():
    learn = learner(lambda: Net(nn.Linear(8, 8).half()))
    found, = learn.fp16_doctor()
    assert (found.severity,found.module)==('error','mid') and 'mid.weight' in found.fact
    do(found.remedy, learn)
    assert not findings(learn)

def test_bf16_weights():
    def make(): return learner(Net(nn.Linear(8, 8)).bfloat16().float())
    found, = findings(make())
    assert (found.severity,found.remedy)==('warning','learn.to_bf16_dynamic()')
    learn = make()
    do(found.remedy, learn)
    assert not findings(learn) and not findings(learner(Net(nn.Linear(8, 8)).half().float()))
    assert 'emulates' in findings(make(), device=Device('cuda', 'Tesla T4', (7,5), True))[0].remedy
    ones = learner(Net(nn.Identity()))
    for p in ones.model.parameters(): nn.init.ones_(p)
    assert not findings(ones)

@pytest.mark.parametrize('opt_func,bad', [(RMSProp,True), (QHAdam,True), (partial(OptimWrapper, opt=torch.optim.AdamW),True),
                                          (Adam,False), (AdamW16,False)])
def test_optimizer(opt_func, bad):
    def eps(learn): return [o for o in learn.fp16_doctor() if 'eps' in o.fact]
    for fitted in (False,True):
        learn = learner(nn.Linear(8, 4), opt_func=opt_func)
        if fitted: learn.create_opt()
        assert [o.severity for o in eps(learn)]==['info']*bad and (learn.opt is not None)==fitted
        if bad:
            do(eps(learn)[0].remedy, learn)
            assert not eps(learn)

@pytest.mark.parametrize('knows', [True,False])
def test_recurrent_layers_in_bf16(knows, monkeypatch):
    "Where cuDNN does not know them in bf16 they stay in fp32, and the doctor says so"
    monkeypatch.setattr('fastai_amp16.doctor.cudnn_has_bf16', lambda: knows)
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn,self.out = nn.GRU(8, 8, batch_first=True),nn.Linear(8, 4)
        def forward(self, x): return self.out(self.rnn(x[:,None])[0][:,0])
    learn = learner(Rows).to_bf16_dynamic(keep_fp32='rnn')
    found = [o for o in findings(learn, device=Device('cuda', 'NVIDIA A100-SXM4-40GB', (8,0))) if 'cuDNN' in o.fact]
    assert [o.module for o in found]==([] if knows else ['rnn'])

T4,V100,A100 = (Device('cuda', 'Tesla T4', (7,5), True),Device('cuda', 'Tesla V100-SXM2-16GB', (7,0), True),
                Device('cuda', 'NVIDIA A100-SXM4-40GB', (8,0)))
@pytest.mark.parametrize('device,fp16,bf16', [
    (T4, '', 'to_fp16_dynamic'), (V100, '', 'to_fp16_dynamic'), (A100, '', ''),
    (Device('cuda', 'NVIDIA GeForce GTX 1650', (7,5), True), 'to_fp32', 'to_fp32'),
    (Device('cuda', 'NVIDIA T1000', (7,5), True), 'to_fp32', 'to_fp32'),
    (Device('cuda', 'NVIDIA GeForce GTX 1080', (6,1), True), 'to_fp32', 'to_fp32'),
    (Device('cuda', 'NVIDIA GeForce RTX 2080', (7,5), True), '', 'to_fp16_dynamic'),
    (Device('cpu'), 'to_fp32', 'to_fp32'), (Device('cpu', fast=['bf16']), 'to_bf16_dynamic', ''),
    (Device('cpu', fast=['fp16']), '', 'to_fp16_dynamic'), (Device('mps'), '', '')],
    ids=lambda o: getattr(o, 'name', None))
def test_device(device, fp16, bf16):
    for dtype,remedy in ((torch.float16,fp16),(torch.bfloat16,bf16)):
        found = list(_device(device, dtype))
        assert bool(found)==bool(remedy) and (not found or remedy in found[0].remedy)

@pytest.mark.parametrize('has,fast', [({}, []), (dict(avx512_bf16=True), ['bf16']), (dict(amx_bf16=True, amx_fp16=True), ['fp16','bf16']),
                                      (dict(bf16=True), ['bf16'])])
def test_instructions_of_a_cpu(has, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: has, raising=False)
    assert Device.of(torch.device('cpu')).fast==fast
    monkeypatch.delattr(torch.cpu, 'get_capabilities') # torch 2.6 does not tell
    assert not list(_device(Device.of(torch.device('cpu')), torch.float16))

def test_this_device(): assert Device.of(torch.device('cpu')).type=='cpu' and not findings(learner(nn.Linear(8, 4)))

def test_sizes():
    def net(*sizes): return nn.Sequential(*[o for a,b in zip(sizes, sizes[1:]) for o in (nn.Linear(a, b), nn.ReLU())][:-1])
    def speed(device, *sizes):
        return [o for o in _examine(learner(net(*sizes), torch.randn(4, sizes[0])), device=device) if o.severity=='speed']
    found, = speed(T4, 8, 50, 8, 30, 4)
    assert (found.module,found.others)==('0',['2','4','6']) and '50, 30' in found.fact and '56 instead of 50' in found.remedy
    assert (not speed(T4, 7, 16, 8, 5) and not speed(Device('cpu'), 8, 50, 4)
            and not speed(Device('cuda', 'GTX 1080', (6,1)), 8, 50, 4)[1:])

def test_memory_format():
    learn = well['torch_convnext']()
    found, = findings(learn, device=T4)
    assert found.severity=='speed' and 'NHWC' in found.fact
    do(found.remedy, learn)
    assert learn._grab_cbs(ChannelsLast) and not learn._grab_cbs(MixedPrecision) and not findings(learn, device=T4)

# %% what is well
class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.enc = nn.Embedding(20, 16),nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 4)
    def forward(self, x): return self.head(self.enc(self.emb(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])).mean(1))

class LayerNorm2d(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight,self.bias = nn.Parameter(torch.ones(n, 1, 1)),nn.Parameter(torch.zeros(n, 1, 1))
    def forward(self, x):
        u = x.mean(1, keepdim=True)
        return (x-u)/((x-u).pow(2).mean(1, keepdim=True)+1e-6).sqrt()*self.weight+self.bias

class Block(nn.Module):
    "ConvNeXt's as timm has it, and as its authors have it for images"
    def __init__(self, n, norm=None):
        super().__init__()
        self.dw,self.norm = nn.Conv2d(n, n, 7, padding=3, groups=n),norm or nn.LayerNorm(n, eps=1e-6)
        self.fc1,self.act,self.fc2,self.gamma = nn.Linear(n, 4*n),nn.GELU(),nn.Linear(4*n, n),nn.Parameter(1e-6*torch.ones(n))
    def forward(self, x):
        y = self.dw(x)
        y = self.norm(y).permute(0, 2, 3, 1) if isinstance(self.norm, LayerNorm2d) else self.norm(y.permute(0, 2, 3, 1))
        return x+(self.gamma*self.fc2(self.act(self.fc1(y)))).permute(0, 3, 1, 2)

def convnext(norm=None):
    return lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 4), LayerNorm2d(16), Block(16, norm),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

def tabular():
    set_seed(0)
    df = pd.DataFrame(dict(a=torch.randn(64), b=torch.randn(64), c=list('xyz!')*16, y=torch.randn(64)))
    return tabular_learner(TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a','b'],
                                                      y_names='y', bs=16),
                           layers=[32,16], n_out=1)

def awd():
    config = dict(emb_sz=16, n_hid=24, n_layers=2, pad_token=1, bidir=False, output_p=.1, hidden_p=.1, input_p=.1, embed_p=.1, weight_p=.1)
    return learner(lambda: get_text_classifier(AWD_LSTM, 30, 4, config=config, max_len=40, lin_ftrs=[48]),
                   torch.randint(2, 30, (4, 20)), cbs=rnn_cbs())

well = dict(resnet_pair=lambda: images(lambda: ResNet(BasicBlock, [2,2,1,1]), n=2),
    xresnet=lambda: images(lambda: xresnet18(n_out=4, widen=0.5)),
    convnext=lambda: images(convnext()), convnext_2d=lambda: images(convnext(LayerNorm2d(16))),
    torch_convnext=lambda: images(lambda: ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=4)),
    tabular=tabular, transformer=lambda: learner(Text, torch.randint(20, (4, 8))), awd_lstm=awd, mlp=lambda: learner(Net(nn.ReLU())))

@pytest.mark.parametrize('name', well)
def test_nothing_on_what_is_well(name):
    learn = well[name]()
    assert not findings(learn)
    assert all('NHWC' in o.fact for o in findings(learn, device=T4))

def test_memory_that_nobody_wrote_is_no_overflow():
    "Stochastic depth draws its mask into `torch.empty`, which gives NaN in half precision here"
    def depth(s, x):
        torch.use_deterministic_algorithms(x.dtype==torch.float16)
        return x*x.new_empty(len(x), 1).bernoulli_(0.5)
    try: c = learner(code(depth)).fp16_doctor()
    finally: torch.use_deterministic_algorithms(False)
    assert c.report.verdict=='healthy' and not c.report.table.nonfinite.any() and all(o.severity=='info' for o in c)

@pytest.mark.parametrize('name', not_as_cuda(zoo, ['sum_pool','poisson','cosine'], 'autocast computes `exp`, sums and norms in fp32'))
def test_zoo(name):
    "What cannot be trained in plain fp16 is named, at the place; what is wrong with it is seen at times only in the batch"
    named = dict(regnety=('stem.0','gives numbers','trunk_output.0.f.4','Squeeze'), norm_free=('blocks.','gives numbers'),
        masked_add=('attns.0','-1e+09'), masked_fill=('attns.0','-1e+09'),
        large_logits=('','matmul'), rms_inline=('1','by hand'), sum_pool=('','sum'), poisson=('','exp'),
        cosine=('3','1e-08'), sigmoid_bce=('act','sigmoid'), large_units=('','200000'),
        broken_pixels=('0','gives numbers'), backward_only=('1','sqrt'))
    found = findings(zoo[name].make(0))
    where = named.get(name, ()) # `rms` is kept in fp32 by its name; `tiny_loss` asks for a loss scale and an optimizer, which it has
    for module,fact in zip(where[::2], where[1::2]):
        assert any((o.module or '').startswith(module) and fact in o.fact for o in found), found
    assert bool(found)==bool(where)

# %% no trace
class Noisy(nn.Module):
    "Draws random numbers and remembers"
    def __init__(self):
        super().__init__()
        self.lin,self.bn,self.drop,self.calls = nn.Linear(8, 4),nn.BatchNorm1d(4),nn.Dropout(),0
    def forward(self, x):
        self.calls += 1
        return self.drop(self.bn(self.lin(x)))/1e9*1e9

@pytest.mark.parametrize('to', [None,'to_fp16_dynamic','to_bf16_dynamic'])
@pytest.mark.parametrize('fitted', [False,True])
def test_no_trace(to, fitted):
    def make():
        set_seed(0, reproducible=True)
        learn = made_of([(torch.randn(8), torch.tensor(i%4)) for i in range(8)], Noisy(), shuffle=True)
        if to: getattr(learn, to)()
        with learn.no_bar(), learn.no_logging():
            if fitted: learn.fit(1)
        return learn
    def rest(learn):
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
        return [*learn.model.state_dict().values(), torch.rand(1),
                torch.stack([x for x,_ in learn.dls.train]), torch.tensor(learn.model.calls)]
    learn = make()
    before,keys,rng = {k: v.clone() for k,v in learn.model.state_dict().items()},dict(vars(learn)),torch.get_rng_state()
    learn.fp16_doctor()
    assert vars(learn)==keys and torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or 'forward' in vars(m) for m in learn.model.modules())
    assert not nn.modules.module._global_forward_hooks and all(p.grad is None for p in learn.model.parameters()) or fitted
    assert all(torch.equal(a, b) for a,b in zip(rest(learn), rest(make())))

def test_what_fp32_raises_is_raised():
    learn = learner(Net(nn.Linear(3, 8)))
    with pytest.raises(RuntimeError, match='shapes'): learn.fp16_doctor()
    assert learn.model.training and 'forward' not in vars(learn.model)

# %% the result
def test_checkup():
    found = [Finding('info', None, 'Good <b>.', 'learn.to_fp32()'), Finding('error', '', 'Bad.', '{keep}', ['.']),
             Finding('warning', 'a', 'So so.', '{keep}', ['a']), Finding('warning', 'b', 'So so.', '{keep}', ['b'])]
    c = Checkup(found)
    assert [o.severity for o in c]==['error','warning','info'] and c[1].remedy=="learn.to_fp16_dynamic(keep_fp32=['a', 'b'])"
    assert "keep_fp32=['.', 'a', 'b']" in str(c) and 'a and 1 more: So so.' in str(c) and '(the model)' in str(c)
    same = Checkup([Finding('error', 'a', 'Bad.', '{keep}', ['a']), Finding('warning', 'b', 'So so.', '{keep}', ['b','a'])])
    assert c.remedy and not same.remedy # a single finding keeps all of them, in another order
    html = c._repr_html_()
    assert 'Good &lt;b&gt;.' in html and 'color:inherit' in html and 'rgba(' in html
    assert 'No findings' in str(Checkup()) and 'No findings' in Checkup()._repr_html_()

def test_public_names():
    import fastai_amp16.doctor
    assert set(fastai_amp16.doctor.__all__)=={'Checkup','swap_module'}

# %% swap_module
class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Sigmoid()
        self.deep,self.again,self.none = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid())),self.act,None
        self.register_module('missing', None)
    def forward(self, x): return self.again(self.deep(self.act(x)))

def test_swap_module():
    m = Tree().eval()
    names = [n for n,_ in m.named_modules(remove_duplicate=False)]
    assert swap_module(m, nn.Sigmoid, nn.Hardsigmoid) is m
    assert [n for n,_ in m.named_modules(remove_duplicate=False)]==names and m.act is m.again
    assert isinstance(m.act, nn.Hardsigmoid) and isinstance(m.deep[1][0], nn.Hardsigmoid) and not any(o.training for o in m.modules())
    x = torch.randn(2, 4)
    assert torch.equal(m(x), F.hardsigmoid(F.hardsigmoid(m.deep[0](F.hardsigmoid(x)))))

def test_swap_module_by_a_function_of_the_old():
    m = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)).to('meta')
    swap_module(m, nn.BatchNorm2d, lambda o: nn.GroupNorm(2, o.num_features))
    assert all(isinstance(o, nn.GroupNorm) and o.num_channels==8 for o in m[1:]) and m[1] is not m[2] and m[1].weight.device.type=='meta'
    swap_module(m, nn.GroupNorm, lambda o: nn.Sequential(o, nn.ReLU())) # what holds the old one
    assert isinstance(m[1][0], nn.GroupNorm)

def test_swap_module_leaves_what_is_never_called():
    m = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=nn.ReLU())
    out_proj = m.self_attn.out_proj
    swap_module(m, nn.Linear, lambda o: nn.Linear(o.in_features, o.out_features))
    assert m.self_attn.out_proj is out_proj
    swap_module(m, nn.ReLU, nn.Tanh).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(): fast = m(x)
    assert torch.allclose(fast, m(x), atol=1e-5) # without gradients torch takes a path of its own

@pytest.mark.parametrize('args,error,match', [((nn.Sigmoid(), nn.Sigmoid, nn.Hardsigmoid), ValueError, 'itself'),
    ((Tree(), nn.Tanh, nn.ReLU), ValueError, 'no Tanh in this Tree.*Linear'),
    ((Tree(), nn.Sigmoid, nn.Hardsigmoid()), TypeError, 'a class, or a function'),
    ((Tree(), 'Sigmoid', nn.Hardsigmoid), TypeError, "the class of the modules to replace, nn.Sigmoid, and got 'Sigmoid'"),
    ((Tree(), 'Tree', nn.Hardsigmoid), TypeError, "replace, Tree, and got 'Tree'"),
    ((Tree(), nn.Sigmoid(), nn.Hardsigmoid), TypeError, 'replace, nn.Sigmoid, and got Sigmoid')])
def test_swap_module_says_what_is_wrong(args, error, match):
    with pytest.raises(error, match=match): swap_module(*args)

@pytest.mark.not_as_cuda('autocast computes sums in fp32')
def test_the_example_of_contributing(monkeypatch):
    text = (Path(__file__).parent.parent/'CONTRIBUTING.md').read_text()
    monkeypatch.setattr(exam, '_checks', [])
    exec(re.search(r'```python\n(.*?)```', text, re.S)[1], {})
    def summed(n): return images(nn.Sequential(nn.Conv2d(3, 4, 1), Code(lambda s,x: x.sum((2,3)))), size=n)
    found, = summed(260).fp16_doctor()
    assert (found.severity,found.module)==('warning','1') and 'sum` over 67600' in found.fact
    learn = summed(260)
    do(found.remedy, learn)
    assert not learn.fp16_doctor() and not summed(32).fp16_doctor()
