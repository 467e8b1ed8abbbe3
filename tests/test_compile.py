"`torch.compile` before or after `to_fp16_dynamic`: compiled as often as in fp32, once more after healing, and the same training"
import functools,itertools,shutil
import pytest,torch
from fastai.basics import default_device,nn,partial
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from fastai_amp16.all import half_forward
from common import Poison,few,fit,learner,slow,weights
from overflows import fp16,fp32

class Seq(nn.Sequential):
    "With code of its own: torch 2.6 leaves code of torch's as it is, if it is called by that"
    def forward(self, x):
        for m in self: x = m(x)
        return x

class Conv(nn.Module):
    "Rows of eight numbers as images; the norms of images, and a dropout"
    def __init__(self):
        super().__init__()
        self.body = Seq(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8))
        self.head = Seq(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 1))
    def forward(self, x): return self.head(self.body(x.view(-1, 1, 2, 4)))

class Tokens(nn.Module):
    "A transformer of which each number is a token"
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.Linear(1, 16),Seq(nn.Linear(16, 1))
        self.blocks = Seq(nn.TransformerEncoderLayer(16, 2, 32, 0.1, 'gelu', batch_first=True, norm_first=True))
    def forward(self, x): return self.head(self.blocks(self.emb(x[...,None])).mean(1))

class Scores(nn.Module):
    "Its own code makes numbers that fp16 cannot hold"
    def __init__(self):
        super().__init__()
        self.q,self.k,self.v = [nn.Linear(16, 16) for _ in range(3)]
        self.norm = nn.LayerNorm(16)
    def forward(self, x): return self.norm(x+torch.tanh((1e3*self.q(x))*(1e3*self.k(x))/1e6)*self.v(x))

def overflowing(): return Seq(nn.Linear(8, 16), nn.GELU(), Scores(), nn.Dropout(0.1), Scores(), nn.Linear(16, 1))

def wrapped(m, **kwargs): return torch.compile(m, **kwargs)
def in_place(m, **kwargs):
    m.compile(**kwargs)
    return m
def parts(m, **kwargs):
    "Two of its layers, one in each way"
    *_,a,b = [n for n,c in m.named_children() if [*c.parameters()]]
    m._modules[a] = torch.compile(m._modules[a], **kwargs)
    m._modules[b].compile(**kwargs)
    return m

class Compiled:
    "Compiles models by a backend that changes nothing, and counts"
    def __init__(self):
        torch._dynamo.reset()
        counters.clear()
        self.graphs,self.dtypes = 0,set()
    def backend(self, gm, inputs):
        self.graphs += 1
        self.dtypes |= {t.dtype for t in inputs if isinstance(t, torch.Tensor)}
        return gm
    @property
    def counts(self): return self.graphs,sum(counters['graph_break'].values())

def trained(model, to, how, when='before'):
    "A learner, and the counts after its first epoch, three more in two fits, and a validation"
    learn,compiled = learner(model, bs=8),Compiled()
    if when=='before': learn.model = how(learn.model, backend=compiled.backend)
    to(learn)
    if when=='after': learn.model = how(learn.model, backend=compiled.backend)
    def after(f):
        f()
        return compiled.counts
    counts = [after(f) for f in (lambda: fit(learn, 1), lambda: fit(learn, 2), lambda: fit(learn, 1), learn.validate)]
    return learn,compiled,counts

@functools.cache
def counts_in_fp32(model, how): return trained(model, fp32, how)[2]

@functools.cache
def eager_weights(model):
    "Those that the same fits end with in half precision and without a compiler"
    eager = fp16(learner(model, bs=8))
    for n in (1,2,1): fit(eager, n)
    return weights(eager)

ways = [*itertools.product([Conv,Tokens], [wrapped,in_place,parts], ['before','after'])]
plain = (Conv,wrapped,'before'),(Conv,parts,'after'),(Tokens,in_place,'after') # each model, way and order

@pytest.mark.parametrize('model,how,when', [pytest.param(*o, marks=() if o in plain else slow) for o in ways])
def test_compiled_as_often_as_in_fp32(model, how, when):
    """All of it in the first epoch; the predictions of the 8th step are compared without compiled code

    Compiled code gets the masters: casts are a part of its kernels, and CUDA graphs take it that weights stay where they are. Parts get
    what the layers before them give."""
    in_fp32 = counts_in_fp32(model, how)
    learn,compiled,counts = trained(model, fp16, how, when)
    n = 4 if how is parts else in_fp32[0][0] # each part in training and validation: in fp32, torch 2.6 leaves it at the former
    assert {*counts}=={(n,0)} and n>=2 and {*in_fp32}<={(2,0),(n,0)}
    assert how is parts or {o for o in compiled.dtypes if o.is_floating_point}=={torch.float32}
    mp = learn.mixed_precision
    for p,q in zip(weights(learn), eager_weights(model)): torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert len(mp.history)==32 and mp.n_skipped==0 and not mp.promoted and not mp.reports

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('how', few([wrapped,in_place], in_place))
def test_compiled_once_more_after_healing(how):
    "With code of its own kept in fp32, and layers inside in half precision; neither the search for it nor fp32's step is compiled"
    learn,_,counts = trained(overflowing, fp16, how)
    (first,_),*_,(last,breaks) = counts
    assert learn.mixed_precision.promoted==['2.','4.'] and breaks==0
    assert last<=first+2 # the one for training, and the one for validation
    assert not any(learn.mixed_precision.history.reruns[-8:])

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_batches_that_fp32_cannot_use_either_compile_nothing():
    "Those that run in fp32 run without compiled code"
    learn,compiled = learner(Conv, bs=8, cbs=Poison(range(3, 24, 2), 'forward')),Compiled()
    learn.model = torch.compile(learn.model, backend=compiled.backend)
    mp = fit(fp16(learn), 3).mixed_precision
    assert mp.n_skipped==11 and mp.n_rerun>0 and compiled.counts==(2,0)

def test_a_context_for_each_batch_compiles_once():
    compiled,m,x = Compiled(),Conv(),torch.randn(4, 8)
    c = torch.compile(m, backend=compiled.backend)
    for _ in range(3):
        with half_forward(c): out = c(x)
        out.float().sum().backward()
    assert compiled.counts==(1,0) and out.dtype==torch.float16

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ('g++','clang++'))), reason="inductor needs a compiler")

@slow
@needs_compiler
@pytest.mark.parametrize('mode', ['default','reduce-overhead'][:2 if default_device().type=='cuda' else 1]) # the latter means CUDA graphs
def test_inductor(mode):
    """Ends where the same loop in fp32, compiled as well, ends; compiled code draws random numbers of its own for dropout

    That is no sign of wrong predictions in the 8th step. Kernels without vector instructions are compiled in half the time."""
    def run(to):
        torch._dynamo.reset()
        learn = learner(lambda: nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 1)))
        learn.model = torch.compile(learn.model, mode=mode)
        return fit(to(learn), 5)
    with inductor.patch({'cpp.vec_isa_ok': False}):
        in_fp32,learn = run(fp32),run(partial(fp16, init_scale=2.**8)) # at which nothing overflows
    mp = learn.mixed_precision
    assert len(mp.history)==20 and mp.n_rerun==mp.n_skipped==0 and not mp.reports
    torch.testing.assert_close(torch.stack(learn.recorder.losses), torch.stack(in_fp32.recorder.losses), rtol=0.01, atol=1e-3)
