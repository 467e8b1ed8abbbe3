"compare_precisions times each precision, recommends one, and leaves no trace"
import copy,math
from contextlib import nullcontext
from time import sleep
import matplotlib.pyplot as plt
import pandas as pd
import pytest,torch
from fastai.basics import CancelEpochException,Callback,DataLoader,DataLoaders,L,Learner
from fastai.callback.all import CSVLogger,MixUp,SaveModelCallback,ShortEpochCallback,ShowGraphCallback
from torch import nn
from common import *
from fastai_amp16 import speed
from fastai_amp16.all import GradientNormClip,PrecisionWarning
from fastai_amp16.doctor import Device
from fastai_amp16.train.weights import KeptWeights

def state(learn):
    "What a fit may change"
    opt = learn.opt and copy.deepcopy(learn.opt.state_dict())
    return copy.deepcopy([learn.model.state_dict(), opt, torch.get_rng_state(), learn.model.training, learn.training,
                          [(cb.name, cb.order) for cb in learn.cbs], [p.grad for p in learn.model.parameters()]])

def same(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(same, a, b))
    return a==b

@pytest.mark.parametrize('to', [Learner.to_fp32, Learner.to_fp16_dynamic])
@pytest.mark.parametrize('fitted', [False,True])
def test_no_trace_is_left(to, fitted):
    "The next fit is bit for bit the one without"
    def run(asks):
        learn = to(learner(lambda: mlp(bn=True), shuffle=True, cbs=GradientNormClip(1.)))
        if fitted: fit(learn, 1)
        before = state(learn)
        if asks:
            learn.compare_precisions(2)
            assert same(before, state(learn)) and all(cb.learn is learn for cb in learn.cbs)
        fit(learn, 2)
        return learn
    a,b = run(False),run(True)
    assert same(state(a), state(b)) and a.recorder.losses==b.recorder.losses

@pytest.mark.cpu_only('a GPU has memory and `to_fp16`, too: see test_cuda.py')
def test_it_is_what_a_fit_finds():
    "Speeds in each precision, what moves to fp32, and fp32 on a CPU"
    hot = nn.Sequential(nn.Linear(8, 16), Do(lambda x: x*1e5), nn.Linear(16, 1))
    found = learner(hot).compare_precisions(2)
    with pytest.warns(PrecisionWarning): ref = fit(learner(copy.deepcopy(hot)).to_fp16_dynamic(), 1).mixed_precision.promoted
    assert ref and all(f'`{o}`' in found.table['moved to fp32']['fp16'] for o in ref[:3]) and not found.table['moved to fp32']['fp32']
    assert [*found.table.index]==['fp32','fp16','bf16'] and found.table['× fp32']['fp32']==1
    assert (found.table['samples per second']>0).all() and found.table['peak memory'].isna().all()
    assert found.sentence in str(found) and 'memory' not in str(found) and '<table' in found._repr_html_()
    axs = found.plot()
    assert [t.get_text() for t in axs[0].get_yticklabels()]==['fp32','fp16','bf16'] and len(axs)==1
    plt.close('all')

class Clips(Callback):
    def after_step(self):
        with torch.no_grad(): [p.clamp_(-.05, .05) for p in self.model.parameters()]

class ClipsItself(nn.Linear):
    def forward(self, x):
        with torch.no_grad(): self.weight.clamp_(-.01, .01)
        return super().forward(x)

@pytest.mark.parametrize('model,cbs', [(mlp,Clips), (lambda: ClipsItself(8, 1), None)])
def test_weights_that_are_written_to_in_place_come_back(model, cbs):
    "Also if a batch raises"
    class Raises(Callback):
        def after_batch(self):
            if self.iter==3: raise KeyError('a batch')
        def before_batch(self): pass # acts within a step, so it takes part
    for cb,expected in ((None,nullcontext()), (Raises(),pytest.raises(KeyError))):
        learn = learner(model, cbs=[*L(cbs and cbs()), *L(cb)])
        before = state(learn)
        with expected: learn.compare_precisions(1)
        assert same(before, state(learn))

def test_what_is_timed_is_not_watched_for_writes(monkeypatch):
    "That would slow small models down"
    seen,fits = [],[]
    class Counts(Callback):
        def before_fit(self): fits.append([])
        def before_batch(self): fits[-1].append(len(seen))
    watch = KeptWeights.__torch_function__
    monkeypatch.setattr(KeptWeights, '__torch_function__', lambda self, func, *args: seen.append(func) or watch(self, func, *args))
    found = learner(plain_mlp, cbs=Counts()).compare_precisions()
    n = len(found.table)+1 # with that of half a batch
    timed = [counts[-1]-counts[2] for counts in fits]
    assert len(fits)==4*n and all(timed[:n]) and not any(timed[n:])

def test_a_model_need_not_take_half_a_batch():
    def whole(x):
        assert len(x)==16
        return x
    found = learner(nn.Sequential(nn.Linear(8, 1), Do(whole))).compare_precisions(1)
    assert (found.table['moved to fp32']=='').all() and found.table['× fp32'].notna().all()

def test_data_loaders_are_those_of_the_learner():
    "With attributes that callbacks read, and the number of inputs"
    seen = []
    class Reads(Callback):
        def before_batch(self): seen.append((self.dls.c, self.dls.train.bs, self.dls.n_inp, len(self.dls.train_ds), len(self.yb)))
    rows = Items((o,o[:1],o[1:2]) for o in torch.randn(64, 8))
    rows.n_inp = 1
    dls = DataLoaders.from_dsets(rows, bs=16, device=default_device())
    dls.c = 3
    learn = Learner(dls, nn.Linear(8, 1), lambda p,a,b: mse(p, a+b), cbs=Reads())
    learn.compare_precisions(1)
    assert {*seen}=={(3,16,1,64,2)} and learn.dls is dls and dls.train.bs==16

def test_a_fit_that_a_callback_ends_is_said_and_a_short_epoch_is_no_matter():
    class Ends(Callback):
        def before_backward(self):
            if self.iter==2: raise CancelEpochException
    with pytest.raises(RuntimeError, match='needs 7 batches in a row, but a callback'): learner(cbs=Ends()).compare_precisions(1)
    assert learner(cbs=ShortEpochCallback(.1)).compare_precisions(1).recommended

def test_a_list_of_batches_is_a_loader():
    learn = learner()
    learn.dls = DataLoaders([*learn.dls.train], [])
    assert learn.compare_precisions(1).table['× fp32'].notna().all()

def test_without_a_batch_there_is_nothing_to_compare():
    learn = learner()
    learn.dls = DataLoaders.from_dsets(learn.dls.train_ds[:3], bs=16)
    with pytest.raises(ValueError, match='needs a batch'): learn.compare_precisions(1)

def test_what_acts_within_a_step_takes_part_and_nothing_is_written(tmp_path):
    seen = []
    class Own(Callback):
        def before_backward(self): seen.append(self.learn)
    class Logs(Callback):
        def after_epoch(self): raise AssertionError
    learn = learner(path=tmp_path, cbs=[MixUp(.4), Own(), Logs(), CSVLogger(), SaveModelCallback(), ShowGraphCallback()])
    found = learn.compare_precisions(1)
    assert len({*map(id, seen)})==len(found.table)+1 and learn not in seen and not [*tmp_path.rglob('*.*')] and not hasattr(learn, 'lam')

def test_arguments_and_errors():
    learn = learner()
    for n in (0,-1,1.5): pytest.raises(ValueError, learn.compare_precisions, n)
    class Asks(Callback):
        def after_batch(self): self.learn.compare_precisions()
    with pytest.raises(RuntimeError, match='outside a fit'): fit(learn, 1, cbs=Asks())
    def broken(x): raise RuntimeError('no way')
    with pytest.raises(RuntimeError, match='no way'): learner(nn.Sequential(nn.Linear(8, 1), Do(broken))).compare_precisions(1)
    class FailsInHalf(Callback):
        def before_backward(self):
            if 'mixed_precision' in vars(self.learn): raise KeyError('half')
    found = learner(cbs=FailsInHalf()).compare_precisions(1)
    assert found.recommended=='fp32' and all('KeyError' in found.table['moved to fp32'][o] for o in ('fp16','bf16'))
    assert found.sentence.startswith('fp32: half precision raises KeyError')
    def too_large(x): raise torch.OutOfMemoryError('too much')
    with pytest.raises(RuntimeError, match='no precision fits into memory: use smaller'):
        learner(nn.Sequential(nn.Linear(8, 1), Do(too_large))).compare_precisions(1)

@pytest.mark.parametrize('gains,best', [
    (dict(fp32=[1.,1.], fp16=[1.9,1.8], bf16=[1.8,1.9]), 'bf16'), (dict(fp32=[1.,1.], fp16=[1.9,2.], bf16=[1.5,1.6]), 'fp16'),
    (dict(fp32=[1.,1.], fp16=[1.9,.9], bf16=[1.,1.]), 'fp32'), (dict(fp32=[1.], fp16=[], bf16=[]), 'fp32'),
    (dict(fp32=[1.], fp16=[1.06], bf16=[1.02]), 'fp16'), (dict(fp32=[1.], fp16=[1.02], bf16=[1.06]), 'bf16'),
    (dict(fp32=[], fp16=[9.], bf16=[2.]), 'fp16'), (dict(fp32=[], fp16=[.9], bf16=[.9]), 'bf16')])
def test_the_best_is_faster_in_each_round(gains, best): assert speed._best(gains)==best

@pytest.mark.parametrize('capability,small,load,says', [
    ((6,1), .5, .1, ['no tensor cores']), ((8,0), .9, .1, ['larger batches']), ((8,0), .5, 2., ['workers']), ((8,0), .5, .1, [])])
def test_reasons_on_a_gpu(monkeypatch, capability, small, load, says):
    monkeypatch.setattr(speed.Device, 'of', lambda device: Device('cuda', 'a GPU', capability))
    found = [*speed._reasons(learner(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))), 'fp32', small, load)]
    assert len(found)==len(says) and all(a in b for a,b in zip(says, found))

@pytest.mark.parametrize('slow', [False,True])
def test_a_slow_loader_is_said_whatever_is_recommended(monkeypatch, slow):
    "fp32 does not run here, so half precision is recommended"
    class OnlyHalf(Callback):
        def before_backward(self):
            if 'mixed_precision' not in vars(self.learn): raise torch.OutOfMemoryError('too much')
    monkeypatch.setattr(speed, '_load', lambda dl, f=speed._load: (f(dl)[0],100. if slow else 0.))
    found = learner(cbs=OnlyHalf()).compare_precisions(1)
    assert found.recommended in ('fp16','bf16') and 'fp32 does not fit into memory' in found.sentence
    assert ('Loading a batch takes longer than a step' in found.sentence)==slow
    assert math.isnan(found.table['× fp32']['bf16']) and 'OutOfMemoryError' in found.table['moved to fp32']['fp32']

class Slow:
    "Items that take a fifth of a second each"
    def __len__(self): return 40
    def __getitem__(self, i):
        sleep(.2)
        return torch.zeros(1),torch.zeros(1)

@pytest.mark.parametrize('workers', [0,8])
@pytest.mark.parametrize('cls', [DataLoader,torch.utils.data.DataLoader])
def test_the_time_of_loading_is_that_of_workers_in_the_long_run(cls, workers):
    "Eight of them have up to sixteen batches ready when the first one comes"
    batches,seconds = speed._load(cls(Slow(), batch_size=1, num_workers=workers))
    assert len(batches)==7 and seconds>=.5*.2/max(1, workers)

def test_a_sentence_has_speed_and_memory():
    table = pd.DataFrame({'× fp32': [1.,1.9,math.nan], 'of fp32': [1.,.62,math.nan]}, ['fp32','bf16','fp16'])
    assert speed._advice(table, 'bf16')=='bf16: 1.9 times as fast as fp32, at 62% of its memory. Call learn.to_bf16_dynamic().'
    assert 'does not fit into memory' in speed._advice(table.assign(**{'× fp32': math.nan}), 'bf16')
    assert speed._advice(table, 'fp32').startswith('fp32: bf16 is 1.90 times as fast as fp32')
