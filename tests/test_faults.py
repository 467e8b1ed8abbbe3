"Interrupts, cancelled steps, overflows: the same scenario in fp32 is the control"
import copy,functools,math,pickle,random,sys,warnings
from collections import Counter
import fastai.basics
import pytest,torch
from fastai.basics import (Callback,CancelBackwardException,CancelBatchException,CancelFitException,
                           Learner,SGD,nn,partial)
from fastai.callback.all import GradientAccumulation,TerminateOnNaNCallback
from torch.utils.checkpoint import checkpoint
from fastai_amp16.all import AdamW16,FusedAdam,PrecisionWarning,half_forward
from fastai_amp16.diagnosis.messages import written_gradients
from fastai_amp16.precision.patched import own_forward
from common import *

# --- interrupts

def unrelated():
    "What a learner that has nothing to do with the others makes of its weights, in fp32 and in fp16"
    return [p.tolist() for to in (Learner.to_fp32, Learner.to_fp16_dynamic) for p in weights(fit(to(learner(n=32, opt_func=AdamW16)), 1))]

@pytest.fixture(scope='module')
def before_any_interrupt(): return unrelated(),process_wide()[:-1]

def train_loss(learn):
    "The loss on the training set, in fp32, batch statistics and all"
    xs,ys = map(torch.stack, zip(*learn.dls.train_ds))
    with torch.no_grad(): return mse(copy.deepcopy(learn.model).train()(xs), ys).item()

def works(learn):
    "Nothing is left of what stopped it"
    clean(learn)
    again = pickle.loads(pickle.dumps(learn))
    assert equal(weights(again), weights(learn)) and again.mixed_precision.plan is None # which would hold on to the model
    before = train_loss(learn)
    fit(learn, 2)
    clean(learn)
    assert train_loss(learn)<before

class Half(nn.Module):
    "Runs a module, and fails there if told to: in its forward pass or, by a hook on its output, in its backward pass"
    fail,backward = None,False
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x):
        if self.fail and self.training and not self.backward: self.fail()
        x = self.m(x)
        if self.fail and self.training and self.backward: x.register_hook(self.fail)
        return x

class Deep(nn.Module):
    "Modules in modules, and a checkpointed one, which runs again in the backward pass"
    def __init__(self):
        super().__init__()
        self.inp,self.norm = Half(nn.Linear(8,16)),Half(nn.LayerNorm(16))
        self.kept = Half(nn.Sequential(Half(nn.Linear(16,16)), nn.GroupNorm(2,16)))
        self.again,self.out = Half(nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.ReLU())),nn.Linear(16,1)
    def forward(self, x):
        x = self.kept(self.norm(self.inp(x)))
        return self.out(checkpoint(self.again, x, use_reentrant=False))

class FailingStep(FusedAdam):
    "An optimizer that can be told to fail before a step"
    fail = None
    def step(self, closure=None):
        if self.fail: self.fail()
        super().step(closure)

class Loss:
    fail = None
    def __call__(self, p, t):
        if self.fail: self.fail()
        return mse(p, t)

events = [e for e in fastai.callback.core._events if e!='after_create' and 'cancel' not in e]
parts = [f'{n} {way}' for n in ('inp','norm','kept','again','kept.m.0') for way in ('forward','backward')]
sites = [*((e, order) for e in events for order in (-30, 99)), *((o, 0) for o in (*parts,'loss','optimizer'))]
def all_interrupts():
    "A Ctrl-C everywhere; other exceptions take other ways only within a batch"
    outside = {f'{when}_{what}' for when in ('before','after') for what in ('fit','epoch','train','validate')}
    for site,order in sites:
        yield pytest.param(site, order, KeyboardInterrupt, marks=[slow]*(order==99))
        if site not in outside and order>=0: yield pytest.param(site, order, ValueError, marks=[slow]*(site in events))
        if site in parts: yield site,order,torch.OutOfMemoryError # it is raised where something computes

@pytest.mark.parametrize('site,order,ex', list(all_interrupts()))
@pytest.mark.usefixtures('uncompared')
def test_interrupts(site, order, ex, before_any_interrupt):
    first = 1 if site in ('before_fit','after_fit') else 2
    raising = Raise(site if site in events else 'before_fit', ex, range(first, 99), order)
    learn = learner(Deep, n=32, loss_func=Loss(), opt_func=FailingStep, lr=0.1).to_fp16_dynamic(keep_fp32='kept')
    learn.create_opt()
    where = {'loss':learn.loss_func, 'optimizer':learn.opt}.get(site)
    if ' ' in site:
        where = learn.model.get_submodule(site.split()[0])
        where.backward = site.endswith('backward')
    if where is None: learn.add_cb(raising)
    else: where.fail = raising.boom
    with pytest.raises(ex, match='now'): fit(learn, 2)
    assert raising.times-first<=(ex is ValueError) # half precision may be to blame for it, as one more run tells
    learn.remove_cb(raising)
    if where is not None: where.fail = None
    works(learn)
    assert process_wide()[:-1]==before_any_interrupt[1]
    if ex is KeyboardInterrupt and order<=0: assert unrelated()==before_any_interrupt[0]

@pytest.mark.parametrize('ex', [KeyboardInterrupt, torch.OutOfMemoryError, ValueError])
@pytest.mark.parametrize('what', ['validate','get_preds','lr_find','validation of a fit'])
def test_interrupts_outside_training(what, ex, tmp_path, before_any_interrupt):
    learn = fit(learner(Deep, n=32, path=tmp_path).to_fp16_dynamic(), 1)
    def forward(m, x):
        if what=='lr_find' or not learn.training: raise ex('now')
    hook = learn.model.again.register_forward_pre_hook(forward)
    with learn.no_bar(), learn.no_logging(), pytest.raises(ex, match='now'):
        if what=='validation of a fit': learn.fit(1)
        else: getattr(learn, what)()
    hook.remove()
    works(learn)
    assert process_wide()[:-1]==before_any_interrupt[1]

class EveryEvent(Callback):
    "At each event the parameters are the masters, and a copy of the model is the user's own"
    def __init__(self, order): self.order,self.n = order,Counter()
    def look(self, event):
        self.n[event] += 1
        masters(self.learn)
        modules = list(self.model.modules())
        assert all(own_forward(m) is None for m in modules)
        for dup in (copy.deepcopy(self.model), pickle.loads(pickle.dumps(self.model))):
            assert equal(weights(self.learn), list(dup.parameters())) and not {*modules} & {m.forward.__self__ for m in dup.modules()}
            new = Deep().eval()
            new.load_state_dict(self.model.state_dict())
            x = torch.ones(2,8)
            torch.testing.assert_close(dup.eval()(x), new(x), rtol=0, atol=0, equal_nan=True) # in fp32
for e in events: setattr(EveryEvent, e, lambda self, e=e: self.look(e))

@pytest.mark.filterwarnings('error:A batch is not finite') # the diagnosis failed
@pytest.mark.parametrize('order', [-30, 10.5])
@poisoned('forward', 'backward')
def test_at_every_event_the_model_is_the_users_own(order):
    cb = EveryEvent(order)
    learn = fit(learner(Deep, n=32, cbs=[cb, Poison({0}, 'backward'), Poison({2}, 'forward')]).to_fp16_dynamic(keep_fp32='kept'), 2)
    assert cb.n.keys()>=set(events)-{'after_step'} and learn.mixed_precision.n_skipped==2
    clean(learn)

@functools.cache
def lines_of(code): return {(code.co_filename,line) for *_,line in code.co_lines()}

class StopAtLine:
    "Counts the lines that run in our modules and in torch's autocast; raises, as a Ctrl-C may, at the `n`-th time of the line `at`"
    files = {torch.amp.autocast_mode.__file__, *(m.__file__ for n,m in sys.modules.items() if n.startswith('fastai_amp16.'))}
    def __init__(self, at=None, n=0): self.at,self.n,self.times,self.raised = at,n,Counter(),False
    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename not in self.files: return None
        return self.local if self.at is None or self.at in lines_of(code) else None # elsewhere, a trace only takes time
    def local(self, frame, event, arg):
        if event=='line':
            line = frame.f_code.co_filename,frame.f_lineno
            self.times[line] += 1
            if line==self.at and self.times[line]==self.n:
                self.raised = True
                raise KeyboardInterrupt
        return self.local

class Bare(nn.Module):
    "A parameter that autocast casts, and keeps in its cache"
    def __init__(self):
        super().__init__()
        self.m,self.w,self.detour = mlp(),nn.Parameter(torch.randn(8,8)),Detour()
    def forward(self, x): return self.m(self.detour(x@self.w))

def stopped(where, *at):
    "A learner whose fit was stopped there, and what ran until then"
    learn,stop = learner(Bare, n=32, shuffle=False, cbs=Poison({1}, where)).to_fp16_dynamic(),StopAtLine(*at)
    learn.create_opt()
    try:
        sys.settrace(stop)
        fit(learn, 1)
    except KeyboardInterrupt: assert stop.raised
    finally: sys.settrace(None)
    return learn,stop

@pytest.mark.filterwarnings('ignore:`mul` in .detour')
@pytest.mark.parametrize('some', few(range(8), 0))
@pytest.mark.parametrize('where', [
    pytest.param('backward', marks=poisoned('backward')), # a step that is skipped
    'precision']) # one that is healed
def test_ctrl_c_at_any_line_of_ours(where, some):
    "The next fit is what it would have been without the one that was stopped, bit for bit"
    new,_ = stopped(where)
    start,scaler = state(learner(Bare, n=32)),learner().to_fp16_dynamic().mixed_precision.scaler.state_dict()
    def anew(learn):
        learn.model.load_state_dict(start)
        learn.opt,learn.mixed_precision.promoted,learn.model.detour.on = None,[],False
        learn.mixed_precision.scaler.load_state_dict(scaler)
        fit(learn.remove_cb(Poison), 1)
        clean(learn)
        with half_forward(learn.model.eval()): return {**state(learn), 'out':learn.model(torch.ones(4,8)).detach()}
    expected,wide,choose = anew(new),process_wide(),random.Random(0)
    lines = list(stopped(where)[1].times.items())
    assert len(lines)>500
    for line,times in lines[choose.randrange(16)+16*some::128]:
        at = line,choose.randint(1, times)
        learn,stop = stopped(where, *at)
        assert stop.raised and process_wide()==wide, at
        clean(learn)
        assert equal(anew(learn), expected), at

def test_contexts_of_torch_that_an_interrupted_fit_has_not_left():
    "A Ctrl-C may come before a `with` statement can leave its context"
    open_ = [torch._C.DisableTorchFunction(),torch.no_grad(),torch.autocast('cpu', dtype=torch.float16)]
    class Stop(Callback):
        def after_pred(self):
            for o in open_: o.__enter__()
            raise KeyboardInterrupt
    wide = process_wide()
    with pytest.raises(KeyboardInterrupt): fit(learner(cbs=Stop()).to_fp16_dynamic())
    assert process_wide()==wide

# --- cancelled by others

cancels = [getattr(fastai.basics, f'Cancel{o}Exception') for o in ('Batch','Train','Valid','Epoch','Step','Backward','Fit')]

class CountEvents(Callback):
    order = 98
    def __init__(self): self.n = Counter()
for e in fastai.callback.core._events: setattr(CountEvents, e, lambda self, e=e: self.n.update([e]))

@pytest.mark.parametrize('some', few(range(4), 0))
@pytest.mark.parametrize('order', [-30, pytest.param(10.5, marks=poisoned('backward'))])
@pytest.mark.parametrize('ex', cancels)
def test_cancelled(ex, order, some):
    "By any exception at any event: what happens then is what happens in fp32"
    def run(to, event, poison=()):
        at = (1,) if event.endswith('fit') else (2,) if event.endswith(('epoch','train','validate')) else (2,5)
        count = CountEvents()
        learn = to(learner(plain_mlp, n=48, shuffle=False, cbs=[Raise(event, ex, at, order), count, Poison(poison, 'backward')]))
        try: fit(learn, 3 if at==(2,) else 2)
        except ex: count.n['raised'] += 1
        return learn,count.n
    i = cancels.index(ex)+2*(order<0)+some # of each exception a quarter of the events, and of each event some exceptions
    for event in events[i%4::4]:
        (a,na),(b,nb) = run(Learner.to_fp32, event),run(Learner.to_fp16_dynamic, event)
        clean(b)
        assert na==nb and b.mixed_precision.n_skipped==0, event
        for p,q in zip(weights(a), weights(b)): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
        if order<0: continue
        b,_ = run(Learner.to_fp16_dynamic, event, {0})
        clean(b)
        assert b.mixed_precision.n_skipped==b.mixed_precision.history.skipped.sum()==(event!='before_fit'), event

@pytest.mark.parametrize('event,order,ex', [
    pytest.param('before_step', 0, 'Step', marks=poisoned('forward')),
    pytest.param('before_backward', 99, 'Batch', marks=poisoned('forward')),
    ('after_backward',0,'Batch')])
def test_cancelled_batches_say_nothing_about_the_next_step(event, order, ex):
    "A callback cancels each second batch, whose loss is NaN; all others are learned from"
    class Guard(Callback):
        def guard(self):
            if self.train_iter%2: raise getattr(fastai.basics, f'Cancel{ex}Exception')()
    guard = Guard()
    guard.order = order
    setattr(guard, event, guard.guard)
    cbs = [guard, Poison(range(1,99,2), 'forward')] if event!='after_backward' else [guard]
    learn = fit(learner(plain_mlp, loss_func=lambda p,t: mse(p, t)*1e4, cbs=cbs).to_fp16_dynamic(), 4)
    mp = learn.mixed_precision
    assert mp.scaler.get_scale()<2**16 and len(mp.history)==8 and mp.n_skipped==0 and not mp.history.grad_norm.isna().any()

def test_cancelled_backward_passes_where_gradients_are_zeroed_in_place():
    "As fastai's optimizers do: there is a gradient in every step"
    def run(to):
        cancels = Raise('before_backward', CancelBackwardException, (2,3,6))
        return fit(to(learner(plain_mlp, shuffle=False, opt_func=SGD, cbs=cancels)), 2)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert b.mixed_precision.history.skipped.tolist()==[False]*8
    for p,q in zip(weights(a), weights(b)): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-4)

@poisoned('backward')
def test_cancelled_after_a_skipped_step():
    "Gradients that overflowed are not accumulated"
    learn = fit(learner(cbs=[Raise('after_cancel_step', CancelBatchException, (1,)), Poison({1}, 'backward')]).to_fp16_dynamic(), 2)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True]+[False]*6

@poisoned('backward')
def test_a_cancelled_batch_is_not_part_of_the_next_step():
    class Stats(Callback):
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.model[1].num_batches_tracked.item())
    def run(**kwargs):
        stats = Stats()
        fit(learner(**kwargs).add_cb(stats).to_fp16_dynamic(), 1)
        return stats.seen
    assert run(cbs=[Raise('after_loss', CancelBatchException, (1,)), Poison({1}, 'backward')])==[1,1,2,3]
    assert run(cbs=[GradientAccumulation(16), Poison({3}, 'backward')], bs=8, shuffle=False)==[1,2,3,2,3,4,5,6] # all batches of a step

@poisoned('forward')
def test_a_cancelled_backward_pass_does_not_count():
    "Not even if its loss was not finite"
    learn = fit(learner(cbs=[Raise('before_backward', CancelBackwardException, (1,), 99), Poison({0}, 'forward')]).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.n_skipped==0 and len(learn.mixed_precision.history)==3

# --- overflow

@anywhere
def test_smoothed_loss_goes_on_as_if_the_skipped_batch_had_not_been(where):
    "Unless its loss is finite: then it is recorded, as in fp32"
    def losses(steps):
        learn = fit(learner(lr=0., cbs=[Poison(steps, where)], shuffle=False).to_fp16_dynamic(), 1)
        return [o.item() for o in learn.recorder.losses]
    plain,poisoned = losses(()),losses({1})
    if where=='backward': assert poisoned==pytest.approx(plain, rel=1e-3) # the loss of the skipped one is fp32's
    else:
        own = [(plain[i]*(1-0.98**(i+1))-(plain[i-1]*0.98*(1-0.98**i) if i else 0))/0.02 for i in range(4)] # each batch's own loss
        assert len(poisoned)==3 and poisoned[0]==plain[0] and all(map(math.isfinite, poisoned))
        assert losses({0,1})[-2:]==pytest.approx([own[2], (own[3]*0.02+own[2]*0.02*0.98)/(1-0.98**2)], rel=1e-4)

@poisoned('forward')
def test_an_epoch_without_a_loss_is_no_success():
    learn = fit(learner(cbs=Poison(range(4), 'forward')).to_fp16_dynamic(patience=5), 2)
    recorder = learn.recorder
    first,second = [v[0] for v in recorder.values]
    assert math.isnan(first) and second<1
    assert all(o.isfinite() for o in recorder.losses) and len(recorder.losses)==len(recorder.lrs)==recorder.iters[-1]==4

@poisoned('forward')
def test_losses_of_accumulated_batches_are_true_and_finite():
    "The overflow is in a batch before the one that steps"
    def run(to, steps=()):
        learn = to(learner(bs=8, cbs=[GradientAccumulation(16), Poison(steps, 'forward')], shuffle=False, lr=0.))
        return fit(learn, 2)
    fp32,fp16 = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    assert list(map(float, fp16.recorder.losses))==pytest.approx(list(map(float, fp32.recorder.losses)), rel=1e-3)
    learn = run(Learner.to_fp16_dynamic, {0,4})
    assert len(learn.mixed_precision.history)==8 and learn.mixed_precision.n_skipped==2
    assert [v[0] for v in learn.recorder.values]==pytest.approx([v[0] for v in fp32.recorder.values], rel=0.2) # some batches are missing

class BatchesOf(Callback):
    order = 97
    def before_fit(self): self.n = 0
    def after_batch(self): self.n += self.training

class Breaks(Callback):
    "Makes the target or the loss of the second batch NaN"
    def __init__(self, what): self.what,self.now = what,False
    def before_batch(self):
        self.now = self.training and self.train_iter==1
        if self.now and self.what=='target': self.learn.yb = (self.y*math.nan,)
    def loss_func(self, p, t): return mse(p, t)*(math.nan if self.now and self.what=='loss function' else 1)

@pytest.mark.filterwarnings('ignore:The .* of the batch are not finite', 'ignore:`mul` in', 'ignore:The batch is not finite in fp32',
                            'ignore:The targets of the batch reach', 'ignore:A batch failed in fp16, but not when it ran again')
@pytest.mark.parametrize('to,acc', [('to_fp32',None), ('to_fp32',32), ('to_fp16_dynamic',None), ('to_fp16_dynamic',32),
                                    ('to_bf16_dynamic',None)])
@pytest.mark.parametrize('why', ['input','target','loss function','precision'])
def test_terminate_on_nan(why, to, acc):
    "As documented it ends a fit when the loss is NaN, as the loss is in fp32; what only half precision cannot hold runs again"
    batches,breaks = BatchesOf(),Breaks(why)
    model = nn.Sequential(nn.Linear(8,8), nn.Dropout(0.5), Detour(), nn.BatchNorm1d(8), nn.Linear(8,1))
    cbs = [TerminateOnNaNCallback(), batches, breaks, Poison({1}, {'input':'forward'}.get(why, why))]
    learn = learner(model, loss_func=breaks.loss_func, cbs=cbs)
    if acc: learn.add_cb(GradientAccumulation(acc))
    fit(getattr(learn, to)(), 2)
    assert batches.n==(8 if why=='precision' else 1)
    if to=='to_fp32': return
    assert all(b.isfinite().all() for b in state(learn).values())
    assert learn.mixed_precision.n_skipped==(why!='precision') and learn.mixed_precision.n_rerun>=(to=='to_fp16_dynamic')
    clean(learn)

@pytest.mark.filterwarnings('ignore:`mul` in')
def test_the_loss_function_sees_what_after_pred_has_made_of_the_prediction_in_each_run():
    "As in fastai's `RNNCallback`, a callback takes one of several predictions"
    class Two(nn.Sequential):
        def forward(self, x): return super().forward(x),x
    class TakeFirst(Callback):
        def after_pred(self): self.learn.pred = self.pred[0]
    cbs = [TakeFirst(), Poison({1}, 'precision'), TerminateOnNaNCallback()]
    learn = fit(learner(lambda: Two(nn.Linear(8,8), Detour(), nn.Linear(8,1)), cbs=cbs).to_fp16_dynamic(), 1)
    assert not learn.mixed_precision.history.skipped.any() and learn.mixed_precision.promoted==['1'] and learn.recorder.iters==[4]

@pytest.mark.filterwarnings('ignore:`mul` in')
def test_runs_that_do_not_count_leave_no_trace():
    "Dropout, weights, statistics and what callbacks see are those of a model that had its faulty module in fp32 from the start"
    class Look(Callback):
        order = 20
        def before_fit(self): self.seen = []
        def after_backward(self): self.seen.append((self.pred.detach().clone(), self.loss.item()))
    def run(keep_fp32=None, cbs=()):
        def model(): return nn.Sequential(nn.Linear(8,8), Detour(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8,1))
        learn = learner(model, cbs=[Poison(range(9), 'precision'), Look(), *cbs])
        buffers = list(map(id, learn.model.buffers()))
        fit(learn.to_fp16_dynamic(keep_fp32=keep_fp32), 2)
        assert buffers==list(map(id, learn.model.buffers())) and len(learn.look.seen)==8
        return learn
    kept,healed,guarded = run('1'),run(),run(cbs=[TerminateOnNaNCallback()])
    assert kept.mixed_precision.n_rerun==0 and healed.mixed_precision.n_rerun>0
    for o in (healed,guarded):
        assert o.mixed_precision.promoted==['1'] and o.mixed_precision.n_skipped==0 and equal(state(o), state(kept))
        assert all(torch.equal(p, q) and a==b for (p,a),(q,b) in zip(o.look.seen, kept.look.seen))
        assert list(map(float, o.recorder.losses))==list(map(float, kept.recorder.losses))

@pytest.mark.parametrize('where,to,dtype', [('forward','to_bf16_dynamic',torch.bfloat16),('backward','to_fp16_dynamic',torch.float16)])
def test_persistent_overflow_then_health(where, to, dtype):
    "Many bad batches cost little time and nothing else: training ends no worse than fp32 that has not seen them, at the scale of before"
    bad,passes = range(20,100),[]
    learn = getattr(learner(cbs=Poison(bad, where)), to)(on_spiral='warn')
    learn.model.register_forward_pre_hook(lambda m, x: passes.append(1) if m.training else None)
    with pytest.warns(UserWarning, match='not finite|too large for fp32'): fit(learn, 45)
    df = learn.mixed_precision.history
    assert df.skipped.tolist()==[i in bad for i in range(180)] and (df.loss_scale==(2**16 if dtype==torch.float16 else 1)).all()
    assert len(passes)<180+110 # all besides the batches' own
    assert all(v.isfinite().all() for v in state(learn).values())
    assert learn.recorder.values[-1][1]<1.5*fit(learner(), 25).recorder.values[-1][1] # the batches that are left are other ones

@poisoned('forward')
def test_a_hidden_state_that_overflowed_is_reset():
    "fastai's recurrent models keep theirs from batch to batch"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8,8)
            self.reset()
        def reset(self): self.h = torch.zeros(8)
        def forward(self, x):
            y = self.lin(x)+self.h
            self.h = y.detach().mean(0)
            return y.mean(1, keepdim=True)
    learn = fit(learner(Model, cbs=Poison({2}, 'forward')).to_fp16_dynamic(), 2)
    assert learn.mixed_precision.history.skipped.tolist()==[i==2 for i in range(8)] and learn.model.h.isfinite().all()

@anywhere
@both
def test_a_skipped_step_changes_nothing(to, dtype, where):
    "No weight, no statistic, no optimizer state, no loss scale: fp32 could not take it either"
    steps = {0,2,3}
    watch = Watch()
    learn = fit(getattr(learner(cbs=[Poison(steps, where), watch]), to)(), 2)
    mp = learn.mixed_precision
    assert [i for i,c in enumerate(watch.changed) if not c]==sorted(steps)
    assert all(len(c)>8 for i,c in enumerate(watch.changed) if i not in steps)
    assert watch.cancelled==sorted(steps)
    assert mp.n_skipped==3 and mp.history.skipped.tolist()==[i in steps for i in range(8)]
    assert mp.history.grad_norm[mp.history.skipped].map(math.isnan if where=='forward' else math.isinf).all()
    assert mp.history.grad_norm[~mp.history.skipped].gt(0).all()
    scale = 2**16 if dtype==torch.float16 else 1
    assert mp.scaler.get_scale()==scale and mp.history.loss_scale.tolist()==[scale]*8
    losses = [o.item() for o in learn.recorder.losses]
    assert all(map(math.isfinite, losses)) and learn.recorder.values[-1][0]>0
    clean(learn)

def test_meant_infinities_are_no_forward_overflow():
    "Logits masked by -inf: what overflows beside them is the backward pass, and a lower scale is all it takes"
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8,4)
        def forward(self, x): return self.lin(x).masked_fill(torch.tensor([False,True,False,False]), -math.inf),torch.tensor(math.inf)
    def loss(p, t): return nn.functional.cross_entropy(p[0], torch.zeros(len(p[0]), dtype=torch.long))*1e2
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn = fit(learner(Masked(), loss_func=loss).to_fp16_dynamic(), 3)
    mp = learn.mixed_precision
    assert mp.n_skipped==0 and mp.scaler.get_scale()<2**16 and mp.history.reruns[0]>0 and not mp.promoted

def test_gradients_that_need_a_scale_below_one():
    def loss_func(p, t): return 1e6*(p-t).sum()
    learn = fit(learner(plain_mlp, loss_func=loss_func, opt_func=partial(SGD, mom=0.), lr=1e-9, n=256).to_fp16_dynamic(), 2)
    mp = learn.mixed_precision
    assert mp.scaler.get_scale()<1 and not mp.history.skipped.any() and not mp.promoted

def detour(): return nn.Sequential(nn.Linear(8,16), Detour(), nn.ReLU(), nn.Linear(16,1))

@pytest.mark.parametrize('on_spiral', ['heal','warn','raise'])
def test_a_forward_pass_that_overflows_is_looked_into_at_once(on_spiral):
    learn = learner(detour, cbs=Poison(range(2,99), 'precision')).to_fp16_dynamic(on_spiral=on_spiral)
    mp = learn.mixed_precision
    if on_spiral=='raise':
        with pytest.raises(FloatingPointError, match='`mul` in `1` .Detour.'): fit(learn, 5)
    else:
        with pytest.warns(UserWarning, match='`mul` in `1` .Detour.'): fit(learn, 5)
    assert mp.promoted==(['1'] if on_spiral=='heal' else []) and mp.reports[0].producer=='1'
    assert mp.n_skipped==(18 if on_spiral=='warn' else 0) and len(mp.history)==(2 if on_spiral=='raise' else 20)
    assert mp.scaler.get_scale()==2**16 and all(p.isfinite().all() for p in learn.model.parameters())
    clean(learn)

@pytest.mark.parametrize('on_spiral', ['heal','warn','raise'])
@pytest.mark.parametrize('kw', [dict(init_scale=1., min_scale=1.), {}])
def test_gradients_that_fp32_cannot_hold_end_the_fit(on_spiral, kw):
    learn = learner(cbs=Poison(range(2,99), 'backward')).to_fp16_dynamic(on_spiral=on_spiral, patience=4, **kw)
    mp = learn.mixed_precision
    if on_spiral=='raise':
        with pytest.raises(FloatingPointError, match='too large for fp32 as well'): fit(learn, 5)
    else:
        with pytest.warns(UserWarning, match='too large for fp32 as well') as told: fit(learn, 5)
        ends = [str(w.message) for w in told if 'Training stopped' in str(w.message)]
        assert [o.startswith('Training stopped at step 6 of 20: neither fp16 nor fp32') for o in ends]==[True]*(on_spiral=='heal')
    assert mp.n_skipped=={'heal':4, 'warn':18, 'raise':0}[on_spiral] and len(mp.history)=={'heal':6, 'warn':20, 'raise':2}[on_spiral]
    assert mp.reports[-1].verdict=='divergence' and all(p.isfinite().all() for p in learn.model.parameters())
    clean(learn)

@pytest.mark.parametrize('on_spiral', ['heal','warn','raise'])
def test_a_static_scale_that_is_too_high_skips_and_says_so(on_spiral):
    "fp32 could take these steps, and nobody says that it could not"
    learn = learner(n=160).to_fp16_dynamic(on_spiral=on_spiral, dynamic=False, init_scale=2.**24, patience=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(learn, 1)
    said,mp = [str(w.message) for w in told],learn.mixed_precision
    ends,skips = [[o for o in said if o.startswith(words)] for words in ('Training stopped','A step was skipped')]
    assert len(skips)==1 and 'the static loss scale 1.67772e+07' in skips[0] and '`dynamic=False`' in skips[0]
    assert mp.n_skipped==len(mp.history)==(4 if on_spiral=='heal' else 10) and mp.scaler.get_scale()==2**24
    assert ['static' in o and 'nor fp32' not in o for o in ends]==[True]*(on_spiral=='heal')
    clean(learn)

def test_a_first_scale_that_is_too_high_is_no_fault():
    "It is found in the first step, at most eight runs, without a word; training is fp32's"
    def loss_func(p, t): return mse(p, t)*1e6
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn = fit(learner(loss_func=loss_func, shuffle=False).to_fp16_dynamic(on_spiral='raise'), 3)
    mp,fp32 = learn.mixed_precision,fit(learner(loss_func=loss_func, shuffle=False), 3)
    assert mp.n_skipped==0 and mp.history.reruns[0]==mp.n_rerun<8 and mp.scaler.get_scale()<2**8 and mp.reports==[]
    assert list(map(float, learn.recorder.losses))==pytest.approx(list(map(float, fp32.recorder.losses)), rel=0.02)

@pytest.mark.filterwarnings('ignore:The inputs of the batch')
def test_bad_batches_at_the_end_of_a_fit_do_not_end_the_next():
    learn = learner(n=48, cbs=Poison({1,2,3,4,7,8,9}, 'forward')).to_fp16_dynamic()
    fit(learn, 1), fit(learn, 1)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True,True,True,True,False]
    with pytest.warns(UserWarning, match='Training stopped at step 4 of 6'): fit(learn, 2) # one good, three bad

@anywhere
def test_overflow_in_one_of_several_accumulated_batches_drops_the_step(where):
    watch = Watch()
    learn = fit(learner(bs=8, cbs=[GradientAccumulation(16), Poison({2}, where), watch], shuffle=False).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True,False,False]
    stepped = [any('weight' in str(k) for k in c) for c in watch.changed]
    assert stepped==[False,True,False,False,False,True,False,True]
    assert learn.mixed_precision.scaler.get_scale()==2**16
    assert all(b.isfinite().all() for b in learn.model.buffers())

@pytest.mark.parametrize('early', [False, True])
def test_tail_of_accumulated_batches_enters_the_next_fit_as_in_fp32(early):
    class Early(Callback):
        "As EarlyStoppingCallback does"
        def after_epoch(self): raise CancelFitException()
    class First(Callback):
        order = 20
        def before_step(self):
            self.learn.first_grads = [p.grad.clone() for p in self.model.parameters()]
            raise CancelFitException()
    def run(to):
        learn = to(learner(plain_mlp, bs=8, cbs=GradientAccumulation(24), shuffle=False, lr=0., opt_func=SGD))
        fit(learn, 1+early, cbs=Early() if early else None) # 8 batches, 3 a step: two are left
        return fit(learn, 1, cbs=First()).first_grads
    for to in (Learner.to_fp16_dynamic, partial(Learner.to_fp16_dynamic, init_scale=2.**24)):
        for g,h in zip(run(Learner.to_fp32), run(to)): torch.testing.assert_close(g, h, rtol=2e-2, atol=1e-4)

def test_batch_that_the_model_cannot_be_called_with():
    class Bad(Callback):
        def before_batch(self): self.learn.xb = 5
    learn = learner(cbs=Bad()).to_fp16_dynamic()
    with pytest.raises(TypeError): fit(learn)
    clean(learn)

@pytest.mark.parametrize('event,e', [(None,None), *((n,e) for n in ('after_backward','before_step','after_batch','after_epoch')
                                                    for e in (CancelFitException,KeyboardInterrupt))])
@pytest.mark.parametrize('acc', [None, 99])
def test_scaled_gradients_are_never_left(event, e, acc):
    "Whatever ends a fit leaves the gradients that fp32 leaves; what an interrupted batch has made is dropped"
    def run(to):
        cbs = ([Raise(event, e, (3,) if event!='after_epoch' else (1,), 99)] if e else [])+[GradientAccumulation(acc)]*(acc is not None)
        learn = to(learner(plain_mlp, opt_func=SGD, lr=0.01, cbs=cbs))
        try: fit(learn, 3)
        except KeyboardInterrupt: pass
        interrupted = e is KeyboardInterrupt and (event=='after_backward' or event=='before_step' and acc is None)
        return interrupted,[p.grad for p in learn.model.parameters()]
    (_,wanted),(interrupted,grads) = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    if interrupted: assert not any(g is not None and g.any() for g in grads)
    else:
        for g,h in zip(wanted, grads): torch.testing.assert_close(g, h, rtol=2e-2, atol=1e-3)

def test_gradients_that_others_left_enter_the_first_step_once():
    "As in fp32, however often it runs; they are true, not scaled"
    def run(to):
        learn = to(learner(plain_mlp, opt_func=SGD, lr=0.01))
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
        return fit(learn, 1)
    a,b = run(Learner.to_fp32),run(partial(Learner.to_fp16_dynamic, init_scale=2.**24))
    assert b.mixed_precision.n_rerun
    for p,q in zip(weights(a), weights(b)): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-4)

@poisoned('backward')
def test_norm_statistics_noted_in_an_interrupted_fit_are_forgotten():
    class Stop(Callback):
        def after_backward(self): raise KeyboardInterrupt
    class Mean(Callback):
        def after_batch(self):
            if self.training: self.seen.append(self.model[1].running_mean.mean().item())
    stop,mean = Stop(),Mean()
    mean.seen = []
    learn = learner(cbs=stop).to_fp16_dynamic()
    with pytest.raises(KeyboardInterrupt): fit(learn)
    learn.model[1].running_mean.fill_(5.)
    fit(learn.remove_cb(stop), 1, cbs=[Poison({0}, 'backward'), mean])
    assert mean.seen[0]==5 and mean.seen[1]!=5

# --- a module that casts its own weights

class CastsOwn(nn.Module):
    "As old frozen norms and heads of metric learning do"
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 16))
    def forward(self, x):
        self.weight.data = self.weight.data.to(x.dtype)
        return nn.functional.linear(x, self.weight)

class CastsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16,1)
    def forward(self, x): return self.lin.to(x.dtype)(x)

def casting(cls): return nn.Sequential(nn.Linear(8,16), nn.ReLU(), cls())

@both
@pytest.mark.parametrize('cls,kept', [(CastsOwn,'2'), (CastsInside,'2.')])
def test_masters_stay_in_fp32_where_a_module_casts_its_own_weights(cls, kept, to, dtype):
    "Adam's averages as well, and the first batch names the module"
    learn = getattr(learner(partial(casting, cls)), to)()
    with pytest.warns(UserWarning, match=r'`2` \(Casts.*casts weights to half precision'): fit(learn, 1)
    masters(learn)
    assert learn.mixed_precision.promoted==[kept] and not learn.mixed_precision.n_skipped
    assert all(t.dtype==torch.float32 for o in learn.opt.state.values() for t in o.values() if isinstance(t, torch.Tensor))
    works(learn)

@pytest.mark.parametrize('how', ['validate','rerun=False','half_forward'])
def test_no_digit_is_lost_where_a_module_casts_its_own_weights(how):
    learn = learner(partial(casting, CastsOwn)).to_fp16_dynamic(rerun=how!='rerun=False')
    before = weights(learn)
    if how=='validate':
        with pytest.warns(UserWarning, match='casts weights'), learn.no_bar(): learn.validate()
    else:
        with pytest.raises(TypeError, match='casts weights'):
            if how=='rerun=False': fit(learn, 1)
            else:
                with half_forward(learn.model): learn.model(torch.randn(4, 8))
    assert equal(weights(learn), before)

# --- a callback that makes gradients infinite or NaN

written_by = Counter()

class Writes(Callback):
    "Writes to the gradients of one batch, and counts the runs of each"
    def __init__(self, value, event): setattr(self, event, partial(self.write, value))
    def write(self, value):
        if not self.training: return
        written_by[self.iter] += 1
        if self.iter==2: next(self.learn.model.parameters()).grad.fill_(value)

@both
@pytest.mark.parametrize('value', [math.nan, math.inf])
@pytest.mark.parametrize('event', ['after_backward','before_step'])
@pytest.mark.parametrize('kw', [{}, {'rerun':False}, {'on_spiral':'warn'}], ids=str)
def test_a_callback_that_makes_gradients_infinite_is_told_so(to, dtype, value, event, kw):
    "The step is skipped, the batch runs few times, and no other reason is given"
    written_by.clear()
    learn = getattr(learner(cbs=Writes(value, event)), to)(**kw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(learn, 1)
    mp = learn.mixed_precision
    assert [str(o.message) for o in told if issubclass(o.category, PrecisionWarning)]==[written_gradients]
    assert mp.history.skipped.tolist()==[False,False,True,False] and mp.history.loss_scale.nunique()==1
    assert written_by[2]<=3 and all(written_by[i]==1 for i in (0,1,3)) and all(p.isfinite().all() for p in learn.model.parameters())

@both
def test_a_fit_that_such_a_callback_ends_does_not_blame_fp32(to, dtype):
    class Always(Callback):
        def after_backward(self): next(self.learn.model.parameters()).grad.fill_(math.nan)
    learn = getattr(learner(cbs=Always()), to)()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 1)
    stopped = learn.mixed_precision.stopped
    assert 'code after the backward pass made the gradients of the last 3 batches infinite or NaN' in stopped and 'fp32' not in stopped

def test_an_overflow_after_the_backward_pass_is_no_fault_of_a_callback():
    "Half precision is at fault where a callback runs the model and a backward pass of its own, without a loss scale"
    class Again(Callback):
        def after_backward(self): torch.autograd.backward([1e8*self.model(*self.xb).mean()])
    learn = learner(plain_mlp, cbs=Again(), lr=1e-4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(learn.to_fp16_dynamic(), 1)
    assert learn.mixed_precision.n_rerun and not learn.mixed_precision.n_skipped
    assert written_gradients not in [str(o.message) for o in told]
