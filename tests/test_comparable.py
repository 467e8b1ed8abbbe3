"Runs that are compared: the same random numbers in any precision, faults beside dropout, true fp32; and recurrent layers in bf16"
import importlib,subprocess,sys,threading,warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import pytest,torch
import torch.nn.functional as F
from fastai.basics import default_device,nn
from fastai.text.models.awdlstm import WeightDropout
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from fastai_amp16.precision.comparable import comparable,eager,true_fp32
from fastai_amp16.diagnosis.deviation import deviation
from fastai_amp16.precision.plan import half_forward
from fastai_amp16.util.torch_private import knows_bf16
from fastai_amp16.precision.recurrent import _without_warning as without_warning
from torch.nn.utils.rnn import PackedSequence,pack_sequence
from torch.utils.checkpoint import checkpoint
from common import Do,both,clean,fit,slow,times_and_back
from overflows import World
from test_faults import StopAtLine
from test_silent import learner,product,xs

lacks_bf16 = default_device().type=='cpu' and not knows_bf16()
needs_bf16 = pytest.mark.skipif(lacks_bf16, reason='this CPU has no bf16 kernels for recurrent layers')

# %% the same random numbers
class Attends(nn.Module):
    "Attention over eight tokens, of torch's module or of one's own"
    def __init__(self, own=False, weights=False):
        super().__init__()
        self.inp,self.own,self.weights = nn.Linear(1, 16),own,weights
        self.attend = nn.MultiheadAttention(16, 2, dropout=0.4, batch_first=True)
    def forward(self, x):
        h = self.inp(x[...,None])
        if not self.own: return self.attend(h, h, h, need_weights=self.weights)[0].mean(1)
        q = h.unflatten(-1, (2,8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, None, 0.4*self.training).transpose(1, 2).flatten(2).mean(1)

class Rows(nn.Module):
    "A recurrent network over eight numbers, with dropout between its layers"
    def __init__(self, rnn, **kwargs):
        super().__init__()
        self.rnn = rnn(1, 16, 2, dropout=0.4, batch_first=True, **kwargs)
    def forward(self, x): return self.rnn(x[...,None])[0][:,-1,:16]

class Steps(nn.Module):
    "A part of the model that an activation checkpoint computes again"
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x): return checkpoint(self.m, x, use_reentrant=False)

def dropped(drop): return nn.Sequential(nn.Linear(8, 16), drop)
def encoder(): return nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True))

def noisy(f): return nn.Sequential(nn.Linear(8, 16), Do(lambda h: h*f(h)))
noise = { # for each number of a tensor
    'rand_like': torch.rand_like, 'randn_like': torch.randn_like, 'rand': lambda h: torch.rand(h.shape, dtype=h.dtype, device=h.device),
    'randn': lambda h: torch.randn(h.shape, dtype=h.dtype, device=h.device), 'uniform': lambda h: torch.empty_like(h).uniform_(-1, 3),
    'normal': lambda h: torch.empty_like(h).normal_(1, 0.5), 'of columns': lambda h: torch.empty_like(h).t().normal_().t(),
    'bernoulli': lambda h: h.sigmoid().bernoulli(), 'exponential': lambda h: torch.empty_like(h).exponential_(),
}

draws = {
    'dropout': lambda: dropped(nn.Dropout(0.4)), 'in place': lambda: dropped(nn.Dropout(0.4, inplace=True)),
    'always on': lambda: dropped(Do(lambda x: F.dropout(x, 0.4))), 'alpha': lambda: dropped(nn.AlphaDropout(0.3)),
    'feature alpha': lambda: dropped(nn.FeatureAlphaDropout(0.3)), 'channels': lambda: dropped(nn.Dropout1d(0.3)),
    'attention': Attends, 'attention weights': lambda: Attends(weights=True), 'own attention': lambda: Attends(own=True),
    'encoder': encoder, 'lstm': lambda: Rows(nn.LSTM), 'gru': lambda: Rows(nn.GRU, bidirectional=True), 'rnn': lambda: Rows(nn.RNN),
    'checkpointed': lambda: Steps(encoder()), 'checkpointed attention': lambda: Steps(Attends(own=True)),
    'a column': lambda: nn.Sequential(nn.Linear(8, 32), Do(lambda h: F.dropout(h[:,::2], 0.4))),
    'transposed': lambda: nn.Sequential(nn.Linear(8, 16), Do(lambda h: F.dropout(h.t(), 0.4).t())),
    **{n: partial(noisy, f) for n,f in noise.items()},
}

def run(model, x, dtype):
    "Output and gradient in a precision, `None` for fp32, from the same random state"
    model.zero_grad()
    torch.manual_seed(1)
    with comparable(), half_forward(model, dtype) if dtype else nullcontext():
        out = model(x).float()
        out.square().sum().backward() # in it, a checkpoint draws again
    return out.detach(),torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16], ids=['fp16','bf16'])
@pytest.mark.parametrize('name', draws)
def test_random_numbers_do_not_depend_on_the_precision(name, dtype):
    "So outputs and gradients differ by rounding alone; from another random state, they differ"
    torch.manual_seed(0)
    model,x = draws[name]().to(default_device()),torch.randn(64, 8)
    (half,g_half),(fp32,g_fp32) = run(model, x, dtype),run(model, x, None)
    assert deviation(half, fp32)<0.05 and deviation(g_half[None], g_fp32[None])<0.1
    torch.manual_seed(2)
    if name!='always on': assert deviation(model(x).detach(), fp32)>0.1

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16], ids=['fp16','bf16'])
def test_uniform_numbers_are_below_1_in_any_precision(dtype):
    "Programs take logarithms of what is missing to 1"
    x = torch.zeros(2**16, dtype=dtype)
    with comparable():
        for u in (torch.rand_like(x), torch.rand(x.shape, dtype=dtype, device=x.device)): assert 0.99<u.max()<1 and u.dtype==dtype

# %% how often the model is called
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0
    def forward(self, x):
        calls.append(1)
        return x
calls = []

@both
@pytest.mark.parametrize('p,more', [(0.,1), (0.4,2)], ids=['draws nothing','draws'])
def test_a_model_that_draws_costs_one_forward_pass_more(p, more, to, dtype):
    learn = learner(xs, product, lambda: nn.Sequential(nn.Linear(8, 16), Counts(), nn.Dropout(p), nn.Linear(16, 1)))
    learn = getattr(learn, to)(**(dict(init_scale=2.**8) if to=='to_fp16_dynamic' else {})) # none runs again
    calls.clear()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        in_fit = len(calls)
        learn.validate()
    assert in_fit==6+more+1+1 and len(calls)==in_fit+1 # in a validation nothing is drawn, and once is enough

@slow # a process that has not imported it yet takes ten seconds to start
def test_a_fit_does_not_import_the_compiler():
    "Which takes seconds, and which torch does for most modes that see operators"
    code = """import sys,torch; from test_silent import *
learner(xs, product, lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))).to_fp16_dynamic().fit(1)
sys.exit('torch._dynamo' in sys.modules)"""
    assert subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parent, capture_output=True).returncode==0

# %% faults beside dropout
def around(fault, before=(), after=()): return nn.Sequential(nn.Linear(8, 16), *before, fault, *after, nn.Linear(16, 1))
def coarse(level=1200.): return Do(lambda h: h+level-level)
class InFront(nn.Module):
    "An overflow in front of a recurrent network with dropout between its layers"
    def __init__(self, rnn):
        super().__init__()
        self.inp,self.big,self.rnn,self.out = nn.Linear(8, 8),Do(times_and_back),Rows(rnn),nn.Linear(16, 1)
    def forward(self, x): return self.out(self.rnn(self.big(self.inp(x))))

faults = { # model, what is kept in fp32
    'overflow before': (lambda: around(Do(times_and_back), after=[nn.Dropout(0.3)]), ['1']),
    'overflow after': (lambda: around(Do(times_and_back), before=[nn.Dropout(0.3)]), ['2']),
    'coarse before': (lambda: around(coarse(), after=[nn.Dropout(0.3)]), ['1']),
    'coarse after': (lambda: around(coarse(), before=[nn.Dropout(0.3)]), ['2']),
    'coarse beside dropout that stays on': (lambda: around(coarse(), before=[Do(lambda x: F.dropout(x, 0.1))]), ['2']),
    'coarse after attention': (lambda: nn.Sequential(Attends(), coarse(4000.), nn.Linear(16, 1)), ['1']),
    'lstm': (lambda: InFront(nn.LSTM), ['big']), 'gru': (lambda: InFront(nn.GRU), ['big']),
}

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', faults)
def test_a_fault_beside_dropout_is_kept_alone(name):
    "In fp16, in the first batch; no step is lost"
    model,kept = faults[name]
    learn = fit(learner(xs, product, model).to_fp16_dynamic(), 2)
    mp = learn.mixed_precision
    assert mp.promoted==kept and mp.n_skipped==0 and mp.history.reruns.astype(bool).tolist()[0]
    clean(learn)

# %% recurrent layers in bf16
def packed(x):
    with torch.device('cpu'): return pack_sequence([o[:n] for o,n in zip(x, (6,4,3,3))]) # which wants the lengths there
def data_of(out): return out.data if isinstance(out, PackedSequence) else out

recurrent = { # layer, and how to call it
    'lstm': (lambda: nn.LSTM(8, 16, batch_first=True), lambda m, x: m(x)),
    'gru': (lambda: nn.GRU(8, 16, batch_first=True), lambda m, x: m(x)),
    'rnn': (lambda: nn.RNN(8, 16, batch_first=True), lambda m, x: m(x)),
    'relu': (lambda: nn.RNN(8, 16, nonlinearity='relu', batch_first=True), lambda m, x: m(x)),
    'bidirectional': (lambda: nn.GRU(8, 16, 2, bidirectional=True, batch_first=True), lambda m, x: m(x)),
    'projection': (lambda: nn.LSTM(8, 16, proj_size=4, batch_first=True), lambda m, x: m(x)),
    'packed': (lambda: nn.LSTM(8, 16), lambda m, x: m(packed(x))),
    'hx': (lambda: nn.LSTM(8, 16, batch_first=True), lambda m, x: m(x, (torch.ones(1, 4, 16),torch.ones(1, 4, 16)))),
    'hx of gru': (lambda: nn.GRU(8, 16, batch_first=True), lambda m, x: m(x, hx=torch.ones(1, 4, 16))),
    'weight dropout': (lambda: WeightDropout(nn.LSTM(8, 16, batch_first=True), 0.), lambda m, x: m(x)),
}

@needs_bf16
@pytest.mark.parametrize('name', recurrent)
def test_recurrent_layers_compute_in_bf16(name):
    "Outputs and hidden states, with gradients as near to fp32's as rounding allows, and small ones"
    torch.manual_seed(0)
    make,call = recurrent[name]
    m,x = make().to(default_device()),torch.randn(4, 6, 8)
    def gradients(out, by=1.):
        m.zero_grad()
        (data_of(out).float().sin().sum()*by).backward()
        return torch.cat([p.grad.flatten() for p in m.parameters()])[None]
    wanted = gradients(call(m, x)[0])
    def half():
        with half_forward(m, torch.bfloat16): return call(m, x)
    out,state = half()
    assert {t.dtype for t in (data_of(out),*(state if isinstance(state, tuple) else [state]))}=={torch.bfloat16}
    assert deviation(gradients(out), wanted)<0.05 and deviation(gradients(half()[0], by=1e-9)*1e9, wanted)<0.05 # there is no loss scale
    with half_forward(m, torch.bfloat16): assert data_of(call(m, x*1e6)[0]).isfinite().all()

class Codes(nn.Module):
    "A recurrent layer in a module whose own code overflows"
    def __init__(self):
        super().__init__()
        self.rnn,self.out,self.seen = nn.GRU(1, 16, batch_first=True),nn.Linear(16, 1),World()
        self.rnn.register_forward_hook(lambda m, args, out: self.seen.append(torch.equal(out[0], out[0].bfloat16())))
    def forward(self, x): return self.out(self.rnn(x[...,None]*1.)[0][:,-1])

@needs_bf16
def test_a_recurrent_layer_in_code_that_is_kept_in_fp32_computes_in_bf16():
    model = Codes()
    learn = fit(learner(xs, product, lambda: model).to_bf16_dynamic(keep_fp32='.'), 1)
    assert {*model.seen}=={False,True} and not learn.mixed_precision.reports

@pytest.mark.parametrize('capability,version,dtype', [((7,5),91900,None), ((8,0),91002,torch.float32), ((9,0),91900,torch.bfloat16)])
def test_recurrent_layers_on_gpus(capability, version, dtype, monkeypatch):
    "A GPU without bf16 leaves them to autocast; cuDNN has to know bf16, else they compute in fp32; in fp16 autocast is right"
    from fastai_amp16.precision.recurrent import recurrent_dtype
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: version)
    monkeypatch.setattr('fastai_amp16.precision.recurrent.torch.__version__', torch.torch_version.TorchVersion('2.11.0'))
    cuda = torch.device('cuda')
    assert recurrent_dtype(cuda, torch.bfloat16)==dtype and recurrent_dtype(cuda, torch.float16) is None

def test_what_cudnn_does_with_weights_is_not_warned_of():
    "And a warning that Python gives once a place is given once, as without recurrent layers"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('default')
        filters = list(warnings.filters)
        for _ in range(3):
            with without_warning():
                warnings.warn('RNN module weights are not part of single contiguous chunk of memory.', stacklevel=1)
            warnings.warn('once a place', stacklevel=1)
        assert warnings.filters==filters
    assert [str(o.message) for o in told]==['once a place']

# %% true fp32
cudnn,matmul = torch.backends.cudnn,torch.backends.cuda.matmul

def settings():
    "What TF32 depends on, as far as one may ask"
    def ask(f):
        try: return f()
        except RuntimeError: return 'not to be asked'
    new = [o for o in (getattr(cudnn, 'conv', None),getattr(cudnn, 'rnn', None),matmul) if hasattr(o, 'fp32_precision')]
    return [ask(o) for o in (lambda: cudnn.allow_tf32, torch.get_float32_matmul_precision)],[o.fp32_precision for o in new]

def old(): cudnn.allow_tf32,matmul.allow_tf32 = True,True
def off(): cudnn.allow_tf32,matmul.allow_tf32 = False,False
def medium(): torch.set_float32_matmul_precision('medium')
def new(): cudnn.conv.fp32_precision,cudnn.rnn.fp32_precision,matmul.fp32_precision = 'tf32','ieee','tf32'
has_new = hasattr(cudnn, 'conv')

@pytest.fixture
def tf32_as_before():
    old()
    yield
    old()
    matmul.allow_tf32 = False

@pytest.mark.parametrize('choose', [old,off,medium,*[new]*has_new])
def test_tf32_is_off_and_then_as_before(choose, tf32_as_before):
    "However it was switched on"
    choose()
    before = settings()
    with true_fp32():
        (conv,mm),by_op = settings()
        assert conv in (False,'not to be asked') and mm in ('highest','not to be asked') and 'tf32' not in by_op
        with true_fp32(): pass
        assert (conv,mm)==tuple(settings()[0])
    assert settings()==before

def test_a_ctrl_c_at_any_line_leaves_nothing_set_and_nobody_waiting(tf32_as_before):
    "Another thread may enter the contexts then"
    before = settings()
    def enter():
        with true_fp32(), eager(): assert settings()!=before
    def stop(*at):
        at_line = StopAtLine(*at)
        sys.settrace(at_line)
        try: enter()
        except KeyboardInterrupt: pass
        finally: sys.settrace(None)
        return at_line
    for line,times in stop().times.items():
        for n in range(1, times+1):
            assert stop(line, n).raised and settings()==before, line
            thread = threading.Thread(target=enter, daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), line

class Sees(nn.Module):
    "Whether TF32 may be used in each of its calls, and in which dtype its input comes"
    def __init__(self):
        super().__init__()
        self.lin,self.seen = nn.Linear(16, 16),World()
    def forward(self, x):
        self.seen.append((cudnn.allow_tf32,x.dtype))
        return self.lin(x)

def test_a_reference_and_what_is_kept_in_fp32_do_not_use_tf32(tf32_as_before):
    "The batches of the fit do, but in what is kept"
    plain,kept = Sees(),Sees()
    model = nn.Sequential(nn.Linear(8, 16), plain, kept, nn.Linear(16, 1))
    learn = fit(learner(xs, product, lambda: model).to_fp16_dynamic(keep_fp32='2', init_scale=2.**10), 1)
    assert plain.seen[0]==(False,torch.float32) and (True,torch.float16) in plain.seen and not any(on for on,_ in kept.seen)
    assert {on for on,dtype in plain.seen if dtype==torch.float32}=={False} and cudnn.allow_tf32
    assert learn.mixed_precision.n_rerun==0

def test_two_threads_leave_no_setting_of_torchs_behind(tf32_as_before):
    "The second one enters the contexts within those of the first one, and leaves them later; code is then compiled as before"
    importlib.import_module('torch._dynamo')
    inside,leave,compiled = threading.Event(),threading.Event(),[]
    def compare():
        with comparable(), true_fp32():
            inside.set()
            leave.wait()
    first = threading.Thread(target=compare)
    first.start()
    inside.wait()
    with comparable(), true_fp32():
        leave.set()
        first.join()
        assert not cudnn.allow_tf32 # for the second one is still inside
    assert cudnn.allow_tf32 and not any(map(is_in_torch_dispatch_mode, (True,False)))
    def backend(gm, inputs):
        compiled.append(gm)
        return gm
    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert compiled
