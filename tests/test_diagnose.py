"A batch runs again without a trace, the verdict on it is right, and what was promoted is needed, is enough and stays"
import copy,itertools,math,pickle,random,re,warnings
from collections import Counter,deque
from functools import partial
from types import SimpleNamespace
import numpy as np
import pytest,torch
from torch.utils.checkpoint import checkpoint
from fastai.basics import Callback,Learner,load_learner,nn,set_seed
from fastai.losses import CrossEntropyLossFlat
from fastai.callback.training import GradientAccumulation
from fastai_amp16.all import AdamW16,PrecisionReport
from fastai_amp16.diagnose import Batch,Case,_ladder,diagnose,heal,replay,untouched
from fastai_amp16.precision import PrecisionPlan
import hostile
from hostile import zoo
from common import Detour,Poison,clean,equal,fit,learner,mse,state,weights

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

# %% no trace
class Stateful(nn.Module):
    "All that a forward pass may change: statistics, counts, a hidden state, a list, a parameter, random numbers from everywhere"
    def __init__(self):
        super().__init__()
        self.inp,self.bn,self.drop,self.rnn,self.out = nn.Linear(8,16),nn.BatchNorm1d(16),nn.Dropout(0.3),nn.GRU(16,16),nn.Linear(16,1)
        self.sn = nn.utils.parametrizations.spectral_norm(nn.Linear(16,16))
        self.register_buffer('calls', torch.zeros(()))
        self.ema,self.seen,self.h,self.gen = nn.Parameter(torch.zeros(16), requires_grad=False),[],torch.zeros(1,16),torch.Generator().manual_seed(0)
        self.np,self.last,self.count,self.rng,self.caches = np.zeros(2),deque(maxlen=3),itertools.count(),np.random.default_rng(0),[SimpleNamespace(n=0, by=Counter())]
        self.inp.register_forward_hook(self.hook)
    def hook(self, m, x, y): self.seen.append(float(y.detach().float().mean()))
    def forward(self, x):
        self.calls += 1
        self.np += self.rng.random()
        self.last.append(next(self.count))
        self.caches[0].n += 1
        self.caches[0].by['calls'] += 1
        x = self.drop(self.bn(self.inp(x)))+1e-3*(random.random()+np.random.rand()+torch.rand((), generator=self.gen))
        y,self.h = self.rnn(x, self.h.detach())
        with torch.no_grad(): self.ema.mul_(0.9).add_(y.float().mean(0))
        return self.out(checkpoint(self.sn, y+self.ema, use_reentrant=False))

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
    "Values of all that a replay could have touched, and the identities of what hangs on learner, model and callbacks"
    owners = [learn, *learn.cbs, *learn.model.modules()]
    ids = [{k: id(v) for k,v in vars(o).items()} for o in owners]
    inner = [{k: (list(v.items()) if isinstance(v, dict) else list(v)) for k,v in vars(o).items() if type(v) in (dict,list)} for o in learn.model.modules()]
    ts = [t.detach().clone() for t in (*learn.model.parameters(), *learn.model.buffers(), learn.model.h, *(p.grad for p in learn.model.parameters() if p.grad is not None))]
    hooks = [len(h) for m in learn.model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    hooks += [len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks)]
    rng = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), learn.model.gen.get_state().tolist()]
    flags = [torch.is_autocast_enabled('cpu'), torch.is_grad_enabled(), [m.training for m in learn.model.modules()], [p.requires_grad for p in learn.model.parameters()]]
    m = learn.model
    return ids,str(inner),hooks,rng,flags,str((m.np,m.last,m.count,m.rng.bit_generator.state,m.caches)),ts

def same(a, b): return a[:-1]==b[:-1] and equal(a[-1], b[-1])

@pytest.mark.parametrize('half', [None, PrecisionPlan], ids=['fp32','fp16'])
@pytest.mark.parametrize('fails', [None,'forward','loss','after_pred','backward'])
def test_no_trace(half, fails):
    learn = fit(learner(Stateful, cbs=Restless()).to_fp16_dynamic(), 1)
    learn.xb,learn.yb,learn.training = (torch.randn(4,8),),(torch.randn(4,1),),True
    learn.model.train()
    for p in learn.model.parameters(): p.grad = torch.randn_like(p) if p.requires_grad else None
    def fail(*args): raise ValueError('now')
    if fails=='forward': learn.model.out.register_forward_pre_hook(fail)
    if fails=='backward': learn.model.sn.register_forward_hook(lambda m,x,y: y.register_hook(fail) and None)
    if fails=='loss': learn.loss_func = fail
    if fails=='after_pred': learn.restless.after_pred = fail
    before = everything(learn)
    run = replay(learn, Batch.of(learn), half, inside=lambda n: True)
    assert same(before, everything(learn))
    assert (run.error is None)==(fails is None) and (fails is None or 'now' in str(run.error))
    with untouched(learn), pytest.raises(KeyboardInterrupt):
        learn.model.bn(learn.model.inp(torch.randn(4,8))).sum().backward()
        learn.restless.log.append(9), learn.restless.avg.add_(1)
        raise KeyboardInterrupt()
    assert same(before, everything(learn))

def test_a_ctrl_c_at_any_line_leaves_no_trace():
    import sys,fastai_amp16.diagnose as d
    learn = fit(learner(Stateful).to_fp16_dynamic(), 1)
    learn.xb,learn.yb,learn.training = (torch.randn(4,8),),(torch.randn(4,1),),True
    before,n,modes = everything(learn),0,(torch._C._len_torch_function_stack(), torch._C._get_torch_function_state())
    def run(k):
        "Interrupted at the `k`-th line of diagnose.py"
        count = 0
        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename!=d.__file__: return None
            if event=='line':
                count += 1
                last[frame.f_lineno] = count
                if count==k: raise KeyboardInterrupt()
            return trace
        last = {}
        sys.settrace(trace)
        try: replay(learn, Batch.of(learn), PrecisionPlan)
        finally: sys.settrace(None)
        return last
    last = run(0)
    total = max(last.values())
    for k in (*last.values(), *range(1, total-150, 151), *range(total-150, total, 4)): # the last ones put everything back
        try: run(k)
        except KeyboardInterrupt: n += 1
        assert same(before, everything(learn)), k
        assert modes==(torch._C._len_torch_function_stack(), torch._C._get_torch_function_state()), k
    assert n>20

def test_no_trace_where_code_holds_on_to_a_parameter():
    "A function that has captured one finds the original, and its gradient is put back"
    model = mlp(nn.ReLU())()
    model[1] = Do(lambda x, w=model[0].bias: x*w)
    c = case(lambda: model)
    model[0].bias.grad = torch.full((16,), 3.)
    replay(c.learn, c.batch)
    assert torch.equal(model[0].bias.grad, torch.full((16,), 3.))

def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), nn.Linear(8,1))
    model[1].weight = model[0].weight
    c = case(lambda: model)
    with untouched(c.learn): assert model[1].weight is model[0].weight and len(list(model.parameters()))==5
    run = replay(c.learn, c.batch)
    assert run.finite and model[1].weight is model[0].weight

class Replaying(Callback):
    "Has the batch run again at each event of some order"
    def __init__(self, order, which): self.order,self.which,self.n = order,which,0
    def again(self):
        if not self.training or (self.learn._replaying and self.which!='diagnose_fp16'): return
        self.n += 1
        if self.which=='replay': [replay(self.learn, Batch.of(self.learn), plan, 4.) for plan in (None,PrecisionPlan)]
        elif self.which=='diagnose_fp16': self.learn.diagnose_fp16()
        else: heal(c) if diagnose(c:=Case(self.learn, Batch.of(self.learn), scale=1e9)).verdict!='healthy' else None
for event in ('before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'):
    setattr(Replaying, event, Replaying.again)

@pytest.mark.parametrize('which', ['replay','diagnose_fp16','heal'])
@pytest.mark.parametrize('order', [-5, 99])
@pytest.mark.parametrize('to', ['to_fp32','to_fp16_dynamic'])
def test_a_fit_with_replays_is_bit_identical_to_one_without(to, order, which):
    def run(*cbs):
        learn = getattr(learner(Stateful, n=32, cbs=[Restless(), *cbs], opt_func=AdamW16), to)()
        fit(learn, 2)
        return learn
    a,b = run(),run(again:=Replaying(order, which))
    assert again.n==4*8 and equal(state(a), state(b)) and a.recorder.values[-1][:2]==b.recorder.values[-1][:2]
    assert a.restless.log==b.restless.log and a.model.seen==b.model.seen and torch.equal(a.restless.avg, b.restless.avg)
    if to!='to_fp32': assert a.mixed_precision.history.equals(b.mixed_precision.history)
    clean(b)

# %% verdicts
def case(model, x=None, y=None, loss_func=None, scale=2.**16, min_scale=2.**-14, keep_fp32=None, dtype=torch.float16, **kwargs):
    learn = learner(model, loss_func=loss_func, **kwargs)
    learn.create_opt()
    learn.training = learn.model.train().training
    x = torch.randn(8,8) if x is None else x
    return Case(learn, Batch((x,), (torch.randn(8,1) if y is None else y,)), keep_fp32, dtype, scale, min_scale)

def mlp(*mid): return lambda: nn.Sequential(nn.Linear(8,16), *mid, nn.Linear(16,1))
class Do(nn.Module):
    "`f`, named like a module of the user's"
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

def with_nan(t, *at):
    t = t.clone()
    for i in at: t[i] = math.nan
    return t

def poisoned():
    model = mlp(nn.ReLU())()
    with torch.no_grad(): model[2].weight[0,3] = math.inf
    return model

class Aux(nn.Module):
    "The loss function uses an activation, in half precision"
    def __init__(self):
        super().__init__()
        self.lin,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x):
        self.aux = self.lin(x)*400
        return self.out(self.aux/400)
class AuxLoss:
    def __call__(self, p, t): return mse(p, t)+1e-9*self.model.aux.pow(2).mean()

def rms(x):
    x = 1e3*x
    return x*torch.rsqrt((x*x).mean(-1, keepdim=True))

def norm_of_zero(x): return x*torch.sqrt((x*0).pow(2).sum())

verdicts = dict(
    weights=(lambda: case(poisoned), 'weights', '2', None, r'2\.weight \(1 of 16 numbers\)'),
    inputs=(lambda: case(mlp(nn.ReLU()), with_nan(torch.randn(8,8), 2, 5)), 'data', None, None, r'inputs .* in 2 of its 8 samples: 2, 5\.'),
    targets=(lambda: case(mlp(nn.ReLU()), y=with_nan(torch.randn(8,1), 7)), 'data', None, None, r'targets .* in 1 of its 8 samples: 7\.'),
    divergence=(lambda: case(mlp(Do(lambda x: x*1e30), Do(lambda x: x*1e30)), lr=0.5), 'divergence', '2', None, r'not finite in fp32 either, first in 2 \(Do\).*learning rate 0\.5'),
    singular=(lambda: case(mlp(Do(norm_of_zero))), 'divergence', '1', None, r'backward pass is not finite in fp32 either, first in 1 \(Do\)'),
    scale=(lambda: case(mlp(nn.ReLU()), loss_func=lambda p,t: 1e4*mse(p, t)), 'scale', None, None, r'65536 is too high .* fits'),
    forward=(lambda: case(mlp(Do(lambda x: x*1e6), Do(lambda x: x*1e-6))), 'forward', '1', 'mul', r'`mul` in 1 \(Do\) gives numbers up to .*65504'),
    intermediate=(lambda: case(mlp(Do(lambda x: x*1e6/1e6))), 'forward', '1', 'mul', r'`mul` in 1 \(Do\)'),
    underflow=(lambda: case(mlp(Do(lambda x: x/(x.detach()*0+1e-9)*1e-9))), 'forward', '1', 'div', r'`(true)?div` in 1 \(Do\)'),
    raises=(lambda: case(mlp(Do(lambda x: x.masked_fill(x>1, -1e9).clamp(min=-1)))), 'forward', '1', 'masked_fill', r'`masked_fill` in 1 \(Do\) raises in float16'),
    backward=(lambda: case(mlp(Do(lambda x: torch.sqrt((x*1e-5)**2+1e-12)*1e5))), 'backward', '1', 'sqrt', r'derivative of `sqrt` in 1 \(Do\)'),
    nested=(lambda: case(mlp(nn.Sequential(Do(lambda x: torch.sqrt((x*1e-5)**2+1e-12)*1e5)))), 'backward', '1.0', 'sqrt', r'derivative of `sqrt` in 1\.0 \(Do\)'),
    silent=(lambda: case(mlp(Do(rms)), scale=1.), 'forward', '1', 'mul', r'finite numbers of that, wrong ones'),
    loss=(lambda: case(Aux, loss_func=AuxLoss()), 'loss', None, 'pow', r'`pow` in the loss function'),
    healthy=(lambda: case(mlp(nn.ReLU())), 'healthy', None, None, r'Everything is finite in float16 at the loss scale 65536\. The least room is in'),
)

@pytest.mark.parametrize('name', verdicts)
def test_verdict(name):
    make,verdict,producer,op,sentence = verdicts[name]
    set_seed(0)
    c = make()
    if name=='loss': c.learn.loss_func.model = c.model
    before = state(c.learn)
    r = diagnose(c, inside=(lambda n: True) if name=='silent' else None)
    assert (r.verdict,r.producer)==(verdict,producer) and re.search(sentence, r.sentence), r
    assert op is None or r.op in (op,'true'+op)
    assert str(r).startswith(f'{verdict}: ') and r.sentence in str(r) and (verdict=='healthy' or r.remedy in str(r)) and equal(before, state(c.learn))
    if name in ('inputs','targets'): assert r.samples==([2,5] if name=='inputs' else [7])
    if verdict=='scale':
        assert c.run(scale=r.new_scale).finite and r.new_scale>=2**-14 and not c.run(scale=r.new_scale*64).finite
    if verdict in ('forward','backward','loss'):
        promoted,scale = heal(c)
        assert c.sound(c.run(promoted, scale)) and promoted==['.' if name=='loss' else producer]

def test_a_meant_infinity_is_no_fault():
    "A mask of -inf, and what an attention makes of it"
    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp,self.mha,self.out = nn.Linear(8,16),nn.MultiheadAttention(16, 2, batch_first=True),nn.Linear(16,1)
        def forward(self, x):
            h = self.inp(x)[:,None].expand(-1,4,-1)
            mask = torch.full((4,4), -math.inf).triu(1)
            scores = (h@h.transpose(1,2)).masked_fill(mask.isinf(), -math.inf)
            return self.out(self.mha(scores.softmax(-1)@h, h, h, attn_mask=mask)[0].mean(1))
    r = diagnose(case(Attn), inside=lambda n: True)
    assert r.verdict=='healthy' and not r.table.nonfinite.any()

def test_not_a_producer_but_its_victims_parent():
    "What overflows in a module's own code is not laid to the child that gets it"
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1,self.lin2 = nn.Linear(16,16),nn.Linear(16,16)
        def forward(self, x): return self.lin2((self.lin1(x)*1e6).relu())*1e-6
    r = diagnose(case(mlp(nn.Sequential(Block()))))
    assert (r.verdict,r.producer,r.op)==('forward','1.0','mul')
    r = diagnose(case(lambda: Block16()))
    assert (r.verdict,r.producer,r.op)==('forward','','exp')

class Block16(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8,1)
        nn.init.constant_(self.lin.bias, 12.)
    def forward(self, x): return self.lin(x).exp()*1e-5

# %% healing
def healed(name):
    s = zoo[name]
    learn = s.make(0).to_fp16_dynamic()
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        hostile.fit(learn, 1, s.lr)
    return s,learn,[str(o.message) for o in w if 'keep_fp32=' in str(o.message)]

@pytest.mark.parametrize('name', ['regnety','norm_free','masked_add','masked_fill','large_logits','rms_inline','poisson','sigmoid_bce','backward_only','cosine'])
def test_the_smallest_set_named_in_one_line(name):
    "All that was promoted at once is needed, and the line of code in the warning gives a fit without a single forward overflow or report"
    s,learn,msgs = healed(name)
    mp = learn.mixed_precision
    if name=='sigmoid_bce': assert mp.promoted==['act']
    line = re.search(r'keep_fp32=(\[.*?\])', msgs[-1])[1]
    assert eval(line)==mp.promoted and all(repr(p) in line for r in mp.reports for p in r.promoted)
    first = next(r for r in mp.reports if r.promoted)
    set_seed(0)
    fresh = s.make(0)
    fresh.create_opt()
    fresh.training = fresh.model.train().training
    b = next(iter(fresh.dls.train))
    c = Case(fresh, Batch(b[:1], b[1:]), None, torch.float16, first.new_scale, None, silent=name=='rms_inline')
    c.fp32 = c.run_fp32()
    sound = lambda keep: c.sound(c.run(keep))
    if name not in ('poisson','norm_free','cosine'): # of which the first batch is another than the one that was healed
        assert sound(first.promoted)
        assert not any(sound([p for p in first.promoted if p!=q]) for q in first.promoted)
    again = s.make(0).to_fp16_dynamic(keep_fp32=eval(line))
    hostile.fit(again, 1, s.lr)
    assert again.mixed_precision.promoted==[] and not again.mixed_precision.history.grad_norm.isna().any()

def test_an_unneeded_promotion_is_given_back():
    "Two modules overflow, one after the other; the second is healed by the first"
    c = case(mlp(Do(lambda x: x*1e6), Do(lambda x: (x*1e-3 if x.dtype==torch.float32 else x*1e-2)), Do(lambda x: x*1e-3)))
    diagnose(c)
    promoted,_ = heal(c)
    assert len(promoted)>=1 and not any(c.run([p for p in promoted if p!=q]).finite for q in promoted)

def test_what_nothing_heals():
    "A module that computes in half precision by itself"
    learn = learner(mlp(Do(lambda x: ((x*1e5).half()*1e-5).float() if x.dtype==torch.float16 or True else x))).to_fp16_dynamic()
    with pytest.warns(UserWarning, match='is not finite|fp32 either'): fit(learn, 3)
    assert learn.mixed_precision.promoted==[] and learn.mixed_precision.n_skipped>2
    clean(learn)

def test_promotions_survive(tmp_path):
    "save, load, a new learner, export and fastai's own learner"
    def make(): return learner(lambda: mlp(Do(times_and_back))(), path=tmp_path)
    a = fit(make().to_fp16_dynamic(), 2)
    assert a.mixed_precision.promoted==['1']
    a.save('a')
    b = make().to_fp16_dynamic().load('a')
    assert b.mixed_precision.promoted==['1'] and b.mixed_precision.ready().kept.keys()=={'1'}
    skipped = b.mixed_precision.n_skipped
    fit(a, 1), fit(b, 1)
    assert b.mixed_precision.n_skipped==skipped and b.mixed_precision.reports==[]
    plain = make().load('a')
    fit(plain, 1)
    a.export()
    e = load_learner(tmp_path/'export.pkl', cpu=False) # else fastai makes it an fp32 learner
    assert e.mixed_precision.promoted==['1'] and len(e.mixed_precision.reports)==len(a.mixed_precision.reports)==1
    assert equal(weights(e), weights(a)) and str(e.mixed_precision.reports[0])==str(a.mixed_precision.reports[0])

def times_and_back(x): return x*1e6*1e-6

def test_promotions_of_lr_find_end_with_it(tmp_path):
    learn = learner(mlp(Do(times_and_back)), path=tmp_path).to_fp16_dynamic()
    with learn.no_bar(): learn.lr_find(show_plot=False)
    assert learn.mixed_precision.promoted==[] and len(learn.mixed_precision.reports)>=1
    clean(learn)

@pytest.mark.parametrize('what', ['validate','get_preds','valid of a fit'])
def test_outside_training(what):
    "A sample that only the validation set has overflows: the batch is computed again, with the producer in fp32"
    def run(to):
        learn = to(learner(mlp(Do(times_and_back) if what!='valid of a fit' else Do(large_and_back))))
        if what=='valid of a fit':
            learn.dls.valid.dataset[3] = (torch.full((8,), 1e3),learn.dls.valid.dataset[3][1])
            fit(learn, 1)
            return learn,torch.tensor([learn.recorder.values[-1][1]])
        with learn.no_bar(), learn.no_logging():
            return learn,torch.tensor(learn.validate()) if what=='validate' else learn.get_preds()[0]
    (_,a),(learn,b) = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)
    assert learn.mixed_precision.promoted==['1'] and learn.mixed_precision.n_skipped==0

def large_and_back(x): return x*200/200

def test_a_meant_infinity_outside_training_is_asked_about_seldom():
    def model(): return nn.Sequential(nn.Linear(8,2), Do(lambda x: torch.cat([x, torch.full_like(x[:,:1], -math.inf)], 1)))
    learn = learner(model, n=512, loss_func=lambda p,t: p[:,:1].mean()).to_fp16_dynamic()
    fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): p = learn.get_preds(0)[0]
    assert p[:,2].isinf().all() and learn.mixed_precision.reports==[] and 7<=learn.mixed_precision._pause<64

@pytest.mark.parametrize('name', ['NaN in three samples','a broken pixel'])
def test_scattered_faults_do_not_end_the_fit(name):
    s = hostile.hopeless['nan_samples'] if name.startswith('NaN') else zoo['broken_pixels']
    learn = s.make(0).to_fp16_dynamic()
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        hostile.fit(learn, 2, 1e-2)
    mp = learn.mixed_precision
    assert len(learn.recorder.values)==2 and all(p.isfinite().all() for p in weights(learn)) and mp.scaler.get_scale()==2**16
    if name.startswith('NaN'):
        assert 3<=mp.n_skipped<=6 and mp.promoted==[] and {r.verdict for r in mp.reports}=={'data'}
        found = sum(len(r.samples) for r in mp.reports)
        assert found>=1 and any('samples: ' in str(o.message) for o in w)

def test_divergence_ends_the_fit_with_the_last_good_weights():
    s = hostile.hopeless['diverges']
    learn = s.make(0).to_fp16_dynamic()
    with pytest.warns(UserWarning, match='divergence at the learning rate 10, not precision'), learn.no_bar(), learn.no_logging(): learn.fit(5, s.lr)
    mp = learn.mixed_precision
    assert all(p.isfinite().all() for p in weights(learn)) and mp.reports[-1].verdict=='divergence' and len(mp.history)<40
    clean(learn)

def test_accumulated_batches_are_all_looked_at():
    "The first of four overflows; the one at hand when the step is skipped is the last"
    learn = learner(mlp(Do(large_and_back)), n=16, bs=4, shuffle=False, cbs=GradientAccumulation(16))
    for i in range(4): learn.dls.train.dataset[i] = (torch.full((8,), 1e3),learn.dls.train.dataset[i][1])
    mp = fit(learn.to_fp16_dynamic(), 4).mixed_precision
    assert mp.promoted==['1'] and mp.history.grad_norm.isna().tolist()==[True,True,False,False]

def test_raise_and_warn_in_a_forward_pass_that_raises():
    def model(): return mlp(Do(lambda x: x.masked_fill(x>1, -1e9).clamp(min=-1)))()
    with pytest.raises(FloatingPointError, match='raises in float16'): fit(learner(model).to_fp16_dynamic(on_spiral='raise'), 1)
    with pytest.warns(UserWarning, match='raises in float16'), pytest.raises(RuntimeError, match='without overflow'):
        fit(learner(model).to_fp16_dynamic(on_spiral='warn'), 1)
    def broken(): return mlp(Do(lambda x: x.nonsense))()
    with pytest.raises(AttributeError, match='nonsense'): fit(learner(broken).to_fp16_dynamic(), 1)

# %% reports
def test_diagnose_fp16_on_a_healthy_learner():
    "The numbers are those of fp32, the most endangered module comes first, the shares are those of a cast to fp16"
    learn = fit(learner(mlp(Do(lambda x: x*64), nn.ReLU())).to_fp16_dynamic(), 1)
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
        assert o.bits==pytest.approx(math.log2(65504/max(o.input, o.output, o.inside, scale*o.gradient, scale*w)), abs=1e-3)
        g = scale*y.grad[y.grad!=0]
        assert o.flushed==pytest.approx((g.half()==0).float().mean().item()) and o.subnormal==pytest.approx(((g.half()!=0)&(g.abs()<2**-14)).float().mean().item())

def test_shares_at_a_low_scale():
    learn = learner(mlp(nn.ReLU()), loss_func=lambda p,t: 1e-6*mse(p, t)).to_fp16_dynamic(init_scale=1.)
    r = learn.diagnose_fp16(learn.dls.one_batch())
    assert r.table.flushed.max()>0.5
    learn = learner(mlp(nn.ReLU()), loss_func=lambda p,t: 1e-6*mse(p, t)).to_fp16_dynamic(init_scale=2.**24)
    assert learn.diagnose_fp16().table.flushed.max()<0.1

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16, Learner.to_fp16_dynamic, Learner.to_bf16_dynamic])
def test_diagnose_fp16_before_any_fit(to):
    "On any learner; shuffling, too, is as it was"
    a,b = learner(),learner()
    r = to(a).diagnose_fp16()
    a.to_fp32()
    assert isinstance(r, PrecisionReport) and r.dtype==(torch.bfloat16 if to==Learner.to_bf16_dynamic else torch.float16)
    assert equal(state(fit(a, 1)), state(fit(b, 1)))

@pytest.mark.parametrize('name', ['forward','healthy','divergence','data'])
def test_the_report_can_be_read(name):
    from html.parser import HTMLParser
    import matplotlib.pyplot as plt
    make = dict(verdicts, data=verdicts['inputs'])[name][0]
    r = diagnose(make())
    text,page = str(r),r._repr_html_()
    rows = [l for l in text.splitlines() if l.startswith('> ')]
    assert len(rows)==(r.producer is not None) and (r.producer is None or rows[0].split()[1]==r.producer)
    class Check(HTMLParser):
        def __init__(self): super().__init__(); self.open,self.hot = [],0
        def handle_starttag(self, tag, attrs):
            self.open.append(tag)
            self.hot += tag=='tr' and 'rgba(218' in dict(attrs).get('style', '')
        def handle_endtag(self, tag): assert self.open.pop()==tag
    p = Check()
    p.feed(page)
    assert p.open==[] and p.hot==len(rows) and 'color:' not in page.replace('color:inherit', '') # the page's own, light or dark
    ax = r.plot()
    assert [t.get_text() for t in ax.get_yticklabels()]==[o or '(the model)' for o in r.table.sort_values('order', ascending=False).module]
    assert len(ax.patches)==len(r.table)
    plt.close('all')
    assert str(pickle.loads(pickle.dumps(r)))==text

def test_names_are_escaped():
    class Sneaky(nn.Module):
        def forward(self, x): return x*1e6
    Sneaky.__name__ = '<b>Sneaky</b>'
    r = diagnose(case(mlp(Sneaky())))
    assert '<b>Sneaky' not in r._repr_html_() and '&lt;b&gt;Sneaky' in r._repr_html_()

def test_the_producer_is_shown_wherever_it_stands():
    "It may have more room than a dozen others, where an intermediate of its own overflows"
    r = diagnose(case(lambda: nn.Sequential(nn.Linear(8,16), *[Do(lambda x: x+2500) for _ in range(14)], Do(lambda x: x-34900), Do(lambda x: x*1e6*1e-6), nn.Linear(16,1))))
    assert r.producer=='16' and [l.split()[1] for l in str(r).splitlines() if l.startswith('> ')]==['16'] and r._repr_html_().count('rgba(218')==1

class Masked(nn.Module):
    "Two inputs, one of them a mask of 0 and -inf; a frozen mask and a buffer of -inf"
    def __init__(self):
        super().__init__()
        self.lin,self.out,self.prior = nn.Linear(8,4),nn.Linear(4,1),nn.Parameter(torch.tensor([0.,0.,0.,-math.inf]), requires_grad=False)
        self.register_buffer('never', torch.tensor([0.,-math.inf,0.,0.]))
    def forward(self, x, mask): return self.out((self.lin(x)+mask+self.prior+self.never).softmax(-1))

def test_meant_infinities_in_inputs_weights_and_buffers_are_not_blamed():
    x,mask = torch.randn(8,8),torch.zeros(8,4)
    mask[::2,0] = -math.inf
    def verdict(x, mask=mask, broken=None):
        c = case(Masked)
        c.batch.xb = (x,mask)
        if broken: c.model.get_buffer('never').fill_(math.nan) if broken=='buffer' else c.model.lin.bias.data.fill_(math.nan)
        return diagnose(c)
    assert verdict(x).verdict=='healthy'
    r = verdict(with_nan(x, 1, 4))
    assert (r.verdict,r.samples)==('data',[1,4]) and 'inputs of the batch' in r.sentence
    r = verdict(with_nan(x, 1), with_nan(mask, 1, 6))
    assert (r.verdict,r.samples)==('data',[1,6])
    assert verdict(x, broken='buffer').sentence.startswith('Weights are not finite already: never (4 of 4 numbers)')
    assert verdict(with_nan(x, 1), broken='weight').verdict=='weights'

# %% in a fit, on every kind of learner
class InRoot(nn.Module):
    "Root mean squares in the model's own code"
    def __init__(self):
        super().__init__()
        self.inp,self.out = nn.Linear(16,16),nn.Linear(16,4)
    def forward(self, x):
        x = self.inp(x)
        return self.out((x/(x.pow(2).mean(1, keepdim=True)+1e-6).sqrt()).relu())

@pytest.mark.parametrize('share', [0.1,0.5])
def test_silent_overflows_in_some_samples(share):
    "`x/inf` is 0: no step is skipped and no gradient is 0 throughout, but predictions are not those of fp32"
    def figure(to):
        def data(n):
            x,y = hostile.classes(n)
            return torch.where(torch.rand(n, 1)<share, 1000., 1.)*x,y
        learn = to(hostile.learner(0, data, InRoot))
        return learn,hostile.fit(learn, 8, 1e-2)
    (_,fp32),(learn,fp16) = figure(Learner.to_fp32),figure(Learner.to_fp16_dynamic)
    mp = learn.mixed_precision
    assert fp32>0.95 and abs(fp32-fp16)<0.02 and mp.promoted==['.'] and 'wrong ones' in mp.reports[0].sentence

def test_the_second_look_is_rare():
    from fastai_amp16.callback import _is_asked
    assert [n for n in range(1000) if _is_asked(n)]==[16,272,528,784]

def test_a_harmless_mask_is_not_named():
    "It becomes -inf in half precision, and a softmax makes 0 of it; what overflows is another"
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask,self.inp,self.ffn,self.out = Do(lambda s: (torch.ones(4,4).triu(1)*-1e9).to(s.dtype)),nn.Linear(8,4),nn.Sequential(nn.Linear(4,4), Do(times_and_back)),nn.Linear(4,1)
        def forward(self, x):
            h = self.inp(x)
            s = (h[:,:,None]*h[:,None]+self.mask(h)).softmax(-1)
            return self.out(self.ffn((s@h[...,None])[...,0]))
    with pytest.warns(UserWarning) as w: learn = fit(learner(Soft).to_fp16_dynamic(), 2)
    assert learn.mixed_precision.promoted==['ffn.1'] and learn.mixed_precision.reports[0].producer=='ffn.1'
    assert any('`mul` in ffn.1 (Do)' in str(o.message) for o in w)

def test_a_module_named_like_the_loss_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.loss_func = nn.Linear(8,1),Do(times_and_back)
        def forward(self, x): return self.loss_func(self.lin(x))
    r = diagnose(c:=case(Model))
    assert (r.verdict,r.producer)==('forward','loss_func') and heal(c)[0]==['loss_func']

def test_the_remedy_without_healing_leaves_something_in_half():
    r = diagnose(case(lambda: Block16()))
    assert r.remedy=="keep_fp32=['.']"

def test_a_new_model_does_not_inherit_promotions():
    learn = fit(learner(mlp(Do(times_and_back))).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.promoted==['1']
    learn.model = nn.Linear(8,1)
    learn.create_opt()
    fit(learn, 1)
    assert learn.mixed_precision.promoted==[]

def test_compiled_as_a_whole():
    learn = learner(mlp(Do(times_and_back)))
    learn.model = torch.compile(learn.model, backend='eager')
    fit(learn.to_fp16_dynamic(), 3)
    assert learn.mixed_precision.promoted==['1'] and learn.mixed_precision.n_skipped==2

def test_a_lazy_module_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4,1))
    learn = learner(lambda: model).to_fp32()
    with untouched(learn): model(torch.randn(2,8))
    assert type(model[0]) is nn.LazyLinear and torch.nn.parameter.is_lazy(model[0].weight)
    model(torch.randn(2,8))

def test_a_hook_that_removes_itself_comes_back():
    c = case(mlp(nn.ReLU()))
    handle = c.model[0].register_forward_hook(lambda m,x,y: handle.remove())
    replay(c.learn, c.batch)
    assert len(c.model[0]._forward_hooks)==1

class Ask(Callback):
    "Asks for a report at each `event`"
    def __init__(self, event, b=None): setattr(self, event, lambda: self.reports.append(self.learn.diagnose_fp16(b)) if self.training else None)
    def before_fit(self): self.reports = []

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_backward','after_batch'])
@pytest.mark.parametrize('kind', ['mixup','torch','iterable','text'])
def test_asking_in_a_fit_changes_nothing(kind, event):
    from fastai.basics import DataLoader,DataLoaders
    from fastai.callback.mixup import MixUp
    def run(*cbs):
        set_seed(0, reproducible=True)
        if kind=='mixup': learn = hostile.learner(0, hostile.classes, lambda: nn.Linear(16,4), loss_func=CrossEntropyLossFlat(), n=64)
        else: learn = learner(n=40, bs=16)
        ds = learn.dls.train.dataset
        if kind=='torch':
            dls = [torch.utils.data.DataLoader(list(ds), 16, shuffle=s) for s in (True,False)]
            learn.dls = DataLoaders(*dls, device='cpu')
        if kind=='iterable':
            class It(torch.utils.data.IterableDataset):
                def __iter__(self): return iter(list(ds))
            learn.dls = DataLoaders(DataLoader(It(), bs=16, n=40), learn.dls.valid)
        if kind=='text':
            from fastai.text.data import LMDataLoader,LMTensorText
            texts = [(LMTensorText(torch.randint(0, 9, (20+i,))),) for i in range(9)]
            learn.dls = DataLoaders(LMDataLoader(texts, bs=4, seq_len=6, shuffle=True), LMDataLoader(texts[:4], bs=4, seq_len=6))
            learn.model = nn.Sequential(nn.Embedding(9,8), nn.Linear(8,9))
            learn.loss_func = lambda p,t: nn.functional.cross_entropy(p.flatten(0, 1), t.flatten())
        learn.add_cbs([*cbs, *([MixUp()] if kind=='mixup' else [])])
        return fit(learn.to_fp16_dynamic(), 2)
    a,b = run(),run(ask:=Ask(event))
    assert len(ask.reports)>3 and all(r.verdict=='healthy' for r in ask.reports) and equal(state(a), state(b))
    before = random.getstate(),torch.get_rng_state()
    assert b.diagnose_fp16().verdict=='healthy' and before[0]==random.getstate() and torch.equal(before[1], torch.get_rng_state())

def test_a_module_that_only_looks_on_has_no_derivative():
    "It takes in the tensor whose gradient is bad, deeper inside than the module at fault"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.out,self.root,self.log = nn.Linear(8,16),nn.Linear(16,1),Do(lambda x: torch.sqrt((x*1e-5)**2+1e-12)*1e5),nn.Sequential(nn.Sequential(nn.Tanh()))
        def forward(self, x):
            h = self.lin(x)
            self.log(h)
            return self.out(self.root(h))
    assert diagnose(case(Model)).producer=='root'

def test_a_layer_and_a_scale_at_once():
    "The layer is kept in fp32, and the scale that fits comes with it"
    c = case(mlp(Do(times_and_back)), loss_func=lambda p,t: 1e4*mse(p, t))
    assert diagnose(c).verdict=='forward'
    promoted,scale = heal(c)
    assert promoted==['1'] and scale<2**16 and c.run(promoted, scale).finite and not c.run(promoted, 2.**16).finite

def test_divergence_beside_a_mask_of_infinities():
    c = case(Masked)
    with torch.no_grad(): c.model.lin.weight.fill_(3e38)
    mask = torch.zeros(8,4)
    mask[::2,0] = -math.inf
    c.batch.xb = (torch.randn(8,8),mask)
    assert diagnose(c).verdict=='divergence'

def test_what_a_checkpoint_computes_again_is_not_noted():
    learn = learner(Stateful)
    learn.xb,learn.yb,learn.training = (torch.randn(4,8),),(torch.randn(4,1),),True
    run = replay(learn, Batch.of(learn), PrecisionPlan)
    assert run.finite and run.calls['sn',None]==1

class Explode(Detour):
    def forward(self, x): return x*1e30*1e30 if self.on else x

def test_a_divergence_that_passes_does_not_end_the_fit():
    "Two batches that fp32 cannot hold either, far from each other"
    learn = learner(mlp(Explode()), cbs=Poison({2,6}, 'precision')).to_fp16_dynamic()
    fit(learn, 3)
    assert len(learn.recorder.values)==3 and learn.mixed_precision.history.skipped.sum()==2 and learn.mixed_precision.reports[-1].verdict=='divergence'

def test_a_text_loader_gives_what_it_would_have_given():
    from fastai.text.data import LMDataLoader,LMTensorText
    def batches(ask):
        set_seed(0, reproducible=True)
        dl = LMDataLoader([(LMTensorText(torch.randint(0, 9, (20+i,))),) for i in range(9)], bs=4, seq_len=6, shuffle=True)
        learn = learner()
        if ask:
            with untouched(learn, dl): dl.one_batch()
        set_seed(1)
        return [b[0] for b in dl]
    assert equal(batches(False), batches(True))

def test_a_loss_function_that_calls_itself():
    def make():
        def loss(p, t, n=2): return mse(p, t) if n==0 else later if n<0 else loss(p, t, n-1)
        c = case(mlp(nn.ReLU()), loss_func=loss)
        assert diagnose(c).verdict=='healthy' # `later` is not there yet
        later = 1
        return later
    assert make()

# %% batches at hand, and faults that come now and then
class Raises(torch.autograd.Function):
    "A product whose derivative takes only fp32"
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w.T)
    @staticmethod
    def backward(ctx, g):
        x,w = ctx.saved_tensors
        return g.mm(w),g.T.mm(x)

class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16,16)*0.2)
    def forward(self, x): return Raises.apply(x, self.w)

def test_a_backward_pass_that_raises_is_healed():
    def run(to): return fit(to(learner(lambda: mlp(Product(), nn.BatchNorm1d(16), nn.ReLU())(), n=256)), 4)
    fp32,fp16 = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    mp = fp16.mixed_precision
    assert mp.promoted==['1'] and mp.reports[0].verdict=='backward' and 'raises in float16' in mp.reports[0].sentence
    assert len(mp.history)==64 and fp16.validate()[0]<1.5*fp32.validate()[0]
    kept = run(partial(Learner.to_fp16_dynamic, keep_fp32=['1']))
    assert mp.history.grad_norm[0]==kept.mixed_precision.history.grad_norm[0] # nothing remains of the gradients that there were already
    with pytest.raises(FloatingPointError): fit(learner(mlp(Product())).to_fp16_dynamic(on_spiral='raise'))

def test_a_backward_pass_that_raises_in_fp32_too():
    class Never(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise RuntimeError('never')
    learn = learner(mlp(Do(Never.apply))).to_fp16_dynamic()
    with pytest.raises(RuntimeError, match='never'): fit(learn)
    assert learn.mixed_precision.promoted==[] and all(p.grad is None or not p.grad.any() for p in learn.model.parameters())
    clean(learn)

class Zeros(Callback):
    "Zero rows in each tenth batch, whose norm has no derivative in fp16"
    order = 5
    def before_batch(self):
        if self.training and self.train_iter%10==5: self.learn.xb = (self.x.index_fill(0, torch.tensor([0]), 0.),)

def test_overflows_that_come_now_and_then():
    "Never three in a row, and each halves the scale"
    class Length(nn.Module):
        def forward(self, x): return x+(x.square().sum(1, keepdim=True)+1e-12).sqrt()
    def model(): return nn.Sequential(nn.Linear(8,16,bias=False), Length(), nn.Linear(16,1))
    learn = fit(learner(model, n=1600, cbs=Zeros()).to_fp16_dynamic(), 3)
    mp = learn.mixed_precision
    assert mp.promoted==['1'] and mp.n_skipped==6 and mp.scaler.get_scale()==2**11

def test_one_loud_batch_in_ten_does_not_set_the_scale():
    class Loud(Callback):
        def before_backward(self):
            if self.train_iter%10==5: self.learn.loss_grad = self.learn.loss_grad*1e7
    learn = fit(learner(n=1600, cbs=Loud()).to_fp16_dynamic(growth_interval=10**6), 1)
    assert learn.mixed_precision.n_skipped==10 and learn.mixed_precision.scaler.get_scale()==2**6 and learn.mixed_precision.promoted==[]

def test_a_scale_that_looks_for_its_limit():
    "It grows until it overflows, and again: business as usual, however often"
    mp = fit(learner(n=1600).to_fp16_dynamic(growth_interval=3, max_scale=2.**40), 1).mixed_precision
    assert mp.n_skipped>12 and mp.reports==[] and mp.promoted==[]

@pytest.mark.parametrize('n', [256, 320])
def test_validation_is_judged_by_its_own_batch(n):
    "Not by the last of training, which may have been noted: the 16th, or any after a NaN"
    learn = learner(lambda: nn.Sequential(nn.Linear(8,16,bias=False), nn.Linear(16,1,bias=False)), n=n)
    learn.dls.valid.dataset[:] = [(x*3e5,y) for x,y in learn.dls.valid.dataset]
    if n==320: learn.dls.train.dataset[0] = (learn.dls.train.dataset[0][0]*math.nan, learn.dls.train.dataset[0][1])
    fit(learn.to_fp16_dynamic(), 1)
    assert math.isfinite(learn.recorder.values[-1][1]) and learn.mixed_precision.promoted

# %% numbers that become 0
def test_small_numbers_that_fp16_rounds_to_0():
    "Nothing overflows, no step is skipped, nothing is learned"
    def model(): return nn.Sequential(Do(lambda x: x*1e-9), nn.Linear(8,16,bias=False), Do(lambda x: x.float()*1e9), nn.ReLU(), nn.Linear(16,1))
    r = learner(model).diagnose_fp16()
    assert (r.verdict,r.producer,r.op)==('forward','1','linear') and 'rounds to 0' in r.sentence
    def run(to): return fit(to(learner(model, n=512)), 6)
    fp32,fp16 = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert fp16.mixed_precision.promoted==['1'] and fp16.validate()[0]<1.3*fp32.validate()[0]

# %% who is asked, and in what state
def test_gradients_of_weights_count():
    "They add up over the batch, and pass 65504 where no activation's gradient does"
    learn = learner(lambda: nn.Sequential(nn.Linear(8,16), nn.Linear(16,1)), n=512, bs=512, scale=100., loss_func=nn.functional.mse_loss)
    low = learn.to_fp16_dynamic(init_scale=8.).diagnose_fp16()
    top = low.table.weight_grad.max()
    assert top>3*low.table.gradient.max()
    r = learn.to_fp16_dynamic(init_scale=65504/top*3).diagnose_fp16() # too high for the weights only
    assert (r.verdict,low.verdict)==('scale','healthy') and low.scale==8
    assert low.table.bits.min()==pytest.approx(math.log2(65504/top/8), abs=0.1) and r.new_scale<=65504/top<4*r.new_scale

def test_a_module_made_in_forward_belongs_to_the_code_that_makes_it():
    "It is no part of the model, and none of the loss function either"
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = [Do(lambda x: x.square())] # a plain list
        def forward(self, x): return nn.Identity()(self.acts[0](x))/1e5
    r = diagnose(case(mlp(Do(lambda x: x*1e3), Squares())))
    assert (r.verdict,r.producer,r.op)==('forward','2','square')

def test_a_loss_that_carries_its_annotations():
    "fastai's `BaseLoss` takes over `__annotations__`, with generic types whose own `__dict__` nobody may write to"
    from fastai.losses import FocalLossFlat
    def model(): return nn.Sequential(nn.Linear(8,16), Do(lambda x: x*1e6), nn.Linear(16,2))
    learn = learner(model, loss_func=FocalLossFlat())
    for o in (learn.dls.train,learn.dls.valid): o.dataset[:] = [(x,(y>0).long()[0]) for x,y in o.dataset]
    learn.model.types = [list[int]]
    assert learn.diagnose_fp16().verdict=='forward'
    assert fit(learn.to_fp16_dynamic()).mixed_precision.n_skipped==2 and len(learn.mixed_precision.promoted)>0

def test_own_code_may_use_the_weights_of_its_layers():
    "As `nn.MultiheadAttention` does"
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.att = nn.MultiheadAttention(8, 2, batch_first=True)
        def forward(self, x): return self.att(x[:,None], x[:,None], x[:,None])[0][:,0]
    def run(to, **kwargs): return fit(to(learner(lambda: nn.Sequential(nn.Linear(8,8), Attention(), nn.Linear(8,1))), **kwargs))
    learn = run(Learner.to_fp16_dynamic, keep_fp32=['1.att.'], on_spiral='raise')
    assert learn.mixed_precision.n_skipped==0
    for p,q in zip(learn.model.parameters(), run(Learner.to_fp32).model.parameters()): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)

@pytest.mark.parametrize('event', ['before_fit','before_epoch','before_train','before_batch','after_batch','after_epoch'])
def test_a_report_can_be_asked_for_in_any_event(event):
    asks = Callback()
    setattr(asks, event, lambda: asks.reports.append(asks.learn.diagnose_fp16()))
    asks.reports = []
    fit(learner(cbs=asks).to_fp16_dynamic(), 1)
    assert asks.reports and asks.reports[0].verdict in ('healthy','scale')

def test_a_report_where_there_is_nothing_to_train_or_to_load():
    learn = learner()
    b = learn.dls.one_batch()
    for p in learn.model.parameters(): p.requires_grad_(False)
    assert learn.diagnose_fp16().verdict=='healthy'
    learn.dls = None
    assert learn.diagnose_fp16(b).verdict=='healthy'
    with pytest.raises(ValueError, match='no data loaders'): learn.diagnose_fp16()

def test_the_report_of_a_fit_ranks_the_producer_first():
    learn = fit(learner(mlp(Do(lambda x: (x*300)**2/1e4))).to_fp16_dynamic())
    r = learn.mixed_precision.reports[0]
    assert r.producer=='1' and r.table.module[0]=='1' and r.table.bits[0]<0

class Squares(nn.Module):
    "A square in its own code, which is kept in fp32 with the layers inside in half precision; then a loss with large gradients"
    def __init__(self): super().__init__(); self.body,self.norm,self.head = nn.Linear(4,16),nn.LayerNorm(16),nn.Linear(16,2)
    def forward(self, x):
        h = self.body(x)
        return self.head(self.norm(h*h))

def test_the_scale_that_fits_where_own_code_is_kept():
    set_seed(0, reproducible=True)
    batch = Batch((1000*torch.randn(32,4),), (torch.randint(2, (32,)),))
    learn = learner(Squares, loss_func=lambda p,t: 300*nn.functional.cross_entropy(p, t))
    def case(scale): return Case(learn, batch, ['.'], torch.float16, scale, 2.**-14)
    fits = max(s for s in range(17) if case(2.**s).run().finite)
    report = diagnose(case(2.**16))
    assert report.verdict=='scale' and 2.**(fits-2)<=report.new_scale<=2.**fits and fits>4

def test_a_layer_with_nearly_all_weights_has_its_plain_name():
    "Only what has modules inside has code of its own to speak of"
    learn = learner(lambda: nn.Sequential(nn.Linear(8,64), nn.Sequential(Squares(), nn.ReLU()), nn.Linear(64,1)))
    case = Case(learn, Batch((torch.randn(4,8),), (torch.randn(4,1),)))
    assert [next(_ladder(case, n)) for n in ('0','1.0','1.0.body')]==['0','1.0','1.0.body']
    learn.model = nn.Sequential(nn.Linear(8,64))
    assert list(_ladder(Case(learn, case.batch), '0'))==['0']

@pytest.mark.parametrize('ask', ['diagnose_fp16','fp16_doctor'])
def test_a_model_that_cannot_be_asked(ask):
    def about(model): return getattr(learner(model), ask)()
    with pytest.raises(ValueError, match='ReLU has no parameters'): about(nn.ReLU)
    if ask=='diagnose_fp16':
        with pytest.raises(ValueError, match=r'model\.float\(\)'): about(lambda: nn.Linear(8,1).half())
