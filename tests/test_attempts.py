"Trainings in which half precision overflows take fp32's steps and end where fp32 ends, and nobody notices that batches ran again"
import gc,itertools,logging,math,threading,warnings,weakref
import numpy as np
import pytest,torch
import torch.nn.functional as F
from fastai.basics import (AvgMetric,Callback,CancelBackwardException,CancelBatchException,CancelEpochException,CancelFitException,
                           CancelStepException,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,SGD,nn,partial,set_seed)
from fastai.callback.all import GradientAccumulation,GradientClip,TerminateOnNaNCallback
from fastai.callback.rnn import ModelResetter,rnn_cbs
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder,SequentialRNN
from fastai_amp16.all import AdamW16,GradNorm,GradientNormClip,LossScale,SkippedSteps
from common import Detour,Items,Poison,clean,equal,few,fit,learner,mlp,slow,state,weights
from overflows import *

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

# --- as many steps as fp32, and where fp32 ends

pairs = [*zip(faults, [*setups]*2),('outliers','both'),('scale','both')] # each fault, and each setup with a scale and a fault

@pytest.mark.parametrize('fault,setup', [pytest.param(*o, marks=() if o in pairs else slow) for o in itertools.product(faults, setups)])
def test_ends_where_fp32_ends(fault, setup):
    act,to,steps = faults[fault]
    cbs,n = setups[setup]
    def run(to): return fit(classifier(lambda: net(act), to, [*cbs(), Outlier(*steps)], n=n), 1)
    set_seed(2)
    a = run(fp32)
    set_seed(2)
    b = run(to)
    same_training(a, b)
    assert b.mixed_precision.n_rerun>0 and bool(b.mixed_precision.promoted)==(act is not Plain)

def test_bf16_ends_where_fp32_ends():
    "What only fp32 holds is none of bf16's faults; an operation that raises is"
    class Raises(nn.Module):
        def forward(self, x):
            if x.dtype==torch.bfloat16: raise TypeError('Got unsupported ScalarType BFloat16')
            return x.relu()
    a,b = [fit(classifier(lambda: net(Raises), to, [Outlier(4)]), 1) for to in (fp32, bf16)]
    mp = b.mixed_precision
    assert (mp.n_skipped==0 and len(mp.history)==15 and mp.history.reruns.tolist()==[1]+14*[0]
            and (mp.history.loss_scale==1).all() and mp.promoted==['2'])
    assert a.steps.rates==b.steps.rates and a.model[4].drawn==b.model[4].drawn
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=0.1, atol=1e-2)

def test_one_cycle_and_fine_tune_have_fp32s_schedule():
    def run(to):
        learn = classifier(lambda: net(Big), to, [Outlier(2)])
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(1, 0.05)
            learn.fine_tune(1, 0.02)
        return learn
    a,b = run(fp32),run(hot)
    assert a.steps.rates==b.steps.rates and b.mixed_precision.n_skipped==0 and len(b.mixed_precision.history)==45
    assert b.recorder.values[-1][-1]==pytest.approx(a.recorder.values[-1][-1], rel=3e-2) # three epochs with outliers

def test_recurrent_networks_have_fp32s_hidden_states():
    "AWD-LSTM carries its state from batch to batch; fastai's callbacks reset and regularize"
    def run(to):
        set_seed(0, reproducible=True)
        x = torch.randint(0, 20, (16*8,12))
        dls = DataLoaders(*[DataLoader(Items(zip(x, x.roll(-1, 1))), bs=16, drop_last=True) for _ in range(2)])
        model = SequentialRNN(AWD_LSTM(20, 12, 16, 2), LinearDecoder(20, 12, 0.1))
        loss = CrossEntropyLossFlat(axis=-1)
        return fit(to(Learner(dls, model, loss, momentum, lr=0.1,
                              cbs=[ModelResetter(), *rnn_cbs(1., 1.), GradientNormClip(1.), Outlier(3,6)])), 2)
    a,b = run(fp32),run(hot)
    assert b.mixed_precision.n_skipped==0 and (b.mixed_precision.history.reruns>0).sum()>=2
    torch.testing.assert_close(torch.stack(b.recorder.losses), torch.stack(a.recorder.losses), rtol=1e-2, atol=1e-3)
    assert b.recorder.values[-1][-1]==pytest.approx(a.recorder.values[-1][-1], rel=1e-2)

# --- the loss scale

def test_2_to_the_24_where_2_to_the_13_fits():
    "At most eight runs until it is found, none afterwards"
    def loss(p, t): return 0.5*F.mse_loss(p, t+3)
    learn = learner(n=40*16, loss_func=loss, lr=0.).to_fp16_dynamic(init_scale=2.**24)
    learn.dls.loaders[0].dataset[:] = learn.dls.train_ds[:16]*40 # always the same gradients
    passes = Passes(learn.model)
    fit(learn, 1)
    h = learn.mixed_precision.history
    assert (h.loss_scale==2.**13).all() and h.reruns[0]<=7 and h.reruns[1:].sum()==0 and not h.skipped.any()
    assert passes.n==40+h.reruns[0]

def test_a_scale_that_is_too_high_for_all_but_the_lowest_powers():
    learn = fit(classifier(lambda: net(Plain), hot, k=2.**24, lr=1e-4), 1)
    h = learn.mixed_precision.history
    assert not h.skipped.any() and h.loss_scale[0]<2. and not learn.mixed_precision.promoted

@pytest.mark.parametrize('by', few([2.**3, 2.**12, 1e6], 2.**12))
def test_after_an_outlier_the_scale_is_back_within_some_hundred_steps(by):
    learn = fit(classifier(lambda: net(Plain), fp16, [Outlier(20, by=by)], n=300, k=8., lr=1e-4), 1)
    h,before = learn.mixed_precision.history,2.**13
    h = h.loss_scale.tolist()
    assert before/2<=h[19]<=before*2 and h[20]<h[19] and not learn.mixed_precision.history.skipped.any()
    back = next(i for i,s in enumerate(h) if i>20 and s==h[19])
    assert back<=20+200 and all(b<=2*a for a,b in zip(h[20:], h[21:])) # step by step

@pytest.mark.parametrize('cause', ['forward','backward','precision'])
def test_the_scale_stays_where_no_scale_helps(cause):
    "A forward overflow, infinite data, gradients that fp32 cannot hold"
    model = nn.Sequential(nn.Linear(8,16), Detour(), nn.ReLU(), nn.Linear(16,1))
    learn = fit(learner(model, n=20*16, cbs=Poison({0,3,7,8,15}, cause)).to_fp16_dynamic(), 1)
    assert (learn.mixed_precision.history.loss_scale==2.**16).all() and learn.mixed_precision.scaler.get_scale()==2.**16
    assert learn.mixed_precision.n_skipped==(0 if cause=='precision' else 5)

def test_the_scale_stays_at_a_divergence():
    learn = learner(n=20*16, opt_func=SGD, lr=1e30).to_fp16_dynamic()
    fit(learn, 1)
    h = learn.mixed_precision.history
    assert h.skipped.sum()>=3 and learn.mixed_precision.scaler.get_scale()==h.loss_scale[~h.skipped].iloc[-1]

# --- nobody notices

@pytest.mark.parametrize('setup', ['plain','both'])
@pytest.mark.parametrize('fault', ['outliers','all'])
def test_what_callbacks_remember_has_each_batch_once(setup, fault):
    "Before us and after us, in each event of a batch"
    act,to,steps = faults[fault]
    cbs,n = setups[setup]
    def run(to):
        set_seed(2)
        return fit(classifier(lambda: net(act), to, [*cbs(), Outlier(*steps), Early(-5), Late(60)], n=n), 1)
    a,b = run(fp32),run(to)
    assert b.mixed_precision.n_rerun>2
    for k,v in a.early.memory.items(): assert b.early.memory[k]==v, k
    for k,v in a.late.memory.items(): assert b.late.memory[k]==v, k

@pytest.mark.parametrize('order', [-20,9,11])
def test_callbacks_see_loss_prediction_and_gradient_of_the_run_that_counts(order):
    "The last that each event sees of a batch is what the step was made of, and finite"
    class See(Callback):
        def before_fit(self): self.preds,self.losses,self.grads = {},{},{}
        def after_pred(self):
            if self.training: self.preds[self.iter] = self.pred.detach().clone()
        def after_loss(self):
            if self.training: self.losses[self.iter] = self.learn.loss.item()
        def before_step(self): self.grads[self.iter] = [p.grad.clone() for p in self.model.parameters()]
        def after_batch(self):
            if self.training:
                assert torch.equal(self.pred.detach(), self.preds[self.iter]) and self.losses[self.iter]==self.learn.loss.item()
    See.order = order
    a,b = [fit(classifier(lambda: net(Big), to, [See(), Outlier(4)]), 1) for to in (fp32, hot)]
    assert list(b.see.losses.values())==b.steps.losses==pytest.approx(a.steps.losses, rel=3e-2)
    assert all(o.isfinite().all() for o in b.see.preds.values()) and len(b.see.preds)==len(b.see.grads)==15
    if order<10: return
    for i in range(15):
        g,h = [torch.cat([o.flatten() for o in learn.see.grads[i]]) for learn in (a,b)]
        assert F.cosine_similarity(g, h, 0)>0.97 and h.norm().item()==pytest.approx(g.norm().item(), rel=0.05)

def test_the_recorder_sees_each_batch_once():
    a,b = [fit(classifier(lambda: net(Big), to, [Outlier(4), GradientAccumulation(32)]), 2) for to in (fp32, hot)]
    ra,rb = a.recorder,b.recorder
    assert rb.smooth_loss.count==ra.smooth_loss.count==30 and len(rb.losses)==30 and rb.iters==ra.iters and rb.lrs==ra.lrs
    assert rb.values[-1][0]==pytest.approx(ra.values[-1][0], rel=2e-2) and all(o.isfinite() for o in rb.losses)

class Meter:
    "As in PyTorch's examples"
    def __init__(self): self.sum,self.n,self.seen,self.at = 0.,0,[],torch.zeros(1)
    def update(self, v):
        self.sum,self.n = self.sum+v,self.n+1
        self.seen.append(v)
        self.at += v

class Meters(Callback):
    def before_fit(self): self.meter,self.by_name,self.metric = Meter(),dict(loss=Meter()),AvgMetric(accuracy)
    def before_train(self): self.metric.reset()
    def after_loss(self):
        if not self.training: return
        for o in (self.meter,self.by_name['loss']): o.update(self.loss.item())
        self.metric.accumulate(self.learn)

@pytest.mark.parametrize('fault', ['scale','masked_fill','all'])
def test_meters_and_metrics_count_each_batch_once(fault):
    act,to,steps = faults[fault]
    a,b = [fit(classifier(lambda: net(act), o, [Outlier(*steps), Meters()]), 1).meters for o in (fp32,to)]
    for m,o in ((a.meter,b.meter), (a.by_name['loss'],b.by_name['loss'])):
        assert o.n==m.n==15 and o.seen==pytest.approx(m.seen, rel=3e-2) and o.sum==pytest.approx(m.sum, rel=1e-2)
        assert o.at.item()==pytest.approx(m.at.item(), rel=1e-2)
    assert b.metric.count==a.metric.count==15*16 and float(b.metric.value)==pytest.approx(float(a.metric.value), abs=0.05)

def test_callbacks_after_the_recorder_see_a_skipped_batch_whole():
    "It is no part of the averages, and everything else of it is there, to the last callback; the recorder goes on with the next batch"
    class Last(Callback):
        order = 90
        def before_fit(self): self.seen = []
        def after_batch(self): self.seen.append((self.training, len(self.y), self.loss.isfinite().item(), self.recorder.run))
    learn = fit(classifier(lambda: net(Big), fp16, [Last(), Poison({6}, 'forward')]), 2)
    train = [o for o in learn.last.seen if o[0]]
    assert all(n>0 for _,n,*_ in train) and len(train)==30
    assert sum(not run for *_,run in learn.last.seen)==sum(not finite for _,_,finite,_ in train)>0
    assert learn.recorder.run and len(learn.recorder.losses)==sum(finite for _,_,finite,_ in train)

def test_activation_statistics_are_of_the_run_that_counts():
    from fastai.callback.hook import ActivationStats
    a,b = [fit(classifier(lambda: net(Big), to, [ActivationStats(with_hist=False), Outlier(4)]), 1) for to in (fp32, hot)]
    assert len(b.activation_stats.stats)==len(a.activation_stats.stats)==15
    for p,q in zip(a.activation_stats.stats, b.activation_stats.stats):
        for m,o in zip(p, q):
            if m is not None: assert o['mean']==pytest.approx(m['mean'], abs=5e-2*m['std']) and o['std']==pytest.approx(m['std'], rel=5e-2)

def test_terminate_on_nan_ends_only_where_fp32_ends():
    def run(to, bad): return fit(classifier(lambda: net(Big), to, [TerminateOnNaNCallback(), Poison(bad, 'forward'), Outlier(4)]), 1)
    for bad in ((), {6}):
        a,b = run(fp32, bad),run(hot, bad)
        assert len(a.recorder.losses)==len(b.recorder.losses)
        assert len(b.recorder.losses)==15 or bad

def test_lr_find_sees_each_batch_once(tmp_path):
    "As many batches, at the same rates, the same losses; the scale and the promotions that it found stay, the weights do not"
    def run(to):
        learn = classifier(lambda: net(Big), to, n=30, opt_func=AdamW16)
        learn.path,before = tmp_path,weights(learn)
        with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=40, stop_div=False, show_plot=False)
        assert equal(weights(learn), before)
        return learn
    a,b = run(fp32),run(hot)
    assert a.recorder.lrs==b.recorder.lrs and len(a.recorder.losses)==len(b.recorder.losses)
    k = 25 # from there on it diverges
    torch.testing.assert_close(torch.stack(b.recorder.losses[:k]), torch.stack(a.recorder.losses[:k]), rtol=3e-2, atol=1e-3)
    assert b.mixed_precision.promoted==['2'] and b.mixed_precision.scaler.get_scale()<2.**24
    n = b.mixed_precision.n_rerun
    fit(b, 1)
    assert b.mixed_precision.n_rerun==n

@pytest.mark.parametrize('clip', [GradientNormClip,GradientClip])
def test_clipping_sees_the_true_gradient_of_the_run_that_counts(clip):
    class Norms(Callback):
        order = 12
        def before_fit(self): self.seen = []
        def before_step(self): self.seen.append(torch.stack([p.grad.norm() for p in self.model.parameters()]).norm().item())
    def run(to): return fit(to(learner(mlp, n=15*16, shuffle=False, opt_func=momentum, cbs=[clip(0.05), Norms(), Outlier(4)])), 1)
    a,b = run(fp32),run(hot)
    assert len(b.norms.seen)==15 and b.norms.seen==pytest.approx(a.norms.seen, rel=2e-2) and max(b.norms.seen)<0.0501

# --- what is skipped, and what is not

class Around(Callback):
    "Did a batch leave a trace in weights, statistics, or the optimizer?"
    order = 95
    def before_fit(self): self.traces = []
    def all(self):
        return [*state(self.learn).values(), *[torch.as_tensor(v).clone() for o in self.opt.state_dict()['state'] for v in o.values()]]
    def before_batch(self):
        if self.training: self.before = self.all()
    def after_batch(self):
        now = self.training and self.all()
        if now: self.traces.append(len(now)!=len(self.before) or not equal(now, self.before))

@pytest.mark.parametrize('kw,cause,skipped', [
    (dict(dynamic=False), 'outlier', True), (dict(rerun=False), 'outlier', True),
    (dict(on_spiral='warn'), 'outlier', False), (dict(), 'outlier', False),
    (dict(dynamic=False), 'precision', False), (dict(rerun=False), 'precision', True),
    (dict(on_spiral='warn'), 'precision', True), (dict(), 'precision', False),
    (dict(dynamic=False), 'forward', True), (dict(rerun=False), 'forward', True),
    (dict(on_spiral='warn'), 'backward', True), (dict(), 'backward', True)])
def test_steps_are_skipped_only_where_the_settings_say_so(kw, cause, skipped):
    model = nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), Detour(), nn.ReLU(), nn.Linear(16,1))
    cb = Outlier(1,4) if cause=='outlier' else Poison({1,4}, cause)
    learn = fit(learner(model, n=8*16, opt_func=AdamW16, cbs=[GradientNormClip(1.), cb, Around()]).to_fp16_dynamic(**kw), 1)
    mp = learn.mixed_precision
    assert mp.history.skipped.tolist()==[skipped and i in (1,4) for i in range(8)] and mp.n_skipped==2*skipped
    assert learn.around.traces==[not (skipped and i in (1,4)) for i in range(8)]
    if 'rerun' in kw: assert mp.n_rerun==0

@pytest.mark.parametrize('opt_func', [SGD, partial(OptimWrapper, opt=torch.optim.SGD)])
def test_weights_that_are_written_within_a_batch_are_written_once(opt_func):
    "A step that is no event of fastai's; the batch cannot run again, which is said"
    class Inside(Learner):
        def _do_one_batch(self):
            if self.training:
                self.model(*self.xb).square().mean().mul(0.01).backward()
                self.steps_inside += 1
                self.opt.step()
                self.opt.zero_grad()
            super()._do_one_batch()
    learn = learner(n=8*16, opt_func=opt_func, cbs=[GradientNormClip(1.), Outlier(4)])
    learn.__class__,learn.steps_inside = Inside,0
    with pytest.warns(UserWarning, match='could not run again'): fit(learn.to_fp16_dynamic(), 1)
    assert learn.mixed_precision.history.skipped.tolist()==[i==4 for i in range(8)] and learn.steps_inside==8

def test_writes_that_reach_some_weights_only_are_seen():
    "fastai's optimizers write to `p.data`, which no counter of torch's tells; here to those of one part, which has not the smallest of all"
    class Inside(Learner):
        def _do_one_batch(self):
            if self.training:
                for p in self.model[0].parameters(): p.data.mul_(0.9)
            super()._do_one_batch()
    def run(to):
        learn = learner(n=8*16, opt_func=SGD, lr=0., cbs=[Outlier(4)])
        learn.__class__ = Inside
        return fit(to(learn), 1)
    a = run(fp32)
    with pytest.warns(UserWarning, match='could not run again'): b = run(fp16)
    assert torch.allclose(a.model[0].weight, b.model[0].weight) # and not 0.9 times as many as there were runs

@pytest.mark.parametrize('cause,at', [('forward',{0,3,6,9,12,15}), ('backward',{2,7,11,15,20,27}), ('forward',{0,1,14,15,28,29})])
def test_six_bad_batches_of_thirty_cost_at_most_eighteen_forward_passes(cause, at):
    learn = learner(n=30*16, cbs=Poison(at, cause)).to_fp16_dynamic()
    passes = Passes(learn.model)
    fit(learn, 1)
    assert learn.mixed_precision.n_skipped==6 and passes.n-30<=18
    assert [i for i,s in enumerate(learn.mixed_precision.history.skipped) if s]==sorted(at)

def test_six_faults_of_thirty_that_are_left_unmended_cost_at_most_eighteen_forward_passes():
    model = nn.Sequential(nn.Linear(8,16), Detour(), nn.ReLU(), nn.Linear(16,1))
    learn = learner(model, n=30*16, cbs=Poison({2,7,11,15,20,27}, 'precision')).to_fp16_dynamic(on_spiral='warn')
    passes = Passes(learn.model)
    fit(learn, 1)
    assert learn.mixed_precision.n_skipped==6 and passes.n-30<=18

def test_three_bad_batches_are_diagnosed():
    "Every other one of two hundred is bad: next to one run each, and a handful of reports"
    learn = learner(n=200*16, cbs=Poison(set(range(0, 200, 2)), 'forward')).to_fp16_dynamic()
    passes = Passes(learn.model)
    fit(learn, 1)
    assert learn.mixed_precision.n_skipped==100 and passes.n<=200+115 and 1<=len(learn.mixed_precision.reports)<=4

# --- the end of a fit

def ends(learn, match, n=1):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        fit(learn, n)
    res = [str(w.message) for w in said if 'stopped' in str(w.message)]
    assert len(res)==1 and all(o in res[0] for o in match), res
    return learn.mixed_precision

@pytest.mark.parametrize('patience', [1,3,4])
def test_patience_ends_the_fit_and_says_so(patience):
    "At which step of how many, why, and what the weights are; these are those of the last step that was taken"
    kept = []
    class Keep(Callback):
        def before_batch(self):
            if self.training and self.train_iter==6: kept[:] = weights(self.learn)
    learn = learner(n=20*16, cbs=[Poison({2,*range(6, 20)}, 'backward'), Keep()]).to_fp16_dynamic(patience=patience)
    at = 3 if patience==1 else 6+patience
    mp = ends(learn, [f'step {at} of 20', 'fp16 nor fp32',
                      f'the last {patience} batches.' if patience>1 else 'the last batch.', 'weights are'])
    assert len(mp.history)==at
    if patience>1: assert equal(weights(learn), kept)

def test_bad_batches_with_good_ones_between_do_not_end_the_fit():
    learn = fit(learner(n=30*16, cbs=Poison(set(range(30))-set(range(2, 30, 3)), 'backward')).to_fp16_dynamic(), 1)
    assert len(learn.mixed_precision.history)==30 and learn.mixed_precision.n_skipped==20

def test_skipped_steps_that_lower_the_loss_scale_do_not_end_the_fit():
    "Those at a scale that stays do, as batches that are infinite in any precision"
    mp = fit(learner(n=20*16).to_fp16_dynamic(init_scale=2.**24, rerun=False, patience=1), 1).mixed_precision
    assert len(mp.history)==20 and mp.n_skipped>3
    learn = learner(n=20*16, cbs=Poison(set(range(12, 20)), 'forward')).to_fp16_dynamic(init_scale=2.**24, rerun=False, patience=2)
    assert len(fit(learn, 1).mixed_precision.history)==14

def test_the_steps_of_accumulated_batches_are_counted_as_such():
    learn = learner(n=20*16, cbs=[GradientAccumulation(32), Poison(set(range(8, 20)), 'backward')]).to_fp16_dynamic()
    ends(learn, ['step 7 (batch 14 of 20)'])

def test_a_divergence_ends_the_fit_and_says_that_it_ended():
    mp = ends(learner(n=40*16, opt_func=SGD, lr=1e25).to_fp16_dynamic(), ['step', 'of 40', 'diverges', 'weights are'])
    assert 3<=len(mp.history)<40 and mp.history.skipped[-3:].all()

def test_in_the_second_epoch_the_steps_of_the_fit_are_counted():
    class Bad(Callback):
        order = 5
        def before_backward(self):
            if self.epoch==1 and self.iter>=4: self.learn.loss_grad = self.learn.loss_grad*1e30
    learn = learner(n=10*16, cbs=Bad()).to_fp16_dynamic()
    fit(learn, 0)
    ends(learn, ['step 17 of 20'], 2)

# --- validation and prediction

@pytest.mark.parametrize('to', [fp16,bf16], ids=['fp16','bf16'])
def test_validation_and_predictions_run_again(to):
    "A part overflows outside training only, or raises there; predictions are fp32's"
    kind = torch.float16 if to is fp16 else torch.bfloat16
    class Only(nn.Module):
        def forward(self, x):
            if not self.training and x.dtype==kind: raise RuntimeError('not implemented for this dtype')
            return x
    class Large(nn.Module):
        def forward(self, x): return x if self.training else x*1e39*1e-39 if kind==torch.bfloat16 else x*1e6/1e6
    for act in (Only,) if to is bf16 else (Only,Large):
        a,b = [fit(classifier(partial(net, act), t, n=3), 1) for t in (fp32, to)]
        with b.no_bar(), b.no_logging():
            preds,targs = b.get_preds()
            loss, = b.validate()
        assert preds.isfinite().all() and preds.shape==(256,4) and b.mixed_precision.n_skipped==0
        torch.testing.assert_close(preds, preds_of(a), rtol=5e-2, atol=5e-2)
        assert math.isfinite(loss) and b.recorder.values[-1][-1]==pytest.approx(a.recorder.values[-1][-1], rel=2e-2)
        clean(b)

def preds_of(learn):
    with learn.no_bar(), learn.no_logging(): return learn.get_preds()[0]

def test_metrics_see_each_validation_batch_once():
    class Only(nn.Module):
        def forward(self, x): return x if self.training else x*1e6/1e6
    seen = []
    def metric(p, t):
        seen.append(len(p))
        return p.isfinite().float().mean()
    learn = classifier(lambda: net(Only), fp16, n=3, n_valid=64)
    learn.dls.loaders[1].bs = 16
    learn.metrics = [metric]
    learn = fit(learn, 1)
    assert seen==[16]*4 and learn.recorder.values[-1][-1]==1.

# --- history, plot and metrics

def test_history_plot_and_metrics_tell_of_reruns_and_skips():
    learn = learner(n=15*16, metrics=[LossScale(), SkippedSteps(), GradNorm()], opt_func=momentum,
                    cbs=[GradientNormClip(1.), Outlier(4), Poison({8}, 'forward')]).to_fp16_dynamic()
    fit(learn, 1)
    mp,h = learn.mixed_precision,learn.mixed_precision.history
    assert list(h.columns)=='step fit kind epoch lr loss_scale reruns skipped grad_norm'.split() and len(h)==15
    assert mp.n_rerun==h.reruns.sum() and mp.n_skipped==h.skipped.sum()==1 and h.skipped[8] and math.isnan(h.grad_norm[8]) and h.reruns[4]>0
    scale,skips,norm = learn.recorder.values[-1][-3:]
    assert scale==mp.scaler.get_scale() and skips==1 and norm==pytest.approx(h.grad_norm[~h.skipped].mean())
    mp.plot()
    import matplotlib.pyplot as plt
    labels = [t.get_text() for ax in plt.gcf().axes if ax.get_legend() for t in ax.get_legend().get_texts()]
    plt.close('all')
    assert any('again' in o for o in labels) and any('skipped' in o for o in labels)

def test_skipped_is_a_bool_of_the_present_step():
    seen = []
    class See(Callback):
        def after_batch(self):
            if self.training: seen.append(self.mixed_precision.skipped)
    fit(learner(n=8*16, cbs=[Poison({3}, 'forward'), Outlier(5), See()]).to_fp16_dynamic(), 1)
    assert seen==[i==3 for i in range(8)] and all(type(o) is bool for o in seen)

# --- while nothing overflows

@pytest.mark.parametrize('acc', [1,2])
def test_while_nothing_overflows_no_batch_runs_again(acc):
    "Over 160 steps: three forward passes besides the batches' own, and nothing that they do is noticed"
    n = 160 if acc==1 else 80
    def run(to):
        learn = classifier(lambda: net(Plain), to, [GradientAccumulation(16*acc), Early(-5)], n=n, lr=1e-3)
        return Passes(learn.model),fit(learn, 1)
    (_,a),(passes,b) = run(fp32),run(partial(fp16, init_scale=2.**8)) # it grows, and that must fit, too
    assert passes.n-n<=math.ceil(n/acc/256) and b.mixed_precision.n_rerun==0 and not b.mixed_precision.reports
    assert b.early.rows==a.early.rows and a.model[4].drawn==b.model[4].drawn and int(b.model[1].num_batches_tracked)==n

# --- defects of before

def test_what_a_later_callback_makes_of_a_batch_is_in_all_runs():
    "Inputs times 1e6 by a callback of order 60: healed at once, and trained as in fp32"
    class Units(Callback):
        order = 60
        def before_batch(self): self.learn.xb = (self.xb[0]*1e6+torch.rand(1),)
    def run(to):
        def make(): return nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16,4))
        return fit(classifier(make, to, [Units()]), 1)
    a,b = run(fp32),run(fp16)
    same_training(a, b)
    assert b.mixed_precision.history.reruns.tolist()==[1]+14*[0] and '0' in b.mixed_precision.promoted

def test_patience_of_one_sees_the_same_dropout():
    def run(to): return fit(classifier(lambda: net(Big), to, [Outlier(4)]), 1)
    same_training(run(fp32), run(partial(fp16, patience=1)))

def test_loggers_and_large_arrays_are_left_alone():
    "Another thread sets a logger's level while a batch runs again; an array of 80 MB is not copied"
    import tracemalloc
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.logger,self.table,self.calls,self.m = logging.getLogger('ours'),np.zeros(10**7),World(),mlp()
        def forward(self, x):
            self.calls.append(1)
            if len(self.calls)==7:
                t = threading.Thread(target=lambda: (self.logger.setLevel(17), self.logger.handlers.append('handler')))
                t.start()
                t.join()
            return self.m(x)
    # a step of torch's own optimizers imports its compiler, which takes memory as well
    learn = learner(Logs, n=10*16, opt_func=AdamW16, cbs=[GradientNormClip(1.), Outlier(5)]).to_fp16_dynamic()
    learn.model.logger.setLevel(30)
    tracemalloc.start()
    fit(learn, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    try: assert learn.model.logger.level==17 and learn.model.logger.handlers==['handler'] and learn.mixed_precision.n_rerun>=3
    finally: learn.model.logger.handlers.clear()
    assert peak<4e7

exceptions = [RuntimeError,ValueError,TypeError,ZeroDivisionError,NotImplementedError,KeyError,IndexError,AssertionError,
              StopIteration,OSError,AttributeError,torch.OutOfMemoryError]

some = ValueError,StopIteration,torch.OutOfMemoryError # callbacks make no difference between others

@pytest.mark.parametrize('ex,where', [*itertools.product(exceptions, ['model']), *itertools.product(some, ['after_loss','after_step'])])
@pytest.mark.usefixtures('uncompared')
def test_an_exception_comes_through_unchanged_after_one_more_run_at_most(ex, where):
    "As fp32 raises it; what half precision cannot have caused, after none"
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.m,self.runs = mlp(),World()
        def forward(self, x):
            if self.training: self.runs.append(1)
            if where=='model' and self.training and learn.train_iter==2: raise ex('from the user')
            return self.m(x)
    class Boom(Callback):
        def boom(self):
            if self.training and self.train_iter==2: raise ex('from the user')
    if where!='model': setattr(Boom, where, Boom.boom)
    res = []
    for to in (fp32, fp16):
        learn = to(learner(Raises, cbs=Boom()))
        try: fit(learn, 1)
        except Exception as e: res.append((type(e),str(e),len(learn.model.runs)))
        else: res.append((None,'',len(learn.model.runs))) # fastai ends an epoch at a StopIteration of a callback
        clean(learn)
    (*a,n),(*b,m) = res
    may = where=='model' and ex is not torch.OutOfMemoryError
    assert a==b and m-n<=may

@pytest.mark.parametrize('only_in_half', [False,True])
def test_an_exception_is_let_go_of(only_in_half):
    "Nothing holds its frames until garbage is collected, nor contexts in these: that of an activation checkpoint notes what a graph saves"
    class Wrong(ValueError): pass
    class Raises(nn.Module):
        def forward(self, x):
            if not only_in_half or x.dtype==torch.float16 or not self.training: raise Wrong
            return x
    learn,gone = learner(nn.Sequential(nn.Linear(8,16), Raises(), nn.Linear(16,1))).to_fp16_dynamic(on_spiral='warn'),[]
    gc.disable()
    try:
        try: fit(learn, 1)
        except Wrong as e: gone.append(weakref.ref(e))
        assert len(gone)==1 and gone[0]() is None
    finally: gc.enable()

def test_an_exception_that_fp32_does_not_raise_and_nothing_mends_comes_through():
    "The first call of it raises, whatever the precision: the user's own fault, which another run hides"
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.m,self.runs = mlp(),World()
        def forward(self, x):
            self.runs.append(1)
            if len(self.runs)==3: raise RuntimeError('connection lost')
            return self.m(x)
    learn = learner(Once).to_fp16_dynamic()
    with pytest.raises(RuntimeError, match='connection lost'): fit(learn, 1)
    assert not learn.mixed_precision.promoted

# --- silent overflows

@pytest.mark.parametrize('bad', [set(),{3}], ids=['','after a batch that nothing could save'])
def test_silent_overflows_are_mended_within_the_step_that_sees_them(bad):
    "A variance that is inf makes zeros of all: in half precision nothing is learned, and nothing tells but the predictions"
    class Divides(nn.Module):
        def forward(self, x): return x/(x.var(0)+1e-3).sqrt()
    def run(to):
        def make():
            model = nn.Sequential(nn.Linear(8,16), Detour(), nn.Linear(16,16), Divides(), nn.ReLU(), nn.Linear(16,4))
            with torch.no_grad(): model[2].weight.mul_(2e3)
            return model
        return fit(classifier(make, to, [Poison(bad, 'forward')], n=40), 1)
    a,b = run(fp32),run(fp16)
    mp = b.mixed_precision
    assert mp.n_skipped==len(bad) and len(mp.history)==40 and mp.promoted and mp.history.reruns[0]>0 and mp.history.reruns[16:].sum()==0
    assert bad or a.steps.rates==b.steps.rates
# --- callbacks and programs that end a batch for what half precision did

class Loud(nn.Module):
    "Numbers of 1e6 in the fourth training batch"
    n = 0
    def forward(self, x):
        self.n += self.training
        return x*1e6 if self.training and self.n==4 else x

class Guard(Callback):
    "Cancels what is not finite"
    def __init__(self, event, ex, order): 
        self.ex,self.order = ex,order
        setattr(self, event, self.look)
    def look(self):
        if not self.training: return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not self.loss.isfinite() or not all(g.isfinite().all() for g in grads): raise self.ex()

@pytest.mark.parametrize('event,order,ex', [
    *((*at,ex) for at in (('after_loss',0),('before_step',-5)) for ex in (CancelBatchException,CancelEpochException,CancelFitException)),
    ('before_backward', 55, CancelBatchException), ('before_backward', 5, CancelBackwardException),
    ('before_step', -5, CancelStepException)])
def test_a_guard_against_infinities_has_nothing_to_do(event, order, ex):
    "Where fp32 is finite. Batch norms, which are before the guard, forget what it would have cancelled"
    def make(): return nn.Sequential(nn.Linear(8,32), Loud(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,4))
    a,b = [fit(classifier(make, to, [Guard(event, ex, order)]), 1) for to in (fp32,fp16)]
    same_training(a, b)
    assert b.mixed_precision.n_rerun==1 and b.mixed_precision.reports

def test_a_guard_against_a_scale_that_is_too_high():
    a,b = [fit(classifier(lambda: net(Plain), to, [Guard('before_step', CancelStepException, -5)]), 1) for to in (fp32,hot)]
    same_training(a, b)

def test_steps_that_are_cancelled_for_another_reason_stay_cancelled():
    class Two(Callback):
        order = -5
        def before_step(self):
            if self.iter<2: raise CancelStepException()
    a,b = [fit(classifier(lambda: net(Big), to, [Two()]), 1) for to in (fp32,fp16)]
    assert len(b.mixed_precision.history)==13 and b.mixed_precision.n_skipped==0 and b.steps.rates==a.steps.rates
    assert b.recorder.values[0][-1]==pytest.approx(a.recorder.values[0][-1], rel=1e-2)

def test_a_guard_has_its_way_where_fp32_is_not_finite_either():
    guard = partial(Guard, 'after_loss', CancelBatchException, 0)
    a,b = [fit(classifier(lambda: net(Plain), to, [guard(), Poison({3}, 'forward')]), 1) for to in (fp32,fp16)]
    assert len(b.steps.rates)==len(a.steps.rates)==14 and b.model[1].running_var.isfinite().all()

def test_a_method_that_returns_where_the_loss_is_not_finite():
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb)
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.detach().clone()
            if self.training and self.loss.isfinite(): self._do_grad_opt()
    def run(to):
        learn = classifier(lambda: nn.Sequential(nn.Linear(8,32), Loud(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,4)), fp32)
        learn.__class__ = Own
        return fit(to(learn), 1)
    same_training(run(fp32), run(fp16))

@pytest.mark.parametrize('acc,ex', [(16,KeyboardInterrupt), (32,KeyboardInterrupt), (16,torch.OutOfMemoryError), (32,KeyError)])
@pytest.mark.parametrize('event', ['after_pred','after_backward'])
def test_an_interrupt_leaves_no_infinity_of_an_attempt(event, ex, acc):
    stop = Callback()
    def raises():
        if stop.training and stop.iter==3: raise ex('stop')
    setattr(stop, event, raises)
    def make(): return nn.Sequential(nn.Linear(8,32), Loud(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,4))
    learn = classifier(make, fp16, [stop, GradientAccumulation(acc)])
    with pytest.raises(ex): fit(learn, 1)
    assert all(b.isfinite().all() for b in learn.model.buffers()) and not any('forward' in vars(m) for m in learn.model.modules())

def test_cancelled_steps_do_not_ask_again_for_predictions():
    "Before the 8th step fp32 is asked, and not in each batch until it is made"
    class Cancels(Callback):
        order = -5
        def before_step(self):
            if 6<self.iter<32: raise CancelStepException()
    learn = classifier(lambda: net(Plain), fp16, [Cancels()], n=45)
    passes,inner = Passes(learn.model),Passes(next(learn.model.children()))
    fit(learn, 1)
    assert len(learn.mixed_precision.history)==20 and passes.n==45 and inner.n==45+2*2 # with dropout, half precision runs once more, too

# --- what others keep in modules and callbacks

class Store(dict):
    "Reads from a disk that is gone"
    def values(self): raise OSError('gone')
    def __getitem__(self, k): raise OSError('gone')

def cyclic():
    d = {'a':1}
    d['me'] = d
    return d

kept = {'read-only array': lambda: np.frombuffer(b'12345678', dtype=np.uint8), 'cyclic dict': cyclic, 'store': Store,
    'vocabulary': lambda: {i: str(i) for i in range(50000)}, 'meta': lambda: torch.zeros(3, device='meta'),
    'float8': lambda: torch.zeros(3).to(torch.float8_e4m3fn), 'nested': lambda: torch.nested.nested_tensor([torch.ones(2)])}

@pytest.mark.parametrize('act,to', [(Plain,fp16),(Plain,hot),(Big,fp16)], ids=['fine','scale','healed'])
def test_what_others_keep_disturbs_nobody(act, to):
    learn = classifier(lambda: net(act), to, [Outlier(4)] if to is hot else [], k=1.+1e-9, n=18)
    for o in (learn.model[2], learn.steps, learn.loss_func):
        for i,make in enumerate(kept.values()): setattr(o, f'mine_{i}', make())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(learn, 1)
    assert len(learn.steps.rates)==18 and learn.mixed_precision.n_skipped==0 and not any('failed' in str(w.message) for w in told)

class Several(nn.ModuleDict):
    def forward(self, pred, y): return self['ce'](pred, y)

@pytest.mark.parametrize('loss', [lambda f: f['ce'], lambda f: f if isinstance(f, nn.Module) else None,
                                  lambda f: partial(type(f).forward, f), lambda f: next(iter(f.values()))])
def test_a_loss_function_is_itself_in_all_runs(loss):
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb)
            self('after_pred')
            self.loss_grad = loss(self.loss_func)(self.pred, *self.yb)
            self.loss = self.loss_grad.detach().clone()
            self('after_loss')
            if self.training: self._do_grad_opt()
    def run(to):
        learn = classifier(lambda: net(Big), fp32, [Outlier(3)])
        learn.__class__,learn.loss_func = Own,Several({'ce': nn.CrossEntropyLoss()})
        return fit(to(learn), 1)
    same_training(run(fp32), run(hot))

# --- training steps that leave out fastai's events

class OwnEnd(Learner):
    "Ends the batch in a way of its own"
    def _do_grad_opt(self):
        self.end(self)
        self.opt.zero_grad()

def bare(learn):
    learn.loss.backward()
    learn.opt.step()
def below(learn):
    learn._backward()
    learn._step()
def no_step_event(learn):
    learn('before_backward')
    learn.loss_grad.backward()
    learn('after_backward')
    learn.opt.step()
def backward_of(name):
    def f(learn):
        learn('before_backward')
        getattr(learn, name).backward()
        learn('after_backward')
        learn._with_events(learn.opt.step, 'step', CancelStepException)
    return f
def backward_by(f):
    def end(learn):
        learn._with_events(partial(f, learn), 'backward', CancelBackwardException)
        learn._with_events(learn.opt.step, 'step', CancelStepException)
    end.__name__ = f.__name__
    return end
@backward_by
def by_scaler(learn):
    "As in a loop written for `GradScaler`"
    scaler = getattr(learn, 'scaler', None)
    (scaler.scale(learn.loss_grad) if scaler else learn.loss_grad).backward()
    if scaler: scaler.unscale_(learn.opt)
@backward_by
def by_scaler_of_containers(learn):
    "`scale` takes them at any depth"
    scaler,losses = getattr(learn, 'scaler', None),[[learn.loss_grad/2], (learn.loss_grad/2,)]
    (first,),(second,) = scaler.scale(losses) if scaler else losses
    (first+second).backward()
    if scaler: scaler.unscale_(learn.opt)
@backward_by
def in_parts(learn):
    for share in (.25,.75): (share*learn.loss_grad).backward(retain_graph=True)
@backward_by
def by_autograd(learn):
    "Not scaled, and judged"
    torch.autograd.backward([learn.loss_grad])
def only_step_events(learn):
    learn.loss_grad.backward()
    learn._with_events(learn.opt.step, 'step', CancelStepException)
class Trains(Callback):
    def after_loss(self):
        if not self.training: return
        bare(self.learn)
        self.opt.zero_grad()
        raise CancelBatchException()

def own_end(end, to, cbs=()):
    set_seed(2)
    learn = classifier(lambda: net(Plain), fp32, cbs)
    learn.__class__,learn.end = OwnEnd,end
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(to(learn), 1)
    return learn,[str(o.message) for o in told if 'our training step' in str(o.message)]

@pytest.mark.parametrize('end,cbs,told', [
    (bare,(),'_do_grad_opt'), (below,(),'_do_grad_opt'), (None,(Trains,),'_do_grad_opt')])
def test_a_step_without_fastais_events_is_named(end, cbs, told):
    "Once, and what it accumulates is not kept"
    learn,found = own_end(end, fp16, [cb() for cb in cbs])
    assert len(found)==1 and told in found[0]
    assert learn.mixed_precision.step is None

@pytest.mark.parametrize('end', [
    Learner._do_grad_opt, backward_of('loss_grad'), backward_of('loss'), by_scaler,
    by_scaler_of_containers, in_parts, by_autograd, only_step_events])
def test_a_step_of_ones_own_with_events_is_as_good_as_fastais(end):
    (a,_),(b,found) = own_end(end, fp32),own_end(end, fp16)
    assert not found and b.gradient_norm_clip.norms==pytest.approx(a.gradient_norm_clip.norms, rel=0.1)
    same_training(a, b)

def test_a_step_without_events_after_a_backward_pass_with_them_is_counted():
    "Its gradients were scaled and judged: a batch that overflows runs again"
    learn,found = own_end(no_step_event, partial(fp16, init_scale=2.**24))
    mp = learn.mixed_precision
    assert not found and mp.n_rerun and len(mp.history)==len(learn.dls.train) and mp.scaler.get_scale()<2**24

def test_nothing_of_a_cancelled_backward_pass_stays():
    "The next batch begins without the mode that scales"
    def modes(): return torch.overrides._get_current_function_mode_stack()
    class Cancels(Callback):
        order,modes = 50,[]
        def before_batch(self): self.modes.append(modes())
        def before_backward(self):
            if self.iter in (2,5): raise CancelBatchException()
    own_end(Learner._do_grad_opt, fp16, [Cancels()])
    assert len(Cancels.modes)>10 and all(o==modes() for o in Cancels.modes)

@pytest.mark.parametrize('end', [Learner._do_grad_opt, by_autograd])
def test_no_step_is_taken_with_gradients_that_nothing_can_use(end):
    "Whatever function runs backward"
    class Infinite(Callback):
        def after_loss(self):
            if self.iter==3: self.learn.loss_grad = self.loss_grad*math.inf
    learn,_ = own_end(end, fp16, [Infinite()])
    assert learn.mixed_precision.n_skipped==1 and all(p.isfinite().all() for p in learn.model.parameters())

@pytest.mark.parametrize('cbs', [[], [partial(GradientAccumulation, 64)]])
def test_weights_that_a_callback_edits_are_no_step(cbs):
    class Clamps(Callback):
        def after_batch(self):
            for p in self.learn.model.parameters(): p.data.clamp_(-1, 1)
    _,found = own_end(Learner._do_grad_opt, fp16, [Clamps(), *(cb() for cb in cbs)])
    assert not found

def test_the_end_of_a_fit_is_not_explained_by_an_earlier_report():
    "A layer that overflows in the first batch, and later three batches with gradients that a static scale cannot hold"
    learn = classifier(lambda: net(Big), partial(fp16, dynamic=False, init_scale=2.**8), [Outlier(5,6,7)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        fit(learn, 1)
    report, = learn.mixed_precision.reports
    stopped, = [str(o.message) for o in told if str(o.message).startswith('Training stopped')]
    assert len(learn.mixed_precision.history)==8 and 'static loss scale 256' in stopped and report.sentence not in stopped
