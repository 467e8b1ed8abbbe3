"What only a GPU can show, beside fp32, fastai and plain PyTorch on the same GPU; everything else runs there by `FASTAI_AMP16_DEVICE=cuda`"
import gc,math,os,tempfile,warnings
from contextlib import contextmanager
from unittest.mock import patch
import pytest,torch
import torch.distributed as dist
import torch.nn.functional as F
from fastai.basics import Adam,Callback,DataLoaders,Learner,Recorder,SGD,accuracy,default_device,defaults,nn,partial,set_seed,to_device
from fastai.callback.all import MixedPrecision
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from fastai_amp16.train import ranks as ranks_module
from fastai_amp16.all import AdamW16,FusedAdam,GradientNormClip,half_forward
from fastai_amp16.precision.recurrent import emulates_bf16,recurrent_dtype
from fastai_amp16.demo import digits_dls,small_cnn
from benchmarks.shared import hostile
from benchmarks.speed import gpu
from common import Do,Poison,Raise,between,clean,equal,fit,learner,mlp,mse,times_and_back,weights
from overflows import Outlier
from processes import Processes
from test_fits import Encoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
quiet = pytest.mark.filterwarnings('ignore::UserWarning')

@pytest.fixture(autouse=True)
def on_the_gpu():
    "Whatever the rest of the tests run on"
    before = defaults.use_cuda
    default_device(True)
    yield
    default_device(before)

class RowsLSTM(nn.Module):
    "The eight rows of a digit, one after the other"
    def __init__(self, d=64):
        super().__init__()
        self.rnn,self.head = nn.LSTM(8, d, 2, batch_first=True),nn.Linear(d, 10)
    def forward(self, x): return self.head(self.rnn(x[:,0])[0][:,-1])

models = dict(cnn=small_cnn, transformer=Encoder, lstm=RowsLSTM)
all_models = pytest.mark.parametrize('model', models.values(), ids=models)

@pytest.fixture(params=['to_fp16_dynamic','to_bf16_dynamic'])
def to(request):
    "The name of the method; bf16 only where the GPU has it"
    if 'bf16' in request.param and emulates_bf16(default_device()): pytest.skip('this GPU has no arithmetic in bf16')
    return request.param

def digits(model, to='to_fp32', seed=0, **kwargs):
    set_seed(seed, reproducible=True)
    dls = digits_dls(seed=seed)
    return getattr(Learner(dls, model(), opt_func=AdamW16, metrics=accuracy, cbs=GradientNormClip(1.)), to)(**kwargs)

def on_device(o): return o.to(default_device()) if isinstance(o, nn.Module) else to_device(o, default_device())

# %% training
class Dtypes(Callback):
    "What the modules that compute in half precision gave in the last training batch"
    def before_fit(self):
        def note(m, args, out): self.seen[type(m)] = (out[0] if isinstance(out, tuple) else out).dtype
        layers = [m for m in self.model.modules() if isinstance(m, (nn.Linear,nn.Conv2d,nn.LSTM))]
        self.seen,self.hooks = {},[m.register_forward_hook(note) for m in layers]
    def after_fit(self):
        for h in self.hooks: h.remove()

@all_models
def test_trains_to_the_quality_of_fp32(model, to):
    "Of two seeds: accuracy no further from fp32's than fp32's own seeds are from each other, and no layer leaves half precision"
    def trained(to, seed):
        learn = digits(model, to, seed).add_cb(dtypes := Dtypes())
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(8, 1e-2)
        mp = getattr(learn, 'mixed_precision', None)
        if mp:
            wanted = {nn.LSTM: recurrent_dtype(default_device(), mp.dtype) or mp.dtype} # fp32 where cuDNN computes none in bf16
            assert dtypes.seen=={o: wanted.get(o, mp.dtype) for o in dtypes.seen} and not mp.promoted and not mp.n_skipped
            assert all(p.device.type==default_device().type for p in learn.model.parameters())
            clean(learn)
        return learn.recorder.values[-1][-1]
    fp32,half = [torch.tensor([trained(o, seed) for seed in range(2)]) for o in ('to_fp32',to)]
    assert fp32.min()>0.9 # it learned
    assert (half.mean()-fp32.mean()).abs()<=fp32.std()+0.01, (half, fp32)

# %% again
class DrawsOnDevice(nn.Module):
    "Noise and dropout, drawn on the GPU; remembers what was drawn"
    def __init__(self):
        super().__init__()
        self.drawn,self.drop = [],nn.Dropout(0.3)
    def forward(self, x):
        if not self.training: return x
        noise,kept = torch.rand(x.shape[-1], device=x.device),self.drop(torch.ones(x.shape[-1], device=x.device))
        self.drawn.append((noise,kept))
        return x*(0.9+0.2*noise)*kept

def test_a_batch_runs_again_with_the_random_numbers_of_the_gpu():
    "Numbers drawn in the runs that count, and the generator's state at the end, are those of a fit in which nothing runs again"
    def drawn(**kwargs):
        learn = fit(learner(between(DrawsOnDevice())).to_fp16_dynamic(**kwargs), 3)
        return learn.model[1].drawn,[*torch.cuda.get_rng_state_all(),torch.get_rng_state()],learn.mixed_precision
    (calm,at_end,a),(again,at_end_too,b) = drawn(init_scale=1.),drawn(init_scale=2.**24)
    assert a.n_rerun==0 and b.n_rerun>0 and b.n_skipped==0 and len(calm)==len(again)==12
    assert all(o.device.type==default_device().type for o in calm[0])
    for o,p in zip(calm, again): assert torch.equal(o[0], p[0]) and torch.equal(o[1], p[1])
    for o,p in zip(at_end, at_end_too): assert torch.equal(o, p)

# %% synchronization
class Synchronizations:
    """Lets PyTorch raise at whatever waits for the GPU in a training batch, except in the one read, where it counts

    Not in the batches before `after`, in which others set themselves up, nor in the first one and the 8th, whose predictions are compared
    with fp32's. fastai's `Recorder`, which copies the loss to the CPU, is away."""
    compared = 0,7
    def __init__(self, learn, after=0):
        self.reads,self.learn = [],learn
        learn.remove_cbs(learn._grab_cbs(Recorder))
        class Begin(Callback):
            order = -1000
            def before_batch(cb): self.strict(cb.training and cb.train_iter>=after and cb.train_iter not in self.compared)
        class End(Callback):
            order = 1000
            def after_batch(cb): self.strict(False)
            def after_cancel_fit(cb): self.strict(False)
        learn.add_cbs([Begin(),End()])
    def strict(self, on):
        self.on = on
        torch.cuda.set_sync_debug_mode('error' if on else 'default')
        if on: self.reads.append([])
    def read_all(self, *args, f=ranks_module.read_all):
        if not self.on: return f(*args)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            try: return f(*args)
            finally:
                torch.cuda.set_sync_debug_mode('error')
                self.reads[-1].append(sum('synchronizing CUDA' in str(o.message) for o in seen))
    def fit(self):
        "How often each read of each batch waited"
        try:
            with patch.object(ranks_module, 'read_all', self.read_all): fit(self.learn, 1)
        finally: torch.cuda.set_sync_debug_mode('default')
        return self.reads

def cool(to): return dict(init_scale=2.**8) if 'fp16' in to else {} # at which nothing overflows

def on_device_learner(model, n=20, bs=8, cbs=(), wrap=lambda m: m, **kwargs):
    "Digits of 8 by 8, or what `model` takes, that lie on the GPU already"
    set_seed(0, reproducible=True)
    batches = on_device([(torch.randn(bs, 1, 8, 8),torch.randint(10, (bs,))) for _ in range(n)])
    kwargs = {**dict(loss_func=F.cross_entropy, opt_func=AdamW16, lr=1e-3), **kwargs}
    return Learner(DataLoaders(batches, []), wrap(on_device(model())), cbs=cbs, **kwargs)

class Carries(nn.Module):
    "A hidden state and averages, on the GPU, that go from batch to batch"
    def __init__(self):
        super().__init__()
        self.lin,self.out,self.last = nn.Linear(64, 16),nn.Linear(16, 10),None
        self.register_buffer('average', torch.zeros(16))
    def forward(self, x):
        h = torch.tanh(self.lin(x.flatten(1)))
        if self.last is not None: h = h+0.1*self.last
        if self.training:
            self.average.lerp_(h.detach().float().mean(0), 0.1)
            self.last = h.detach().mean(0)
        return self.out(h+self.average)

@pytest.mark.parametrize('clip', [False,True], ids=['','clip'])
@pytest.mark.parametrize('model', [*models.values(),Carries], ids=[*models,'carries'])
def test_one_synchronization_a_step(model, clip, to):
    "From the second step on, once PyTorch's libraries are loaded; and nothing ran again because something else raised"
    fit(on_device_learner(model, 2), 1)
    learn = getattr(on_device_learner(model, cbs=GradientNormClip(0.1) if clip else ()), to)(**cool(to))
    assert Synchronizations(learn).fit()==[[1]]*18
    mp = learn.mixed_precision
    assert len(mp.history)==20 and mp.n_rerun==mp.n_skipped==0 and not mp.reports

def test_a_second_wait_would_be_noticed():
    "By this test, and by ours: what raises in the batch is raised, and is no fault of half precision"
    class Waits(Callback):
        def after_loss(self): self.learn.waited = self.loss.item()
    learn = on_device_learner(small_cnn, 4, cbs=Waits()).to_fp16_dynamic(**cool('fp16'))
    seen = Synchronizations(learn)
    with pytest.raises(RuntimeError, match='synchronizing CUDA'): seen.fit()
    assert seen.reads==[[]] # in the second batch, before it is judged
    clean(learn)

@contextmanager
def group_of_one():
    "A process group that this process makes up alone"
    with tempfile.TemporaryDirectory() as d:
        dist.init_process_group('nccl', init_method=f'file://{d}/store', rank=0, world_size=1)
        try: yield
        finally: dist.destroy_process_group()

def test_one_synchronization_a_step_in_a_group():
    "The flags that ranks add up are made on the GPU; in its second batch, `DistributedDataParallel` sorts its messages"
    with group_of_one():
        learn = on_device_learner(small_cnn, wrap=DistributedDataParallel, cbs=GradientNormClip(0.1)).to_fp16_dynamic(**cool('fp16'))
        assert Synchronizations(learn, after=3).fit()==[[1]]*16
        assert len(learn.mixed_precision.history)==20 and learn.mixed_precision.n_rerun==0

def test_one_synchronization_a_step_of_a_compiled_model():
    learn = on_device_learner(Encoder, wrap=torch.compile, cbs=GradientNormClip(0.1)).to_fp16_dynamic(**cool('fp16'))
    assert Synchronizations(learn, after=3).fit()==[[1]]*16
    assert len(learn.mixed_precision.history)==20 and learn.mixed_precision.n_rerun==0

# %% compiled
@pytest.mark.parametrize('mode', ['default','reduce-overhead'])
@pytest.mark.parametrize('model', [small_cnn,Encoder])
def test_a_compiled_model_trains_as_it_does_uncompiled(model, mode):
    "One graph for all fits; with `reduce-overhead`, CUDA graphs of all of it, which keep no batch from running again"
    def run(compiled):
        torch._dynamo.reset()
        counters.clear()
        learn = on_device_learner(model, cbs=Outlier(5)).to_fp16_dynamic(**cool('fp16'))
        if compiled: learn.model = torch.compile(learn.model, mode=mode)
        return fit(fit(learn, 1), 1)
    eager,learn = run(False),run(True)
    mp = learn.mixed_precision
    assert counters['stats']['unique_graphs']==1 and not counters['graph_break'] and not counters['inductor']['cudagraph_skips']
    assert len(mp.history)==40 and mp.n_rerun>0 and mp.n_skipped==0 and not mp.promoted
    torch.testing.assert_close(torch.stack(learn.recorder.losses), torch.stack(eager.recorder.losses), rtol=0.02, atol=0.02)
    clean(learn)

# %% memory
@pytest.mark.parametrize('name', ['resnet50','vit_small','text_lstm'])
def test_peak_memory_is_not_above_fastais(name):
    "That of `to_fp16` with `Adam` and `GradientClip`, from the first step on; each process counts its own"
    a = gpu.parse_args(['--size', '128'])
    torch.manual_seed(0)
    model = gpu.models[name][0](a.size)
    data = [on_device(gpu.make_batch(model, 16, a)) for _ in range(2)]
    peaks = {}
    for c in ('to_fp16','to_fp16_dynamic'):
        res = gpu.turn(c, model, gpu.Batches(data, 4, 4, math.inf))
        assert 'error' not in res and res['precision']=='fp16', res
        peaks[c] = res['peak_mib']
    assert 0<peaks['to_fp16_dynamic']<=peaks['to_fp16'], peaks

# %% which precision
class Wide(nn.Module):
    "Large products of matrices, and little else"
    def __init__(self, d=2048):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.ReLU()) for _ in range(4)])
    def forward(self, x): return self.layers(x)

def test_precisions_are_compared_without_a_trace():
    "Half precision takes less memory; weights, random numbers and what is allocated are as before"
    learn = on_device_learner(Wide, 1, loss_func=mse)
    learn.dls = DataLoaders(on_device([(torch.randn(4096, 2048),torch.randn(4096, 2048)) for _ in range(2)]), [])
    learn.compare_precisions(1) # cuBLAS may take a workspace
    def now():
        gc.collect()
        return weights(learn),torch.cuda.get_rng_state(),torch.cuda.memory_allocated()
    before = now()
    found = learn.compare_precisions(5)
    after,memory = now(),found.table['peak memory']
    assert [*found.table.index]==['fp32','to_fp16','fp16','bf16'] and (found.table['samples per second']>0).all()
    assert 0<memory['fp16']<1.001*memory['to_fp16']<memory['fp32'] and 0<memory['bf16']<memory['fp32']
    assert equal(before[0], after[0]) and torch.equal(before[1], after[1]) and after[2]<=before[2]
    clean(learn)

# %% what overflows
@quiet
@pytest.mark.parametrize('name', ['regnety','norm_free','masked_fill','large_logits','rms','sum_pool'])
def test_heals_what_overflows(name):
    "All steps are taken, on CUDA's own rules for autocast, and the training ends where fp32 ends"
    s = hostile.zoo[name]
    def figure(to):
        learn = to(s.make(0))
        return hostile.fit(learn, s.epochs, s.lr),learn
    (fp32,_),(fp16,learn) = figure(Learner.to_fp32),figure(Learner.to_fp16_dynamic)
    mp = learn.mixed_precision
    assert fp32>0.9 and abs(fp16-fp32)<=0.05 and mp.n_skipped==0 and len(mp.history)==s.epochs*len(learn.dls.train)
    clean(learn)

@quiet
def test_names_what_overflows_and_keeps_it_in_fp32():
    learn = fit(learner(between(Do(times_and_back))).to_fp16_dynamic(), 2)
    report, = learn.mixed_precision.reports
    assert report.verdict=='forward' and learn.mixed_precision.promoted==['1'] and learn.mixed_precision.n_skipped==0

def test_a_diagnosis_leaves_nothing():
    "Neither weights nor statistics nor random numbers nor modes of PyTorch change, and the memory is free again"
    learn = fit(learner().to_fp16_dynamic(), 1)
    def now(): # with copies on the CPU, as they would count, too
        gc.collect()
        states = [torch.get_rng_state(),*torch.cuda.get_rng_state_all()]
        return {k: v.cpu() for k,v in learn.model.state_dict().items()},states,torch.cuda.memory_allocated()
    learn.diagnose_fp16() # cuBLAS may take a workspace
    (a,states,memory),report = now(),learn.diagnose_fp16()
    assert len(report.table) and str(report)
    del report
    b,states_after,memory_after = now()
    assert equal(a, b) and all(torch.equal(o, p) for o,p in zip(states, states_after)) and memory_after<=memory
    clean(learn)

# %% checkpoints
def test_a_resumed_fit_draws_the_numbers_of_the_one_that_was_not_stopped(tmp_path):
    "Noise and dropout on the GPU, shuffling, the loss scale; the checkpoint is one of plain fastai in fp32"
    def new(): return learner(between(DrawsOnDevice()), path=tmp_path).to_fp16_dynamic(init_scale=2.**24)
    whole = new()
    class Halfway(Callback):
        order = 99
        def after_epoch(self):
            if self.epoch==1: self.learn.save('half')
    fit(whole, 4, cbs=Halfway())
    n = len(whole.model[1].drawn)//2
    resumed = new().load('half')
    torch.rand(100, device=default_device()) # a process of its own would begin with other numbers
    fit(resumed, 4, start_epoch=2)
    drawn = resumed.model[1].drawn
    assert len(drawn)==n and whole.mixed_precision.scaler.state_dict()==resumed.mixed_precision.scaler.state_dict()
    for o,p in zip(whole.model[1].drawn[n:], drawn): assert torch.equal(o[0], p[0]) and torch.equal(o[1], p[1])
    for o,p in zip(weights(whole), weights(resumed)): torch.testing.assert_close(o, p, rtol=1e-4, atol=1e-5)
    saved = torch.load(tmp_path/'models/half.pth', map_location='cpu', weights_only=False)
    assert all(t.dtype==torch.float32 for t in saved['model'].values())
    plain = learner(between(DrawsOnDevice()), path=tmp_path).load('half')
    fit(plain, 1)

def test_an_exported_learner_predicts_on_a_cpu(tmp_path):
    from fastai.basics import load_learner
    learn = fit(learner(path=tmp_path).to_fp16_dynamic(), 1)
    learn.export()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        on_cpu = load_learner(tmp_path/'export.pkl')
    assert not on_cpu._grab_cbs(MixedPrecision) and {p.device.type for p in on_cpu.model.parameters()}=={'cpu'}
    for p,q in zip(learn.model.parameters(), on_cpu.model.parameters()): assert torch.equal(p.detach().cpu(), q.detach())

# %% interrupts
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','after_backward','before_step','after_step','after_batch'])
def test_an_interrupt_leaves_nothing(event):
    "Autocast is off for CUDA, the masters are fp32, and the next fit is an ordinary one"
    learn = learner(cbs=(boom := Raise(event, KeyboardInterrupt))).to_fp16_dynamic()
    with pytest.raises(KeyboardInterrupt): fit(learn)
    clean(learn)
    assert not torch.is_autocast_enabled(default_device().type)
    learn.remove_cb(boom)
    before,n = weights(learn),len(learn.mixed_precision.history)
    fit(learn)
    assert len(learn.mixed_precision.history)==n+8 and not learn.mixed_precision.n_skipped
    assert not any(map(torch.equal, weights(learn), before)) and all(o.isfinite().all() for o in weights(learn))

class TooMuch(nn.Module):
    "More memory than there is"
    on = False
    def forward(self, x):
        if self.on and self.training: torch.empty(2**50, device=x.device)
        return x

def test_out_of_memory_is_no_fault_of_half_precision():
    "It is raised, nothing runs again for it, and its batch leaves no memory taken"
    learn = fit(learner(between(TooMuch())).to_fp16_dynamic(), 1)
    n,before = len(learn.mixed_precision.history),torch.cuda.memory_allocated()
    learn.model[1].on = True
    with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)
    clean(learn)
    assert len(learn.mixed_precision.history)==n and not learn.mixed_precision.reports
    learn.model[1].on = False
    fit(learn, 1)
    assert torch.cuda.memory_allocated()<=before+2**20 and not learn.mixed_precision.n_rerun

# %% kernels
def test_channels_last_stays_channels_last():
    "The weights, what goes from convolution to convolution in half precision, and the losses of the same training without it"
    seen = []
    def run(channels_last):
        learn = digits(small_cnn, 'to_fp16_dynamic')
        if channels_last: learn.to_channelslast()
        def note(m, args, out):
            seen.append((out.dtype, m.weight.dtype, *(t.is_contiguous(memory_format=torch.channels_last) for t in (m.weight,out))))
        hook = learn.model[3].register_forward_hook(note) # 16 channels in and 32 out
        fit(learn, 1)
        hook.remove()
        return learn.recorder.losses
    plain = run(False)
    assert not any(o[3] for o in seen)
    seen.clear()
    assert [float(o) for o in run(True)]==pytest.approx([float(o) for o in plain], rel=0.05, abs=0.02)
    whole = torch.float32,True,True # autocast casts the weights within the convolution; what is asked of fp32 comes in fp32
    assert (torch.float16,*whole) in seen and all(o[1:]==whole for o in seen)

class Kernels(TorchDispatchMode):
    "What kernels of batch norms read"
    def __init__(self):
        super().__init__()
        self.dtypes = set()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if 'batch_norm' in func.__name__: self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))

@pytest.mark.parametrize('channels_last', [False,True])
@pytest.mark.parametrize('mean', [0.,30.])
def test_batch_norm_of_fp16_input_is_that_of_fp32(mean, channels_last):
    "Output, statistics and gradients, at numbers whose sum fp16 cannot hold; it reads fp16, and is not given a copy in fp32"
    torch.manual_seed(0)
    bn,ref = (on_device(nn.BatchNorm2d(8)) for _ in range(2))
    model = on_device(nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), bn))
    nn.init.dirac_(model[0].weight) # the identity, in fp16
    x = on_device(mean+torch.randn(16, 8, 16, 16)).half().float() # what fp16 can hold
    if channels_last: x,model = x.contiguous(memory_format=torch.channels_last),model.to(memory_format=torch.channels_last)
    g,seen = torch.randn_like(x).half().float(),[]
    bn.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(),args[0].dtype,m.weight.dtype,out.dtype)))
    with half_forward(model), Kernels() as kernels: out = model(x)
    out.backward(g.to(out.dtype))
    (given,*dtypes), = seen
    assert dtypes==[torch.float16,torch.float32,torch.float16] and kernels.dtypes=={torch.float16}
    expected = ref(given.float())
    expected.backward(g)
    close = partial(torch.testing.assert_close, check_dtype=False)
    close(out, expected, rtol=2e-3, atol=2e-3) # as fp16 rounds it
    for k in ('running_mean','running_var'): close(getattr(bn, k), getattr(ref, k), rtol=1e-4, atol=1e-4)
    for p,q in zip(bn.parameters(), ref.parameters()): close(p.grad, q.grad, rtol=1e-3, atol=1e-2)

@pytest.mark.parametrize('decouple_wd', [True,False], ids=['AdamW','Adam'])
def test_fused_adam_is_fastais(decouple_wd):
    "Weights and state, of the kernel that CUDA has, with parameters of one number, of many, and in channels_last"
    def params():
        torch.manual_seed(0)
        ts = on_device([torch.randn(3, 4), torch.randn(()), torch.randn(100_003), torch.randn(8, 4, 3, 3)])
        return [nn.Parameter(t) for t in (*ts[:3],ts[3].contiguous(memory_format=torch.channels_last))]
    def make(f, ps): return f([ps[:2],ps[2:]], lr=0.1, wd=0.1, decouple_wd=decouple_wd, eps=1e-4),ps
    ours,ref = make(FusedAdam, params()),make(Adam, params())
    for i in range(20):
        for opt,ps in (ours,ref):
            torch.manual_seed(i)
            opt.set_hypers(lr=slice(1e-3*(i+1), 0.05), mom=0.95-0.003*i)
            for p in ps: p.grad = on_device(torch.randn(p.shape))
            opt.step()
            opt.zero_grad()
        for p,q in zip(ours[1], ref[1]):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            for k in ('grad_avg','sqr_avg'): torch.testing.assert_close(ours[0].state[p][k], ref[0].state[q][k], rtol=1e-5, atol=1e-6)

# %% two GPUs
@contextmanager
def on_gpu(rank):
    "What Accelerate and fastai need, on a GPU of this rank's own"
    from accelerate.state import AcceleratorState
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')
    torch.cuda.set_device(rank)
    default_device(True)
    try: yield
    finally: AcceleratorState._reset_state(True)

@pytest.fixture(scope='module')
def gpus():
    ranks = Processes(on_gpu, 'nccl')
    yield ranks
    ranks.end()

def _train_together(rank, model, bad, kwargs):
    "Weights, history, scale and promotions of this rank"
    cbs = [Poison(bad, 'backward')] if rank==0 and bad else []
    learn = learner(model, cbs=cbs, loss_func=mse, opt_func=SGD, lr=0.1).to_fp16_dynamic(**kwargs)
    with learn.distrib_ctx(): fit(learn, 2)
    mp = learn.mixed_precision
    devices = {p.device.index for p in learn.model.parameters()}
    return [w.cpu() for w in weights(learn)],str(mp.history),mp.scaler.get_scale(),mp.promoted,mp.n_rerun,devices

def _overflows(): return between(Do(times_and_back))()

@quiet
@pytest.mark.skipif(torch.cuda.device_count()<2, reason='needs two GPUs')
@pytest.mark.parametrize('model,bad,kwargs', [(mlp,{1},{}), (mlp,(),dict(init_scale=2.**24)), (_overflows,(),{})],
                         ids=['one rank','scale','healed'])
def test_two_gpus_decide_alike(model, bad, kwargs, gpus):
    "What overflows on one rank runs again on both, over NCCL; weights, scale, counts and healing are the same"
    (a,*mine),(b,*theirs) = gpus(_train_together, model, bad, kwargs)
    assert mine[:-1]==theirs[:-1] and mine[-2]>0 and mine[-1]=={0} and theirs[-1]=={1}
    assert all(torch.equal(p, q) for p,q in zip(a, b))
