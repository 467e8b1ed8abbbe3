"Each hazard in a small model, for the doctor and in the first batch of a fit; nothing on models that are well; no trace"
import math
from functools import partial
from itertools import chain,repeat
from typing import NamedTuple
import pandas as pd
import pytest,torch
import torch.nn.functional as F
from fastai.basics import DataLoader,DataLoaders,Learner,set_seed
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.rnn import rnn_cbs
from fastai.callback.channelslast import ChannelsLast
from fastai.tabular.all import Categorify,Normalize,TabularDataLoaders,tabular_learner
from fastai.text.all import AWD_LSTM,get_text_classifier
from fastai.vision.models.xresnet import xresnet18
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision.models.resnet import BasicBlock,ResNet
from torchvision.models.convnext import CNBlockConfig,ConvNeXt
import fastai_amp16.optim.optimizer as optimizers
from fastai_amp16.all import AdamW16,Checkup,Finding,PrecisionWarning
from fastai_amp16.doctor import Device,_device,_examine
from common import few,not_as_cuda
from conftest import asked
from benchmarks.shared.hostile import zoo

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
    exec(code, dict(learn=learn, partial=partial, **{o: getattr(optimizers, o) for o in optimizers.__all__}))

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

class Norming(nn.Module):
    "A norm in the code of a module with children"
    def __init__(self):
        super().__init__()
        self.lin,self.weight = nn.Linear(8, 8),nn.Parameter(torch.ones(8))
    def forward(self, x): return self.lin(x*(x.pow(2).mean(-1, keepdim=True)+1e-6)**-0.5*self.weight)

min_ = lambda x: torch.finfo(x.dtype).min

class Hazard(NamedTuple):
    "A model that has it, the module and the operation at fault, a word of the hint, and models that are similar and well"
    model:object
    op:str
    hint:str
    twins:list
    module:str = 'mid'

mask_hint,eps_hint,norm_hint = 'torch.finfo','1e-4','float()'
def unit(s, x): return x/(x.norm(dim=-1, keepdim=True)+s.eps)
def by_sum(s, x): return x*x.abs().sum(-1, keepdim=True).clamp(min=1e-12).reciprocal()
def scaled_by_cosine(s, x): return s.cos(x, x[:1])[:,None]*x
def log_of_sum(s, x): return x-x.exp().sum(-1, keepdim=True).log()
def standardized(s, x): return s.g*(x-x.mean(-1, keepdim=True))/(x.std(-1, keepdim=True)+1e-5)

hazards = dict( # broken in half precision
    masked_fill=Hazard(code(attend(lambda s,x,m: x.masked_fill(m, -1e9))), 'masked_fill', mask_hint,
        [code(attend(lambda s,x,m: x.masked_fill(m, min_(x)))),
         code(attend(lambda s,x,m: x.masked_fill(m, -torch.inf))),
         code(attend(lambda s,x,m: x.float().masked_fill(m, -1e9)))]),
    setitem=Hazard(code(attend(partial(assign, value=lambda x: -1e9))), 'setitem', mask_hint,
        [code(attend(partial(assign, value=min_)))]),
    gain=Hazard(code(lambda s,x: x*1e6/1e6), 'mul', '', [code(lambda s,x: x/1e6*1e6), code(lambda s,x: x*1e-6)]),
    eps_log=Hazard(code(lambda s,x: (x.relu()+1e-10).log()), 'log', eps_hint, [code(lambda s,x: (x.relu()+1e-3).log())]),
    eps_div=Hazard(code(unit, empty=True, eps=1e-8), 'div', eps_hint,
        [code(unit, eps=1e-8), code(unit, empty=True, eps=1e-4)]),
    eps_clamp=Hazard(code(by_sum, empty=True), 'reciprocal', eps_hint,
        [code(by_sum), code(lambda s,x: x.clamp(min=1e-12), empty=True), code(lambda s,x: x+1e-8, empty=True)]),
    normalize=Hazard(code(lambda s,x: F.normalize(x), empty=True), 'normalize', eps_hint,
        [code(lambda s,x: F.normalize(x)), code(lambda s,x: F.normalize(x, eps=1e-4), empty=True),
         code(lambda s,x: F.normalize(x.float()), empty=True)]),
    cosine=Hazard(code(scaled_by_cosine, empty=True, cos=nn.CosineSimilarity()), None, eps_hint,
        [code(scaled_by_cosine, cos=nn.CosineSimilarity()),
         code(scaled_by_cosine, empty=True, cos=nn.CosineSimilarity(eps=1e-3))], module='mid.cos'),
    logsumexp=Hazard(code(log_of_sum, top=20), 'exp', 'torch.logsumexp',
        [code(log_of_sum), code(lambda s,x: x-x.logsumexp(-1, keepdim=True), top=20)]),
    rms=Hazard(lambda: Net(Norming(), top=3e3), 'pow', norm_hint, [lambda: Net(Norming()), lambda: Net(nn.RMSNorm(8), top=3e3)]),
    rms_small=Hazard(lambda: Net(Norming(), top=1e-4), 'pow', norm_hint, [lambda: Net(nn.RMSNorm(8), top=1e-4)]),
    annotated=Hazard(code(standardized, top=1e-6, g=gained(8)), 'mean', norm_hint,
        [code(standardized, top=top, g=gained(8)) for top in (1,60)]))

masks = dict( # beyond the end of half precision, which does no harm as long as no row is masked completely
    masked_add=Hazard(code(attend(lambda s,x,m: x+m.to(x.dtype)*-1e9)), 'mul', mask_hint,
        [code(attend(lambda s,x,m: x+m.to(x.dtype)*-1e4)),
         code(attend(lambda s,x,m: x+(m.float()*torch.finfo(torch.float32).min).to(x.dtype)))]), # the smallest number there is
    where=Hazard(code(attend(lambda s,x,m: torch.where(m, -1e9, x))), 'where', mask_hint,
        [code(attend(lambda s,x,m: torch.where(m, min_(x), x)))]),
    mask_buffer=Hazard(lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask.to(x.dtype)), -1e9)), 'add', mask_hint,
        [lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask.to(x.dtype)), -1e4)),
         lambda: Net(WithMask(attend(lambda s,x,m: x+s.mask), -1e9))]))

fp32_on_cuda = 'eps_div eps_clamp normalize cosine logsumexp rms rms_small'.split()
on_cuda = 'autocast computes powers, `exp`, sums and norms in fp32'

def is_harmless(learn):
    "Nothing, or something that is good to know"
    return not findings(learn)

def check(hazard, severity):
    "The doctor finds it, its remedy removes it, and similar models are well"
    found, = findings(learner(hazard.model))
    assert (found.severity,found.module)==(severity,hazard.module)
    assert hazard.hint in found.remedy and ('in its code' in found.remedy)==bool(hazard.hint)
    learn = learner(hazard.model)
    do(found.remedy, learn)
    assert is_harmless(learn)
    for twin in hazard.twins: assert is_harmless(learner(twin))
    return found

@pytest.mark.parametrize('name', not_as_cuda(hazards, fp32_on_cuda, on_cuda))
def test_the_doctor_finds_a_hazard(name): check(hazards[name], 'error')

@pytest.mark.parametrize('name', few(hazards, *[*hazards][::3], without=fp32_on_cuda, reason=on_cuda))
def test_a_fit_finds_a_hazard_in_its_first_batch(name):
    "Without losing it: the same module, the operation, and the hint that the doctor gives"
    model,op,hint,_,module = hazards[name]
    learn = learner(model).to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(), pytest.warns(PrecisionWarning) as warned: learn.fit(1)
    mp = learn.mixed_precision
    r, = mp.reports
    assert (r.producer,r.op)==(module,op) and mp.n_skipped==0 and mp.history.skipped.tolist()==[False]
    said = [str(r), r._repr_html_(), str(warned[0].message), findings(learner(model))[0].remedy]
    assert all(('n its code' in o)==bool(hint) and hint in o for o in said)

@pytest.mark.parametrize('name', masks)
def test_a_mask_that_does_no_harm_yet(name):
    hazard = masks[name]
    can_raise = name=='where' and findings(learner(hazard.model))[0].severity=='error' # in torch 2.6
    found = check(hazard, 'error' if can_raise else 'warning')
    assert can_raise or f'`{hazard.op}` computes with numbers up to 1e+09: infinity' in found.fact

@pytest.mark.parametrize('name', fp32_on_cuda)
@pytest.mark.skipif(asked=='cpu', reason='a CPU computes these in half precision')
def test_what_cuda_computes_in_fp32_is_no_hazard_there(name): assert is_harmless(learner(hazards[name].model))

def test_what_is_kept_is_repeated():
    large = code(lambda s,x: s.lin(x*1e6/1e6), lin=nn.Linear(8, 8))
    learn = learner(lambda: nn.Sequential(large(), nn.Linear(4, 4))).to_fp16_dynamic(keep_fp32=['1'])
    assert findings(learn)[0].remedy=="learn.to_fp16_dynamic(keep_fp32=['1', '0.mid.'])"

def test_a_model_that_differs_from_run_to_run():
    "As one that draws from a generator with a seed of its own: half precision is not to blame"
    factors = chain([1.], repeat(0.1))
    c = learner(code(lambda s,x: x*next(factors))).fp16_doctor()
    assert all(o.severity=='info' for o in c) and c.report.verdict=='healthy'

def test_a_loss_scale_that_can_move_is_no_hazard():
    def make(**kwargs): return learner(Net(nn.ReLU()), loss_func=lambda p,y: 10*F.cross_entropy(p, y)).to_fp16_dynamic(**kwargs)
    assert make(init_scale=2.**24).fp16_doctor().report.verdict=='scale' and is_harmless(make(init_scale=2.**24))

def test_a_batch_that_overflows():
    def make(): return learner(Net(nn.Identity()), 1e6*torch.randn(4, 8))
    found, = findings(make())
    assert (found.severity,found.module)==('error','body') and make().fp16_doctor().report.verdict=='forward'
    learn = make()
    do(found.remedy, learn)
    assert learn.fp16_doctor().report.verdict!='forward'

def large(top, **kwargs): return code(lambda s,x: x/x.detach().abs().max()*s.by/s.by, by=top, **kwargs)

def test_what_comes_near_the_end():
    learn = learner(large(5e4))
    c = learn.fp16_doctor()
    found = c[0]
    assert (found.severity,found.module)==('warning','mid') and '`mul` computes with numbers up to 5e+04: 0.4 bits' in found.fact
    row = c.report.table.set_index('module').loc['mid']
    assert [f'{row[o]:.1f}</td>' in c._repr_html_() for o in ('bits','lost')]==[True]*2 # in the table, next to each other
    do(found.remedy, learn)
    assert not findings(learn) and not findings(learner(large(1e4)))

def test_what_holds_a_module_near_the_end_is_not_named():
    body = nn.Sequential(nn.Linear(8, 8), Code(lambda s,x: x/x.detach().abs().max()*5e4))
    found, = findings(learner(lambda: nn.Sequential(body, Code(lambda s,x: x/5e4), nn.Linear(8, 4))))
    assert {found.module,*found.others}=={'0.1','1'}

def test_several_that_come_near_the_end_are_one_finding():
    found, = findings(learner(lambda: nn.Sequential(large(4e4)(), nn.Linear(4, 8), large(6e4, lin=nn.Linear(8, 8))())))
    assert (found.module,found.others,found.where)==('2.mid',['0.mid'],'2.mid and 1 more')
    assert "keep_fp32=['0.mid', '2.mid.']" in found.remedy

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
    assert found.severity=='error' and 'inputs' in found.fact and found.remedy.startswith('# find these samples')
    learn = learner(Net(nn.Identity()))
    learn.model.head.weight.data[0,0] = torch.inf
    assert [(o.severity,o.module) for o in findings(learn)]==[('error','head')]

@pytest.mark.parametrize('name', ['masked_fill','gain','eps_log','eps_clamp'])
def test_bf16_takes_what_fp16_cannot(name): assert not findings(learner(hazards[name].model).to_bf16_dynamic())

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
    assert not speed(T4, 8, 512, 512, 3, 512, 4) # layers with few weights
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

@pytest.mark.parametrize('name', few(well, *[o for o in well if o not in ('resnet_pair','xresnet')])) # which are convnext with more layers
def test_nothing_on_what_is_well(name):
    learn = well[name]()
    assert not findings(learn)
    assert all('NHWC' in o.fact for o in findings(learn, device=T4))

class Leftovers(TorchFunctionMode):
    "What memory holds that nobody has written: the numbers of other programs"
    def __torch_function__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        return res.fill_(6e4) if 'empty' in func.__name__ else res

def drawn(s, x): return x*x.new_empty(len(x), 1).bernoulli_(0.5) # as stochastic depth does
def copied(s, x):
    res = torch.empty_like(x)
    res[:,:4].copy_(x[:,4:])
    res[:,4:].copy_(x[:,:4])
    return res
def assigned(s, x):
    res = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    res[:,4:] = x[:,:4]
    res[:,:4] = x[:,4:]
    return res

@pytest.mark.parametrize('f', [drawn,copied,assigned])
def test_memory_that_nobody_wrote_is_no_overflow(f):
    with Leftovers(): c = learner(code(f)).fp16_doctor()
    assert c.report.verdict=='healthy' and not c.report.table.nonfinite.any() and all(o.severity=='info' for o in c)

@pytest.mark.parametrize('name', few(zoo, *[*zoo][::3], without=['sum_pool','poisson','cosine'],
                                     reason='autocast computes `exp`, sums and norms in fp32'))
def test_zoo(name):
    "What cannot be trained in plain fp16 is named, at the place, if the first batch shows it"
    named = dict(regnety=('stem.0','gives numbers'), norm_free=('blocks.','gives numbers'), masked_add=('attns.0','`mul`'),
        masked_fill=('attns.0','masked_fill'), large_logits=('','matmul'), rms_inline=('1','`mul`'), sum_pool=('','sum'),
        poisson=('','exp'), cosine=('2','Gradients'), sigmoid_bce=('act','derivative'), large_units=('','`mul`'),
        broken_pixels=('0','gives numbers'), backward_only=('1','sqrt'))
    # `rms` is kept in fp32 by its name; `tiny_loss` asks for a loss scale and an optimizer, which it has
    found = findings(zoo[name].make(0))
    module,fact = named.get(name, ('',''))
    assert bool(found)==(name in named) and all((o.module or '').startswith(module) and fact in o.fact for o in found), found

# %% no trace
class Noisy(nn.Module):
    "Draws random numbers and remembers"
    def __init__(self):
        super().__init__()
        self.lin,self.bn,self.drop,self.calls = nn.Linear(8, 4),nn.BatchNorm1d(4),nn.Dropout(),0
    def forward(self, x):
        self.calls += 1
        return self.drop(self.bn(self.lin(x)))/1e9*1e9

noisy = pytest.mark.warns('`div` in the code of the model itself')

@pytest.mark.parametrize('to', [None,pytest.param('to_fp16_dynamic', marks=noisy),'to_bf16_dynamic'])
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
    found = [Finding('info', None, 'Good <b>.', 'learn.to_fp32()'), Finding('error', '', 'Bad.', '# mend\nlearn.fit(1)'),
             Finding('warning', 'a', 'So so.', 'learn.keep()', ['b'])]
    c = Checkup(found)
    assert [o.severity for o in c]==['error','warning','info'] and c.sentence.startswith('3 findings: 1 error (broken')
    assert str(c).splitlines()[2:5]==['ERROR  (the model): Bad.', '    # mend', '    learn.fit(1)'] and 'a and 1 more: So so.' in str(c)
    html = c._repr_html_()
    assert 'Good &lt;b&gt;.' in html and 'a and 1 more' in html and '# mend\nlearn.fit(1)' in html and html==Checkup(found)._repr_html_()
    assert 'No findings' in str(Checkup()) and 'No findings' in Checkup()._repr_html_()
    assert Checkup(found[1:2]*2).sentence=='2 findings: 2 errors (broken in half precision).'

def test_public_names():
    import fastai_amp16.doctor
    assert set(fastai_amp16.doctor.__all__)=={'Checkup','Device','Finding','slow_sizes'}
