"Checkpoints and exported learners, resumed and read elsewhere"
import copy,functools,math,os,pickle,random,re,signal,threading,warnings
from concurrent.futures.process import BrokenProcessPool
import numpy as np
import pytest,torch
from fastai.basics import (Adam,Callback,DataLoader,DataLoaders,L,Learner,OptimWrapper,
                           TfmdLists,load_learner,nn,noop,partial,set_seed,tensor)
from fastai.callback.all import GradientAccumulation,MixedPrecision,SaveModelCallback
from fastai_amp16.all import (AdamW16,DynamicMixedPrecision,PrecisionWarning)
from fastai_amp16.all import GradNorm,GradientNormClip,RMSProp16,ranger16
from fastai_amp16.learner import running
from fastai_amp16.train.snapshot import check_random_states,learner_random_states
import common
from common import *

def test_edits_and_loads_in_the_middle_of_a_fit_reach_the_next_forward(tmp_path):
    class Edit(Callback):
        def after_batch(self):
            if self.training and self.train_iter==2: self.model[0].weight.data.fill_(3.)
            if self.training and self.train_iter==3: self.learn.load('start')
    def run(to):
        learn = to(learner(plain_mlp, path=tmp_path))
        learn.create_opt()
        learn.save('start')
        return fit(learn, 1, cbs=[Edit(), (seen:=Seen())]),seen
    class Seen(Callback):
        order = 1
        def before_fit(self): self.preds = []
        def after_pred(self): self.preds.append(self.learn.pred.detach().float())
    (_,sa),(_,sb) = run(Learner.to_fp16_dynamic),run(Learner.to_fp32)
    for p,q in zip(sa.preds, sb.preds): torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)

def steep(p, t): return mse(p, t)*1e4 # gradients for which the first loss scale is too high

@poisoned('backward')
def test_scale_and_counts_survive_from_fit_to_fit():
    learn = learner(loss_func=steep, cbs=Poison({1,5}, 'backward')).to_fp16_dynamic()
    mp = learn.mixed_precision
    fit(learn, 1)
    scale = mp.scaler.get_scale()
    fit(learn, 1)
    with learn.no_bar(), learn.no_logging(): learn.validate()
    assert mp.scaler.get_scale()==scale<2**16 and mp.n_skipped==2 and mp.n_rerun==mp.history.reruns.sum()
    assert mp.history.step.tolist()==list(range(8)) and (mp.history.reruns>0).tolist()==[i in (0,1,5) for i in range(8)]

@pytest.mark.parametrize('opt_func', [AdamW16, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['AdamW16','Adam','OptimWrapper'])
def test_checkpoints(tmp_path, opt_func):
    def new(): return learner(path=tmp_path, opt_func=opt_func, loss_func=steep, shuffle=False)
    a = fit(new().to_fp16_dynamic(), 2)
    a.save('a')
    assert a.mixed_precision.scaler.get_scale()<2**16
    saved = torch.load(tmp_path/'models/a.pth', weights_only=False)
    assert set(saved)=={'model','opt'} and all(v.dtype in (torch.float32,torch.int64) for v in saved['model'].values())
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='Could not load') # fastai's way to say that an optimizer's state was not loaded
        plain = new().load('a') # fastai alone, `weights_only=True`
        plain.save('plain')
        b,c = new().to_fp16_dynamic().load('a'),new().to_fp16_dynamic().load('plain')
    assert b.mixed_precision.scaler.state_dict()==a.mixed_precision.scaler.state_dict() and c.mixed_precision.scaler.get_scale()==2**16
    for o in (plain,b,c): assert equal(state(a), state(o))
    for o in (a,b,c,plain): fit(o, 1)
    assert equal(state(a), state(b)) and not hasattr(a.opt, 'scaler') and b.mixed_precision.n_rerun==0
    for o in (c,plain): # at another scale, and in fp32
        assert float(o.recorder.losses[-1])==pytest.approx(float(a.recorder.losses[-1]), rel=0.05)

def test_export(tmp_path):
    learn = fit(learner(path=tmp_path).to_fp16_dynamic(), 1)
    learn.export()
    clean(learn)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fp32,fp16 = load_learner(tmp_path/'export.pkl'),load_learner(tmp_path/'export.pkl', cpu=False)
    assert not fp32._grab_cbs(MixedPrecision) and not fp16._grab_cbs(MixedPrecision) and running(learn)
    on_cpu = [o.cpu() for o in weights(learn)]
    assert equal(on_cpu, weights(fp32)) and equal(weights(learn), weights(fp16))
    for o in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))): assert len(o.mixed_precision.history)==4
    pickle.loads(pickle.dumps(learn.model))
    fit(learn, 1)

@pytest.mark.parametrize('how', [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=['deepcopy','pickle'])
def test_the_scaler_of_a_learner_is_copied_without_the_learner(how):
    "At any moment of a fit; a copy scales by itself, and that of a learner goes on with it"
    class Copies(Callback):
        def after_backward(self):
            scaler = self.learn.scaler
            assert len(pickle.dumps(scaler))<2000
            assert how(scaler).state_dict()==scaler.state_dict() and how(scaler).scale(tensor(1.))==scaler.get_scale()
    learn = fit(learner(cbs=Copies(), shuffle=False).to_fp16_dynamic(), 1)
    again = how(learn.remove_cb(Copies))
    assert again.mixed_precision.scaler.owner is again.mixed_precision and learn.mixed_precision.scaler.owner is learn.mixed_precision
    assert equal(weights(fit(again, 1)), weights(fit(learn, 1)))

def test_gradients_of_before_a_load_do_not_enter_the_next_step(tmp_path):
    "Half of an accumulated step was made at the scale of before"
    class GoBack(Callback):
        def after_batch(self):
            if self.training and self.train_iter==1: self.learn.load('one')
    learn = learner(bs=8, path=tmp_path, cbs=GradientAccumulation(16), shuffle=False).to_fp16_dynamic(init_scale=1.)
    learn.create_opt()
    learn.save('one')
    learn.to_fp16_dynamic()
    fit(learn, 1, cbs=GoBack())
    assert learn.mixed_precision.history.grad_norm.max()<10

def test_text_learner_loads_its_scale(tmp_path):
    from fastai.callback.rnn import RNNCallback,RNNRegularizer
    from fastai.text.learner import TextLearner
    ds = Items([(torch.randint(0, 9, (5,)),torch.tensor(1)) for _ in range(16)])
    class Model(nn.Sequential):
        def reset(self): pass
    def new(**kwargs):
        model = Model(nn.Embedding(9,4), nn.Flatten(), nn.Linear(20,2))
        dls,loss_func = DataLoaders(*[DataLoader(ds, bs=8)]*2),nn.CrossEntropyLoss()
        learn = TextLearner(dls, model, loss_func=loss_func, path=tmp_path, splitter=lambda m: [list(m.parameters())], **kwargs)
        return learn.remove_cbs([RNNCallback, RNNRegularizer])
    a = fit(new().to_fp16_dynamic(init_scale=8.), 1)
    a.save('t')
    b = new(cbs=DynamicMixedPrecision())
    with b.no_bar(), b.no_logging(): b.validate()
    for o in (new().to_fp16_dynamic(),b): assert o.load('t').mixed_precision.scaler.get_scale()==8

class Hostile(Poison): order = 6 # after `Poison`, which switches detours off

def resumable(path, **kwargs):
    "Dropout, shuffling and the random numbers of a callback; a scale that grows, skipped steps, a module that is healed"
    class Noise(Callback):
        def before_batch(self):
            if self.training: self.learn.xb = (self.x*(1+0.1*np.random.randn()*random.random()),)
    def model(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), Detour(), nn.Linear(16,1))
    cbs = [Noise(), SaveModelCallback(every_epoch=True, with_opt=True), Poison({1,9,14}, 'backward'), Hostile({3,13}, 'precision')]
    return learner(model, path=path, loss_func=steep, cbs=cbs, **kwargs).to_fp16_dynamic(growth_interval=3)

def start_and_die(path):
    class Die(Callback):
        def before_step(self):
            if self.epoch==2 and self.iter==2: os.kill(os.getpid(), signal.SIGKILL)
    fit(resumable(path).add_cb(Die()), 4)

def go_on(path):
    set_seed(7)
    torch.rand(99)
    learn = resumable(path)
    for cb in (learn.poison, learn.hostile): cb.i += 8 # two epochs lie behind
    fit(learn.load('model_1'), 4, start_epoch=2)

def same(a, b):
    "Are two states of whatever optimizer the same, with all they hold?"
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(v, b[k]) for k,v in a.items())
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a==b

@pytest.mark.cpu_only('bit for bit')
@poisoned('backward')
@pytest.mark.warns('`mul` in `4`')
def test_killed_and_resumed_in_a_new_process(tmp_path, in_a_process):
    "Ends where the uninterrupted fit ends, bit for bit: weights, optimizer, scale, random state"
    def process(what):
        begin = f'import conftest; conftest.prepare(); import common,test_saving; common.drawn = common.optimizers[{name!r}]'
        in_a_process(f'{begin}; test_saving.{what}({str(broken)!r})', tmp_path)
    name, = [k for k,o in optimizers.items() if o is common.drawn]
    through,broken = tmp_path/'through',tmp_path/'broken'
    whole = fit(resumable(through), 4).mixed_precision
    assert whole.history.loss_scale.nunique()>1 and (whole.history.reruns>0).any() and whole.promoted==['4'] and whole.n_skipped==3
    with pytest.raises(BrokenProcessPool): process('start_and_die')
    assert not (broken/'models/model_2.pth').exists()
    process('go_on')
    go_on(broken) # once more from the same checkpoint, which the skipped epochs have saved again
    with torch.serialization.safe_globals([L]): # fastai's own
        a,b = [torch.load(p/'models/model_3.pth', weights_only=True) for p in (through, broken)]
    assert 'random' in a['opt'] and same(a, b)

@poisoned('backward')
@pytest.mark.warns('`mul` in `4`')
def test_only_a_resumed_fit_takes_up_the_random_state(tmp_path):
    "To load and to try again is to try something else"
    learn = fit(resumable(tmp_path), 1).remove_cbs([Poison, Hostile])
    learn.save('a')
    def again(**kwargs):
        fit(learn.load('a'), **kwargs)
        return weights(learn)
    assert not equal(again(n=1), again(n=1)) and equal(again(n=2, start_epoch=1), again(n=2, start_epoch=1))
    def later():
        learn.load('a')
        with learn.no_bar(), learn.no_logging(): learn.fit(1, lr=0.)
        fit(learn, 2, start_epoch=1)
        return weights(learn)
    assert not equal(later(), later())

def test_the_way_back_after_an_outlier_goes_on_after_a_load(tmp_path):
    class Outlier(Callback):
        order = 5
        def before_backward(self):
            if self.iter==3: self.learn.loss_grad = self.learn.loss_grad*1e5
    def new(**kwargs): return learner(path=tmp_path, shuffle=False, **kwargs).to_fp16_dynamic()
    a = fit(new(cbs=Outlier()), 1)
    a.save('a')
    low,b = a.mixed_precision.scaler.get_scale(),new().load('a')
    for o in (a.remove_cb(Outlier),b): fit(o, 40)
    assert low<2**14 and a.mixed_precision.scaler.get_scale()==2**16 and b.mixed_precision.history.loss_scale[0]==low
    assert a.mixed_precision.history.loss_scale[4:].tolist()==b.mixed_precision.history.loss_scale.tolist()

def test_what_healing_keeps_in_fp32_is_loaded(tmp_path):
    def model(): return nn.Sequential(nn.Linear(8,16), Detour(), nn.Linear(16,1))
    def new(): return learner(model, path=tmp_path, cbs=Poison(range(9), 'precision')).to_fp16_dynamic()
    with pytest.warns(UserWarning, match='`mul` in `1`'): a = fit(new(), 1)
    a.save('a'), a.save('without', with_opt=False)
    b = fit(new().load('a'), 1)
    assert a.mixed_precision.promoted==b.mixed_precision.promoted==['1'] and b.mixed_precision.n_rerun==0
    with pytest.warns(UserWarning, match='optimizer state'): assert new().load('without').mixed_precision.promoted==[]

def test_load_before_mixed_precision_is_chosen(tmp_path):
    "The scale and the promotions wait for `to_fp16_dynamic`, but not beyond a fit, and not in a pickle"
    def model(): return nn.Sequential(nn.Linear(8,16), Detour(), nn.Linear(16,1))
    def new(): return learner(model, path=tmp_path, cbs=Poison(range(9), 'precision'))
    with pytest.warns(UserWarning, match='`mul` in `1`'): a = fit(new().to_fp16_dynamic(init_scale=2.**9), 1)
    a.save('a')
    b,c,d = new().load('a').to_fp16_dynamic(),fit(new().load('a'), 1).to_fp16_dynamic(),pickle.loads(pickle.dumps(new().load('a')))
    first,second = new().load('a'),fit(learner(model, path=tmp_path), 1)
    second.save('b')
    first.load('b')
    mps = [o.mixed_precision for o in (a,b,c,d.to_fp16_dynamic(),first.to_fp16_dynamic())]
    assert [(mp.scaler.get_scale(),mp.promoted) for mp in mps]==2*[(2.**9,['1'])]+3*[(2.**16,[])]

def test_load_without_the_optimizer(tmp_path):
    a = fit(learner(path=tmp_path, loss_func=steep).to_fp16_dynamic(), 1)
    a.save('with'), a.save('without', with_opt=False)
    b = learner(path=tmp_path).to_fp16_dynamic().load('with', with_opt=False)
    with pytest.warns(UserWarning, match='optimizer state'): c = learner(path=tmp_path).to_fp16_dynamic().load('without')
    assert a.mixed_precision.scaler.get_scale()<2**16
    for o in (b,c): assert equal(state(a), state(o)) and o.mixed_precision.scaler.get_scale()==2**16

@pytest.mark.usefixtures('as_in_programs') # fastai splits data by arrays
def test_inference(tmp_path):
    "predict, get_preds, tta, show_results, top losses and validate, before a fit, after it, and exported to a machine of another kind"
    from fastai.vision.all import CategoryBlock,DataBlock,ImageBlock,Interpretation,PILImageBW,RandomSplitter,aug_transforms
    from sklearn.datasets import load_digits
    data = load_digits()
    def get_x(i): return PILImageBW.create((data.images[i]*15.9).astype('uint8'))
    def get_y(i): return str(data.target[i]%2)
    block = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=get_x, get_y=get_y, splitter=RandomSplitter(seed=0),
                      batch_tfms=aug_transforms(size=8, max_zoom=1.))
    dls = block.dataloaders(range(96), bs=16, num_workers=0)
    model = nn.Sequential(nn.Conv2d(1,8,3,2,1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128,2))
    learn = Learner(dls, model.to(default_device()), opt_func=AdamW16, path=tmp_path).to_fp16_dynamic()
    def results(learn):
        with learn.no_bar(), learn.no_logging():
            set_seed(0)
            learn.show_results(max_n=2)
            worst = Interpretation.from_learner(learn).top_losses(4)[0]
            preds,_,losses = learn.get_preds(with_loss=True)
            return [learn.validate()[0], preds, losses, worst, learn.tta(n=2)[0], learn.predict(0)[2]]
    def compare(tol):
        learn.export()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            fp32,fp16 = load_learner(tmp_path/'export.pkl'),load_learner(tmp_path/'export.pkl', cpu=False)
        for o in (fp32,fp16): o.dls,_ = dls,o.model.to(default_device())
        ours,theirs,again = results(learn),results(fp32),results(fp16)
        for a,b,c in zip(ours, theirs, again):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tol, atol=tol)
            assert torch.equal(torch.as_tensor(b), torch.as_tensor(c)) # an export has no mixed precision
        assert not torch.equal(ours[1], theirs[1]) and not hasattr(fp32, 'mixed_precision') # half precision, and fp32
    compare(1e-2)
    fit(learn, 2)
    clean(learn)
    compare(1e-2)

class Exports(Callback):
    def after_epoch(self):
        self.learn.export('in_a_fit.pkl')
        self.learn.copies = copy.deepcopy(self.learn),pickle.loads(pickle.dumps(self.learn))

@pytest.mark.parametrize('to', ['to_fp32','to_fp16_dynamic'])
def test_a_learner_that_is_copied_or_exported_in_the_middle_of_a_fit(to, tmp_path):
    "It predicts and fits as any other"
    learn = getattr(learner(path=tmp_path), to)()
    with learn.added_cbs(Exports()): fit(learn, 1)
    x = learn.dls.train_ds[0][0][None]
    for o in (*learn.copies, load_learner(tmp_path/'in_a_fit.pkl'), load_learner(tmp_path/'in_a_fit.pkl', cpu=False)):
        o.remove_cbs([cb for cb in o.cbs if isinstance(cb, Exports)])
        clean(o) if o.opt else None
        o.dls = learn.dls
        torch.testing.assert_close(o.model.to(x.device).eval()(x), learn.model.eval()(x))
        before = weights(o)
        fit(o, 1)
        assert o.get_preds()[0].isfinite().all() and not equal(before, weights(o)) and not hasattr(o.model, '__wrapped__')
        if hasattr(o, 'mixed_precision'): assert len(o.mixed_precision.history)>=4
        clean(o)

def test_what_a_fit_in_fp32_exports_needs_no_package(tmp_path, in_a_process):
    "Though it is imported"
    made = "from fastai.basics import *\nfrom fastai_amp16.all import *\n"
    fits = """
x = torch.randn(32, 8)
dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=8), DataLoader(list(zip(x, x[:,:1])), bs=8))
class Saves(Callback):
    def after_epoch(self):
        torch.save(self.learn.model, 'model.pt')
        torch.save({k: v for k,v in self.learn.__getstate__().items() if k!='cbs'}, 'learn.pt')
learn = Learner(dls, nn.Linear(8,1), MSELossFlat(), cbs=Saves())
with learn.no_bar(), learn.no_logging(): learn.fit(1)
"""
    in_a_process(made+fits, tmp_path)
    assert not any(b'fastai_amp16' in (tmp_path/o).read_bytes() for o in ('model.pt','learn.pt'))

def test_a_save_of_the_users_own_is_called(tmp_path):
    "One that `functools.wraps` has made look like fastai's"
    class Mine(Learner):
        @functools.wraps(Learner.save)
        def save(self, *args, **kwargs):
            self.saved = True
            return super().save(*args, **kwargs)
    learn = learner(path=tmp_path)
    learn.__class__ = Mine
    fit(learn.to_fp16_dynamic(), 1).save('x')
    assert learn.saved and 'scaler' in torch.load(tmp_path/'models/x.pth', weights_only=False)['opt']

use = '''
seen = set()
learn.model[0].register_forward_hook(lambda m,i,o: seen.add(o.dtype))
x = torch.randn(32, 8)
learn.dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=8), DataLoader(list(zip(x, x[:,:1])), bs=8))
with learn.no_bar():
    learn.get_preds()
    learn.fit(1)
assert torch.float16 in seen and len(learn.mixed_precision.history)>=4
'''

def test_whoever_brings_in_the_callback_finds_learners_prepared(tmp_path, in_a_process):
    "By unpickling one in a process that has imported fastai alone, or by importing nothing else"
    learn = learner(path=tmp_path).to_fp16_dynamic()
    for name,l in (('before',learn), ('after',fit(learn, 1))): torch.save(l, tmp_path/f'{name}.pkl')
    before = 'import torch\nfrom fastai.basics import *\nfrom fastai.callback.progress import ProgressCallback\n'
    for name in ('before','after'):
        in_a_process(f"import common\n{before}learn = load_learner('{name}.pkl', cpu=False)\n{use}", tmp_path)
    make = 'from fastai_amp16.callback import DynamicMixedPrecision\n' \
        'x = torch.randn(8, 8)\nlearn = Learner(DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=8)), ' \
        'nn.Sequential(nn.Linear(8,4), nn.Linear(4,1)), nn.MSELoss(), cbs=DynamicMixedPrecision())\n'
    in_a_process(before+make+use, tmp_path)

alone = '''
import sys
class Missing:
    def find_spec(self, name, *args):
        if name.startswith(('fastai_amp16','common')): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from fastai.basics import *
learn = load_learner('plain.pkl')
assert learn.model(torch.ones(2, 8)).shape==(2,1)
'''

@pytest.mark.parametrize('opt_func', [AdamW16, partial(RMSProp16, mom=0.5), ranger16], ids=['AdamW16','RMSProp16','ranger16'])
def test_an_export_needs_fastai_alone(opt_func, tmp_path, in_a_process):
    "Whatever of this package the learner has"
    learn = learner(nn.Linear(8,1), loss_func=nn.MSELoss(), opt_func=opt_func, path=tmp_path, metrics=GradNorm(), cbs=GradientNormClip())
    fit(learn.to_fp16_dynamic(), 1)
    learn.dls = DataLoaders.from_dsets(TfmdLists([0], [noop]), TfmdLists([0], [noop]), bs=8)
    learn.export('plain.pkl')
    in_a_process(alone, tmp_path)

def test_an_export_after_to_fp32_needs_nothing_of_this_package(tmp_path, in_a_process):
    learn = fit(learner(nn.Linear(8,1), loss_func=nn.MSELoss(), opt_func=Adam, path=tmp_path).to_fp16_dynamic(), 1)
    learn.dls = DataLoaders.from_dsets(TfmdLists([0], [noop]), TfmdLists([0], [noop]), bs=8)
    learn.to_fp32().export('plain.pkl')
    in_a_process(alone, tmp_path)

# %% checkpoints that are broken
def small(path, **kwargs): return learner(plain_mlp, path=path, shuffle=False, **kwargs)

def change(path, f):
    "Change the entry `opt` of the checkpoint 'a'"
    fn = path/'models/a.pth'
    saved = torch.load(fn, weights_only=False)
    f(saved['opt'])
    torch.save(saved, fn)

def part(*keys, to):
    "A function that puts `to` in place of a part of the entry `opt`"
    def f(o):
        for k in keys[:-1]: o = o[k]
        if to is None: o.pop(keys[-1])
        else: o[keys[-1]] = to
    return f

no_scale = [part('scaler', to=o) for o in ([1], 'a', 3, {'scale':2.})]
no_scale += [part('scaler', 'scale', to=o) for o in ('a', tensor(8.), 8j, True, math.nan, -1.)]
no_scale += [part('scaler', k, to='a') for k in ('growth_interval','_growth_tracker','backoff_factor','growth_factor',
                                                 '_target','_calm','_tolerance','proven')]
no_names = [part('healing', to=o) for o in ([1], 'a', 3, {})]
no_names += [part('healing', 'promoted', to=o) for o in (3, b'a', 'a', [3], [b'a'], [None])]
no_random = [part('random', to=o) for o in ([1], 'a', 3, {})]+[part('random', 'all', k, to=o)
             for k in ('random_state','numpy_state','torch_state','torch_cuda_state','torch_benchmark') for o in (None, 'a')]
no_random += [part('random', 'shuffling', to=(1,2)), part('random', 'all', to=None), part('random', 'ranks', to=3)]

@pytest.mark.parametrize('module,name', [(random,'setstate'), (np.random,'set_state'), (torch,'set_rng_state')],
                         ids=['python','numpy','torch'])
def test_random_states_are_checked_on_generators_of_their_own(module, name, monkeypatch, tmp_path):
    "Those in use belong to other threads as well"
    states = learner_random_states(small(tmp_path))
    def used(*args): raise AssertionError('sets a generator in use')
    monkeypatch.setattr(module, name, used)
    check_random_states(states)

@pytest.mark.parametrize('later', [False,True], ids=['before','after'])
@pytest.mark.parametrize('what,changes', [('its loss scale', no_scale), ('its list of what stays in fp32', no_names),
                                          ('its random state', no_random)], ids=['scale','names','random'])
def test_what_is_broken_in_a_checkpoint_is_left_out_and_named(tmp_path, what, changes, later):
    "Whether mixed precision was chosen before the load or after it; the rest is loaded, and one sentence says what is not"
    a = fit(small(tmp_path).to_fp16_dynamic(init_scale=2.**9), 1)
    a.mixed_precision.promoted = ['2']
    for f in changes:
        a.save('a')
        change(tmp_path, f)
        b = small(tmp_path)
        if not later: b.to_fp16_dynamic()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always')
            b.load('a')
            if later: b.to_fp16_dynamic()
        told = [o for o in told if issubclass(o.category, UserWarning)] # numpy has one of another kind for fastai's `load`
        text, = [str(o.message) for o in told]
        assert re.fullmatch(rf'The checkpoint was loaded without {what} \(.*\)\. The learner keeps its own instead; weights and '
                            r'optimizer were loaded\.', text), text
        assert told[0].filename==__file__
        mp = b.mixed_precision
        assert equal(state(a), state(b)) and b.opt.hypers==a.opt.hypers
        assert mp.scaler.get_scale()==(2.**16 if changes is no_scale else 2.**9)
        assert mp.promoted==([] if changes is no_names else ['2'])
        assert (mp.resumed is None)==(changes is no_random)
    fit(b, 1, start_epoch=0)

def test_all_that_is_broken_is_named_at_once(tmp_path):
    a = fit(small(tmp_path).to_fp16_dynamic(), 1)
    a.save('a')
    change(tmp_path, lambda o: o.update(scaler='a', healing='b', random='c'))
    with pytest.warns(PrecisionWarning) as told: small(tmp_path).to_fp16_dynamic().load('a')
    text, = [str(o.message) for o in told if issubclass(o.category, UserWarning)]
    assert all(o in text for o in ('its random state (',' and its loss scale (',' and its list of what stays in fp32 ('))

def test_modules_that_have_another_name_now_are_named(tmp_path):
    a = small(tmp_path).to_fp16_dynamic()
    a.mixed_precision.promoted = ['0','old','older.']
    a.create_opt()
    a.save('a')
    with pytest.warns(PrecisionWarning, match='the checkpoint names `old`, the code of `older`, and the model has no such module'):
        b = small(tmp_path).to_fp16_dynamic().load('a')
    assert b.mixed_precision.promoted==['0'] and 'old' not in repr(b.mixed_precision)

def test_what_a_checkpoint_without_an_optimizer_does_not_hold_is_not_taken_from_another_one(tmp_path):
    a = fit(small(tmp_path).to_fp16_dynamic(init_scale=2.**9), 1)
    a.save('a'), a.save('bare', with_opt=False)
    with pytest.warns(UserWarning, match='optimizer state'): b = small(tmp_path).load('a').load('bare')
    assert b.to_fp16_dynamic().mixed_precision.scaler.get_scale()==2**16

# %% saving beside a fit
class Beside(Callback):
    "Does the steps of a fit while `save` is about to write its file in another thread"
    def __init__(self, save): self.save = save
    def before_batch(self):
        if self.train_iter==1 and self.training:
            self.thread = threading.Thread(target=self.save)
            self.thread.start()
            assert reached.wait(60)
    def after_train(self):
        done.set()
        self.thread.join()

@pytest.mark.parametrize('to', ['to_fp32','to_fp16_dynamic'])
def test_a_save_in_a_thread_leaves_the_fit_alone(tmp_path, monkeypatch, to):
    def write(*args, f=torch.save, **kwargs):
        reached.set()
        assert done.wait(60)
        f(*args, **kwargs)
    global reached,done
    reached,done = threading.Event(),threading.Event()
    learn = getattr(small(tmp_path), to)()
    fit(learn, 1)
    monkeypatch.setattr(torch, 'save', write)
    with learn.added_cbs(Beside(partial(learn.save, 'a'))): fit(learn, 1)
    assert type(learn.opt) is type(vars(learn)['opt']) and not hasattr(learn.opt, 'learn')
    saved = torch.load(tmp_path/'models/a.pth', weights_only=False)['opt']
    assert ('scaler' in saved)==(to!='to_fp32')
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        b = small(tmp_path).load('a')
    assert equal(state(learn), state(b))

def test_a_learner_without_mixed_precision_saves_as_fastai_does(tmp_path):
    "By the optimizer itself"
    class Mine(Learner):
        def save(self, *args, **kwargs):
            self.seen = self.opt
            return super().save(*args, **kwargs)
    learn = small(tmp_path)
    learn.__class__ = Mine
    learn.create_opt()
    learn.save('a')
    assert learn.seen is learn.opt and {*torch.load(tmp_path/'models/a.pth', weights_only=False)['opt']}=={*learn.opt.state_dict()}

def test_methods_of_the_users_own_that_save_and_load(tmp_path):
    "They may replace the optimizer, use it, call `super`, and find the loss scale loaded"
    class Mine(Learner):
        def save(self, *args, **kwargs):
            opt,self.opt = self.opt,None
            super().save('bare')
            self.opt = opt
            return super().save(*args, **kwargs)
        def load(self, *args, **kwargs):
            res = super().load(*args, **kwargs)
            self.opt.zero_grad()
            self.scale = self.mixed_precision.scaler.get_scale()
            return res
    def new():
        learn = small(tmp_path)
        learn.__class__ = Mine
        return learn.to_fp16_dynamic()
    a = new().to_fp16_dynamic(init_scale=2.**9)
    fit(a, 1).save('a')
    b = new().load('a')
    assert type(b) is Mine and b.scale==2**9 and type(a.opt) is type(b.opt) and b.mixed_precision.learn is b
    assert set(torch.load(tmp_path/'models/bare.pth', weights_only=False))==set(state(a))
    fit(b, 1)

def test_the_optimizer_is_an_attribute_as_in_fastai(tmp_path):
    learn = small(tmp_path)
    assert learn.opt is None and 'opt' in vars(learn)
    learn.opt = 3
    del learn.opt
    assert not hasattr(learn, 'opt')
