"Asking for a report leaves no trace, before a fit, in it and after it; what healing found goes with the learner wherever it goes"
import copy,importlib,inspect,linecache,logging,math,pickle,random,re,sys,sysconfig,threading,warnings
from collections import Counter,deque
from contextlib import contextmanager
from types import SimpleNamespace
import numpy as np
import pytest,torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from fastai.basics import Callback,CancelFitException,DataLoader,DataLoaders,Learner,default_device,nn,noop,set_seed
from fastai.callback.mixup import MixUp
from fastai.losses import CrossEntropyLossFlat
from fastai.text.data import LMDataLoader,LMTensorText
import fastai_amp16.diagnosis.case,fastai_amp16.diagnosis.diagnose,fastai_amp16.learner,fastai_amp16.train.rerun,fastai_amp16.train.snapshot
from fastai.callback.tracker import SaveModelCallback
from fastai_amp16.all import AdamW16,PrecisionReport,PrecisionWarning
from fastai_amp16.diagnosis.diagnose import diagnose
from fastai_amp16.diagnosis.remedy import least_in_fp32
from fastai_amp16.ask import training_case
from fastai_amp16.learner import looking
from fastai_amp16.train.snapshot import unchanged
from benchmarks.shared import hostile
from common import Do,Poison,Raise,between,clean,equal,few,fit,learner,mse,process_wide,slow,state,times_and_back,weights

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

# %% no trace
class Stateful(nn.Module):
    "All that a forward pass may change: statistics, counts, a hidden state, a list, a parameter, random numbers from everywhere"
    def __init__(self):
        super().__init__()
        self.inp,self.bn,self.drop,self.rnn,self.out = nn.Linear(8,16),nn.BatchNorm1d(16),nn.Dropout(0.3),nn.GRU(16,16),nn.Linear(16,1)
        self.sn = nn.utils.parametrizations.spectral_norm(nn.Linear(16,16))
        self.register_buffer('calls', torch.zeros(()))
        self.ema,self.seen,self.h = nn.Parameter(torch.zeros(16), requires_grad=False),[],torch.zeros(1,16)
        self.gen,self.rng,self.np = torch.Generator().manual_seed(0),np.random.default_rng(0),np.zeros(2)
        self.last,self.by = deque(maxlen=3),Counter()
        self.inp.register_forward_hook(self.hook)
    def hook(self, m, x, y): self.seen.append(float(y.detach().float().mean()))
    def forward(self, x):
        self.calls += 1
        self.np += self.rng.random()
        self.by['calls'] += 1
        self.last.append(self.by['calls'])
        x = self.drop(self.bn(self.inp(x)))+1e-3*(random.random()+np.random.rand()+torch.rand((), generator=self.gen, device='cpu'))
        y,self.h = self.rnn(x, self.h.detach())
        with torch.no_grad(): self.ema.mul_(0.9).add_(y.float().mean(0))
        return self.out(checkpoint(self.sn, y+self.ema, use_reentrant=False))

class Both(nn.Module):
    "In place of a GRU"
    def forward(self, x, h): return x,h+1

class Restless(Callback):
    "A callback that counts what it sees and adds to the loss"
    order = 20
    def __init__(self): self.n,self.log,self.avg = 0,[],torch.zeros(1)
    def after_pred(self): self.n += 1
    def after_loss(self):
        self.log.append(self.n)
        self.avg += 1
        self.learn.loss_grad = self.learn.loss_grad+1e-4*self.learn.pred.pow(2).mean()

def everything(learn):
    "Values of all that a look could have touched, and the identities of what hangs on learner, model and callbacks"
    m,params = learn.model,list(learn.model.parameters())
    owners = [learn, *learn.cbs, *m.modules()]
    ids = [{k: id(v) for k,v in vars(o).items() if not k.startswith('_flat_w')} for o in owners] # but torch's references to a GRU's weights
    held = [v for o in owners[1:] for v in vars(o).values() if type(v) in (dict,list,Counter,deque)]
    held = [list(v.items()) if isinstance(v, dict) else list(v) for v in held]
    hooks = [len(h) for o in m.modules() for h in (o._forward_hooks, o._forward_pre_hooks, o._backward_hooks)]
    hooks += [len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)]
    rngs = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), m.gen.get_state().tolist()]
    flags = [torch.is_autocast_enabled('cpu'), torch.is_grad_enabled(), [o.training for o in m.modules()],
             [p.requires_grad for p in params]]
    modes = torch._C._len_torch_function_stack(),torch._C._get_torch_function_state()
    tensors = [t.detach().clone() for t in (*params, *m.buffers(), m.h, *(p.grad for p in params if p.grad is not None))]
    return ids,str((held, m.np, m.rng.bit_generator.state)),hooks,rngs,flags,modes,tensors

def same(a, b): return a[:-1]==b[:-1] and equal(a[-1], b[-1])

def with_gradients():
    "A learner after a fit, with gradients that somebody wants to keep, and a batch"
    learn = fit(learner(Stateful, cbs=Restless()).to_fp16_dynamic(), 1)
    for p in learn.model.parameters(): p.grad = torch.randn_like(p) if p.requires_grad else None
    return learn,(torch.randn(4,8),torch.randn(4,1))

@pytest.mark.parametrize('fails', [None,'forward','loss','after_pred','backward'])
def test_no_trace(fails):
    "Nor of a look that fails"
    learn,b = with_gradients()
    def fail(*args): raise ValueError('now')
    if fails=='forward': learn.model.out.register_forward_pre_hook(fail)
    if fails=='backward': learn.model.sn.register_forward_hook(lambda m,x,y: y.register_hook(fail) and None)
    if fails=='loss': learn.loss_func = fail
    if fails=='after_pred': learn.restless.after_pred = fail
    before = everything(learn)
    with training_case(learn, b) as case:
        for run in (case.run, case.run_fp32):
            error = run().error
            left_out = fails=='after_pred' # a callback, outside a fit
            assert (error is None)==(fails is None or left_out) and (error is None or 'now' in str(error))
    assert same(before, everything(learn))
    clean(learn)

def test_no_trace_of_what_is_interrupted():
    learn,b = with_gradients()
    before = everything(learn)
    with pytest.raises(KeyboardInterrupt), unchanged(learn):
        learn.model.bn(learn.model.inp(b[0])).sum().backward()
        learn.restless.log.append(9), learn.restless.avg.add_(1)
        learn.model.new,learn.restless.new = 1,2
        raise KeyboardInterrupt()
    assert same(before, everything(learn))

@pytest.mark.parametrize('some', few(range(3), 0))
def test_after_a_ctrl_c_at_any_line_the_next_fit_is_an_ordinary_fit(some):
    "And a report can be asked for again; a trace function raises where lines begin"
    learn,b = with_gradients()
    learn.model.sn,learn.model.rnn = nn.Linear(16,16),Both() # fewer lines
    ours = {m.__file__ for m in (fastai_amp16.learner,fastai_amp16.train.rerun,fastai_amp16.train.snapshot,fastai_amp16.diagnosis.case)}
    n = 0
    def run(k):
        "Interrupted at the `k`-th line of ours; returns the number of lines"
        count = 0
        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename not in ours: return None
            if event=='line':
                count += 1
                if count==k:
                    sys.settrace(None)
                    raise KeyboardInterrupt()
            return trace
        sys.settrace(trace)
        try:
            with training_case(learn, b) as case: case.run()
        finally: sys.settrace(None)
        return count
    total,wide = run(0),process_wide()
    for k in (*range(1+331*some, total, 993), *range(total-250+13*some, total, 39)): # the last lines put everything back
        try: run(k)
        except KeyboardInterrupt: n += 1
        assert process_wide()==wide, k
        steps = len(learn.mixed_precision.history)
        learn.create_opt()
        clean(fit(learn, 1))
        assert len(learn.mixed_precision.history)>=steps+4 and isinstance(learn.diagnose_fp16(b), PrecisionReport)
    assert n>7

def test_contexts_of_torch_that_an_interrupted_report_has_not_left():
    "A Ctrl-C may come before a `with` statement can leave its context"
    learn,b = with_gradients()
    wide,open_ = process_wide(),[torch._C.DisableTorchFunction(),torch.no_grad(),torch.autocast('cpu', dtype=torch.float16)]
    with pytest.raises(KeyboardInterrupt), training_case(learn, b):
        for o in open_: o.__enter__()
        raise KeyboardInterrupt
    assert process_wide()==wide

def test_no_trace_where_code_holds_on_to_a_parameter():
    "A function that has captured one finds the original, and its gradient is put back"
    model = between(nn.ReLU())()
    model[1] = Do(lambda x, w=model[0].bias: x*w)
    model[0].bias.grad = torch.full((16,), 3.)
    assert learner(model).diagnose_fp16().verdict=='healthy'
    assert torch.equal(model[0].bias.grad, torch.full((16,), 3.))

def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), nn.Linear(8,1))
    model[1].weight = model[0].weight
    with training_case(learner(model)) as case:
        assert case.run().finite and model[1].weight is model[0].weight and len(list(model.parameters()))==5
    assert model[1].weight is model[0].weight

def test_loggers_data_and_other_peoples_objects_are_left_alone():
    "What another thread writes while a report is made stays written"
    log,big,other = logging.getLogger('mine'),np.zeros(2**20),SimpleNamespace(n=0, by={})
    def forward(x):
        def elsewhere():
            log.setLevel(logging.ERROR)
            big[0],other.n,other.by['a'] = 1,1,1
        t = threading.Thread(target=elsewhere)
        t.start(), t.join()
        return x
    log.setLevel(logging.INFO)
    learn = learner(between(Do(forward)))
    learn.model.log,learn.model.big,learn.model.other,learn.log = log,big,other,log
    learn.diagnose_fp16()
    assert log.level==logging.ERROR and big[0]==1 and (other.n,other.by)==(1,{'a':1})
    assert learn.model.log is log and learn.model.big is big and learn.model.other is other

def test_a_long_log_and_a_data_set_are_left_alone():
    "No copy of them is made, and what another thread writes there meanwhile stays"
    from fastai.data.core import TfmdDL,TfmdLists
    items = [(torch.randn(8),torch.randn(1)) for _ in range(32)]
    dl = TfmdDL(TfmdLists(items, [noop]), bs=8)
    learn,log = learner(),[0]*10**5
    learn.mine = log
    with unchanged(learn, dl):
        dl.one_batch()
        dl.dataset.items[0],log[5] = items[1],1
    assert dl.dataset.items[0] is items[1] and log[5]==1

@pytest.mark.filterwarnings('default::RuntimeWarning')
def test_warnings_of_other_threads_come_through():
    def forward(x):
        t = threading.Thread(target=lambda: warnings.warn('from elsewhere', RuntimeWarning, stacklevel=1))
        t.start(), t.join()
        return x
    with pytest.warns(RuntimeWarning, match='from elsewhere'): learner(between(Do(forward))).diagnose_fp16()

def test_what_a_checkpoint_computes_again_is_not_noted():
    with training_case(learner(Stateful)) as case: run = case.run()
    assert run.finite and run.calls['sn',None]==1

def test_a_text_loader_gives_what_it_would_have_given():
    def batches(ask):
        set_seed(0, reproducible=True)
        dl = LMDataLoader([(LMTensorText(torch.randint(0, 9, (20+i,))),) for i in range(9)], bs=4, seq_len=6, shuffle=True)
        learn = learner()
        if ask:
            with unchanged(learn, dl): dl.one_batch()
        set_seed(1)
        return [b[0] for b in dl]
    assert equal(batches(False), batches(True))

# %% in a fit
events = 'before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'

class Replaying(Callback):
    "Looks at the batch at each event of some order"
    def __init__(self, order, which): self.order,self.which,self.n = order,which,0
    def again(self):
        if not self.training or looking(self.learn): return
        self.n += 1
        if self.which=='report': return self.learn.diagnose_fp16()
        with training_case(self.learn) as case:
            case.scale = 1e9
            if diagnose(case).verdict!='healthy': least_in_fp32(case)
for event in events: setattr(Replaying, event, Replaying.again)

@pytest.mark.parametrize('to,order,which,n', [ # in each of the `n` batches all events look
    ('to_fp32',99,'report',1), ('to_fp16_dynamic',-5,'report',1), pytest.param('to_fp16_dynamic', 99, 'heal', 2, marks=slow)])
def test_a_fit_with_looks_is_bit_identical_to_one_without(to, order, which, n):
    def run(*cbs):
        learn = getattr(learner(Stateful, n=16*n, cbs=[Restless(), *cbs], opt_func=AdamW16), to)()
        fit(learn, 1)
        return learn
    a,b = run(),run(again:=Replaying(order, which))
    assert again.n==n*len(events) and equal(state(a), state(b)) and a.recorder.values[-1][:2]==b.recorder.values[-1][:2]
    assert a.restless.log==b.restless.log and a.model.seen==b.model.seen and torch.equal(a.restless.avg, b.restless.avg)
    if to!='to_fp32': assert a.mixed_precision.history.equals(b.mixed_precision.history)
    clean(b)

class Ask(Callback):
    "Asks for a report at an event of training batches"
    def __init__(self, event, order=0):
        self.reports,self.order = [],order
        setattr(self, event, self.ask)
    def ask(self):
        if self.training and (r:=self.learn.diagnose_fp16()): self.reports.append(r)

def torch_loaders(learn):
    if default_device().type!='cpu': pytest.skip("torch's loader shuffles on the default device by a generator of the CPU")
    ds = list(learn.dls.train.dataset)
    learn.dls = DataLoaders(*[torch.utils.data.DataLoader(ds, 16, shuffle=s) for s in (True,False)], device=default_device())

class Iterable(torch.utils.data.IterableDataset):
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)
def iterable(learn): learn.dls = DataLoaders(DataLoader(Iterable(list(learn.dls.train.dataset)), bs=16, n=40), learn.dls.valid)

def text(learn):
    texts = [(LMTensorText(torch.randint(0, 9, (20+i,))),) for i in range(9)]
    learn.dls = DataLoaders(LMDataLoader(texts, bs=4, seq_len=6, shuffle=True), LMDataLoader(texts[:4], bs=4, seq_len=6))
    learn.model,learn.loss_func = nn.Sequential(nn.Embedding(9,8), nn.Linear(8,9)),lambda p,t: F.cross_entropy(p.flatten(0, 1), t.flatten())

@pytest.mark.parametrize('kind,event', [*(('mixup',e) for e in ('before_batch','after_pred','after_backward','after_batch')),
                                        (torch_loaders,'after_batch'), (iterable,'before_batch'), (text,'after_batch')])
def test_asking_in_a_fit_changes_nothing(kind, event):
    "With any loader, and with callbacks that draw random numbers"
    def run(*cbs):
        if kind=='mixup':
            learn = hostile.learner(0, hostile.classes, lambda: nn.Linear(16,4), loss_func=CrossEntropyLossFlat(), n=64).add_cb(MixUp())
        else: kind(learn := learner(n=40, bs=16))
        return fit(learn.add_cbs(cbs).to_fp16_dynamic(init_scale=2.**12), 2) # at which no batch overflows, whatever a device draws
    a,b = run(),run(ask:=Ask(event))
    assert len(ask.reports)>3 and all(r.verdict=='healthy' for r in ask.reports) and equal(state(a), state(b))
    before = random.getstate(),torch.get_rng_state()
    assert b.diagnose_fp16().verdict=='healthy' and before[0]==random.getstate() and torch.equal(before[1], torch.get_rng_state())

@pytest.mark.parametrize('to,kind', [('to_fp16','float16'), ('to_bf16','bfloat16'), ('to_bf16_dynamic','bfloat16'), ('to_fp32','float16')])
def test_a_report_is_about_the_half_precision_in_use(to, kind, capsys):
    learn = getattr(learner(), to)()
    before = list(learn.cbs)
    assert f'finite in {kind} at' in learn.diagnose_fp16().sentence
    assert list(learn.cbs)==before and not capsys.readouterr().out

@pytest.mark.parametrize('event', ['before_fit','before_epoch','before_train','before_batch','after_batch','after_epoch'])
def test_a_report_can_be_asked_for_in_any_event(event):
    asks = Callback()
    setattr(asks, event, lambda: asks.reports.append(asks.learn.diagnose_fp16()))
    asks.reports = []
    fit(learner(cbs=asks).to_fp16_dynamic(), 1)
    assert asks.reports and asks.reports[0].verdict in ('healthy','scale')

def test_a_callback_that_asks_while_a_report_is_made():
    got = []
    class Asks(Callback):
        def before_batch(self): got.append(self.learn.diagnose_fp16())
    assert len(learner(cbs=Asks()).diagnose_fp16().table)>1 and got and all(r.verdict=='healthy' and r.table.empty for r in got)

@pytest.mark.parametrize('order', [5, 60])
def test_the_batch_is_the_one_that_callbacks_have_prepared(order):
    "Whatever their order"
    class Larger(Callback):
        def before_batch(self): self.learn.xb = (1000*self.x,)
    Larger.order = order
    learn = learner(n=32, shuffle=False).to_fp16_dynamic()
    top = 1000*next(iter(learn.dls.train))[0].abs().max().item()
    def largest(): return learn.diagnose_fp16().table.set_index('module').input['0']
    learn.add_cb(Larger())
    assert largest()==pytest.approx(top, rel=1e-3)
    assert fit(learn, 1) and largest()==pytest.approx(top, rel=1e-3)

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
@pytest.mark.parametrize('to', ['to_fp32','to_fp16_dynamic'])
def test_in_a_fit_the_batch_is_the_one_at_hand(to, event):
    "As others have left it, once"
    class Larger(Callback):
        def before_batch(self): self.learn.xb = (1000*self.x,)
    learn = learner(n=32, shuffle=False, cbs=[Larger(), ask:=Ask(event, 99)])
    tops = [1000*b[0].abs().max().item() for b in learn.dls.train]
    fit(getattr(learn, to)(), 1)
    assert [r.table.set_index('module').input['0'] for r in ask.reports]==pytest.approx(tops, rel=1e-3)

# %% the report
def test_diagnose_fp16_on_a_healthy_learner():
    "The numbers are those of fp32, the most endangered module comes first, the shares are those of a cast to fp16"
    learn = fit(learner(between(Do(lambda x: x*64), nn.ReLU())).to_fp16_dynamic(), 1)
    b = learn.dls.one_batch()
    r = learn.diagnose_fp16(b)
    scale,model = learn.mixed_precision.scaler.get_scale(),copy.deepcopy(learn.model).train()
    acts = {}
    for n,m in model.named_modules():
        if n: m.register_forward_hook(lambda m,x,y,n=n: (y.retain_grad(), acts.update({n: (x[0],y)})) and None)
    mse(model(b[0]), b[1]).backward()
    assert r.verdict=='healthy' and set(r.table.module)=={'0','1','2','3'} and r.table.bits.is_monotonic_increasing
    for o in r.table.itertuples():
        x,y = acts[o.module]
        assert o.input==pytest.approx(x.abs().max().item(), rel=1e-4) and o.output==pytest.approx(y.abs().max().item(), rel=1e-4)
        assert o.gradient==pytest.approx(y.grad.abs().max().item(), rel=1e-4)
        w = max((p.grad.abs().max().item() for p in model[int(o.module)].parameters()), default=0.)
        assert o.weight_grad==pytest.approx(w, rel=1e-4) or not w and o.weight_grad!=o.weight_grad
        top = max(o.input, o.output, o.inside, scale*o.gradient, scale*w)
        assert o.bits==pytest.approx(math.log2(65504/top), abs=1e-3)
        g = scale*y.grad[y.grad!=0]
        assert o.flushed==pytest.approx((g.half()==0).float().mean().item())
        assert o.subnormal==pytest.approx(((g.half()!=0)&(g.abs()<2**-14)).float().mean().item())

def test_shares_at_a_low_scale():
    def flushed(scale):
        learn = learner(between(nn.ReLU()), loss_func=lambda p,t: 1e-6*mse(p, t)).to_fp16_dynamic(init_scale=scale)
        return learn.diagnose_fp16(learn.dls.one_batch()).table.flushed.max()
    assert flushed(1.)>0.5 and flushed(2.**24)<0.1

def test_gradients_of_weights_count():
    "They add up over the batch, and pass 65504 where no activation's gradient does"
    def model(): return nn.Sequential(nn.Linear(8,16), nn.Linear(16,1))
    learn = learner(model, n=512, bs=512, scale=100., loss_func=F.mse_loss)
    low = learn.to_fp16_dynamic(init_scale=8.).diagnose_fp16()
    top = low.table.weight_grad.max()
    assert top>3*low.table.gradient.max()
    r = learn.to_fp16_dynamic(init_scale=65504/top*3).diagnose_fp16() # too high for the weights only
    assert (r.verdict,low.verdict)==('scale','healthy') and low.scale==8
    assert low.table.bits.min()==pytest.approx(math.log2(65504/top/8), abs=0.1) and r.new_scale<=65504/top<4*r.new_scale

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16, Learner.to_fp16_dynamic, Learner.to_bf16_dynamic])
def test_diagnose_fp16_before_any_fit(to):
    "On any learner; shuffling, too, is as it was"
    a,b = learner(),learner()
    r = to(a).diagnose_fp16()
    assert isinstance(r, PrecisionReport) and r.dtype==(torch.bfloat16 if to==Learner.to_bf16_dynamic else torch.float16)
    assert equal(state(fit(a.to_fp32(), 1)), state(fit(b, 1)))

def test_small_numbers_that_fp16_rounds_to_0():
    "Nothing overflows, and nothing is learned"
    def model():
        small = Do(lambda x: x*1e-9),nn.Linear(8,16,bias=False),Do(lambda x: x.float()*1e9)
        return nn.Sequential(*small, nn.ReLU(), nn.Linear(16,1))
    r = learner(model).diagnose_fp16()
    assert (r.verdict,r.producer,r.op)==('forward','1',None) and 'rounds to 0' in r.sentence

def test_a_report_where_there_is_nothing_to_train_or_to_load():
    learn = learner()
    b = learn.dls.one_batch()
    for p in learn.model.parameters(): p.requires_grad_(False)
    assert learn.diagnose_fp16().verdict=='healthy'
    learn.dls = None
    assert learn.diagnose_fp16(b).verdict=='healthy'
    with pytest.raises(ValueError, match='no data loaders'): learn.diagnose_fp16()

def test_what_the_batch_raises_in_fp32_is_raised():
    learn = learner(between(Do(lambda x: x.nonsense)))
    with pytest.raises(AttributeError, match='nonsense'): learn.diagnose_fp16()
    assert not any('forward' in vars(m) for m in learn.model.modules())

@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
@pytest.mark.parametrize('b,says', [(3,'is 3'), (torch.ones(16,8),'is a tensor'), ('train',"is 'train'")], ids=['number','tensor','text'])
def test_what_is_no_batch(ask, b, says):
    learn = learner()
    with pytest.raises(TypeError, match=f'learn.dls.one_batch.*{says}'): getattr(learn, ask)(b)
    getattr(learn, ask)(learn.dls.one_batch())

@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
def test_a_model_that_cannot_be_asked(ask):
    def about(model): return getattr(learner(model), ask)()
    with pytest.raises(ValueError, match='ReLU has no parameters'): about(nn.ReLU)
    if ask=='diagnose_fp16':
        with pytest.raises(ValueError, match=r'model\.float\(\)'): about(lambda: nn.Linear(8,1).half())

def test_a_loss_that_carries_its_annotations():
    "fastai's `BaseLoss` takes over `__annotations__`, with generic types whose own `__dict__` nobody may write to"
    from fastai.losses import FocalLossFlat
    learn = learner(lambda: nn.Sequential(nn.Linear(8,16), Do(lambda x: x*1e6), nn.Linear(16,2)), loss_func=FocalLossFlat())
    for o in (learn.dls.train,learn.dls.valid): o.dataset[:] = [(x,(y>0).long()[0]) for x,y in o.dataset]
    learn.model.types = [list[int]]
    assert learn.diagnose_fp16().verdict=='forward'
    mp = fit(learn.to_fp16_dynamic()).mixed_precision
    assert mp.n_skipped==0 and mp.promoted

# %% what healing found stays
def test_promotions_survive(tmp_path):
    "save, load, a new learner, a pickle and fastai's own learner"
    def make(): return learner(between(Do(times_and_back)), path=tmp_path, shuffle=False)
    a = fit(make().to_fp16_dynamic(), 2)
    assert a.mixed_precision.promoted==['1'] and a.mixed_precision.n_rerun==1
    a.save('a')
    b = make().to_fp16_dynamic().load('a')
    assert b.mixed_precision.promoted==['1'] and b.mixed_precision.ready().kept.keys()=={'1'}
    fit(a, 1), fit(b, 1)
    assert b.mixed_precision.n_rerun==b.mixed_precision.n_skipped==0 and b.mixed_precision.reports==[] and equal(weights(a), weights(b))
    fit(make().load('a'), 1) # fastai's own
    e = pickle.loads(pickle.dumps(a)) # an export leaves them out
    assert e.mixed_precision.promoted==['1'] and [str(r) for r in e.mixed_precision.reports]==[str(r) for r in a.mixed_precision.reports]
    assert len(e.mixed_precision.reports)==1 and equal(weights(e), weights(a))

def test_lr_find_gives_back_weights_and_keeps_what_it_found(tmp_path):
    def found(): return learner(between(Do(times_and_back)), path=tmp_path, scale=1e4, loss_func=F.mse_loss).to_fp16_dynamic()
    learn,fresh = found(),found()
    learn.create_opt()
    before,opt = weights(learn),copy.deepcopy(learn.opt.state_dict())
    with learn.no_bar(): learn.lr_find(show_plot=False)
    mp = learn.mixed_precision
    assert mp.promoted==['1'] and len(mp.reports)>=1 and mp.scaler.get_scale()<2**16 and equal(before, weights(learn))
    assert learn.opt.state_dict()['state']==opt['state'] and len(mp.history)>5
    clean(learn)
    n = mp.n_rerun
    fit(learn, 1)
    assert fit(fresh, 1).mixed_precision.n_rerun>mp.n_rerun-n and mp.promoted==['1']

def test_a_new_model_does_not_inherit_promotions():
    learn = fit(learner(between(Do(times_and_back))).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.promoted==['1']
    learn.model = nn.Linear(8,1)
    learn.create_opt()
    fit(learn, 1)
    assert learn.mixed_precision.promoted==[]

# %% what people see
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_fit_that_ends_early_says_why_and_saves_nothing_it_has_not():
    "The warning, at the line that calls `fit`, is what `stopped` holds; `SaveModelCallback` finds no file, and looks for none"
    learn = learner(cbs=[Poison(range(3), 'backward'), SaveModelCallback()]).to_fp16_dynamic()
    mp = learn.mixed_precision
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with learn.no_bar(), learn.no_logging(): learn.fit(1) # this line
    ours = [o for o in told if issubclass(o.category, PrecisionWarning)]
    assert len(ours)>1 and str(ours[-1].message)==mp.stopped and 'SaveModelCallback' in mp.stopped and mp.stopped in repr(mp)
    assert all(o.filename==__file__ and linecache.getline(o.filename, o.lineno).rstrip().endswith('# this line') for o in ours)
    learn.remove_cb(SaveModelCallback)
    fit(learn, 1)
    assert mp.stopped is None and 'last fit: complete' in repr(mp)

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_mixed_precision_at_a_glance():
    learn = learner(between(Do(times_and_back))).to_fp16_dynamic(keep_fp32='2')
    mp = fit(learn, 1).mixed_precision
    for text in (repr(mp), re.sub('<[^>]*>', ' ', mp._repr_html_())):
        said = 'fp16',f'{mp.scaler.get_scale():g}',str(len(mp.history)),'from the start','since step 0','complete'
        assert not [o for o in said if o not in text]
        assert 'norms' not in text # as it has none
    assert len(repr(mp).splitlines())==8

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_glance_says_how_lr_find_ended():
    "At its last step, or where the loss explodes; an exception ends it as it ends a fit"
    learn = learner().to_fp16_dynamic()
    def ended(**kwargs):
        with learn.no_bar(), learn.no_logging(): learn.lr_find(show_plot=False, **kwargs)
        return re.search('last fit: (.*)', repr(learn.mixed_precision))[1]
    assert ended(num_it=8, stop_div=False)=='lr_find, ended after 8 steps'
    n = int(re.fullmatch(r'lr_find, ended after (\d+) steps', ended(start_lr=1e-3, end_lr=1e5))[1])
    assert n==sum(learn.mixed_precision.history.fit==1)<100
    with learn.added_cbs(Raise('after_pred', ValueError)), pytest.raises(ValueError): ended(num_it=8)
    assert 'last fit: ended by a callback or an exception' in repr(learn.mixed_precision)
    with learn.added_cbs(Raise('after_batch', CancelFitException)): fit(learn, 1)
    assert 'last fit: ended by a callback or an exception' in repr(learn.mixed_precision)

@pytest.fixture
def installed(tmp_path, monkeypatch):
    "A package that stands between the learner and its batches, as tsai does, and fits"
    code = 'def around(f): return lambda *args: f(*args)\ndef train(learn): learn.fit(1) # in the package\n'
    (tmp_path/'installed_one.py').write_text(code)
    def get_path(name, f=sysconfig.get_path): return str(tmp_path) if name=='purelib' else f(name)
    monkeypatch.setattr(sysconfig, 'get_path', get_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module('installed_one')
    del sys.modules['installed_one']

@contextmanager
def between_lines(): yield

def lines_of_warnings(train):
    "What ends the lines that the warnings of a fit point to"
    learn = learner(cbs=Poison(range(3), 'backward')).to_fp16_dynamic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with learn.no_bar(), learn.no_logging(): train(learn)
    ours = [o for o in told if issubclass(o.category, PrecisionWarning)]
    assert len(ours)>1
    return {linecache.getline(o.filename, o.lineno).rpartition('# ')[2].strip() for o in ours}

def test_warnings_point_past_packages_to_the_users_line(installed, monkeypatch):
    "Also past Python's own library, and to a package where no code is the user's"
    def train(learn): learn.fit(1) # the user's
    for around in (installed.around, between_lines()):
        with monkeypatch.context() as patch:
            patch.setattr(Learner, 'one_batch', around(Learner.one_batch))
            assert lines_of_warnings(train)=={"the user's"}
    def in_a_thread(learn):
        thread = threading.Thread(target=installed.train, args=(learn,))
        thread.start()
        thread.join()
    assert lines_of_warnings(in_a_thread)=={'in the package'}

def test_warnings_point_to_a_cell_of_a_notebook():
    "Whose file does not exist"
    code = compile('def train(learn):\n    learn.fit(1)\n', '<ipython-input-3-abc>', 'exec')
    names = {'__name__':'__main__'}
    exec(code, names)
    learn = learner(cbs=Poison(range(3), 'backward')).to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(), pytest.warns(PrecisionWarning) as told: names['train'](learn)
    assert {(o.filename,o.lineno) for o in told if o.category is PrecisionWarning}=={('<ipython-input-3-abc>',2)}

@pytest.mark.parametrize('name', ['to_fp16_dynamic','to_bf16_dynamic'])
def test_help_explains_each_argument(name):
    f = getattr(Learner, name)
    lines = inspect.getdoc(f).split('Arguments:')[1].splitlines()
    assert [o.split('=')[0] for o in lines if o]==[k for k in inspect.signature(f).parameters if k!='self']
