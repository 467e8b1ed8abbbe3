"What a fit says of itself: a line, the progress bar, an event, numbers for TensorBoard and W&B, dicts, and the room of each layer"
import copy,gc,json,math,pickle,re,sys,weakref
from contextlib import nullcontext
from types import SimpleNamespace
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest,torch
from fastai.basics import (
    Callback,CancelBatchException,CancelFitException,DataLoader,DataLoaders,L,Learner,default_device,load_learner,nn,noop,set_seed)
from fastai.callback.all import GradientAccumulation,LRFinder
from fastai.callback.progress import ProgressCallback
from fastai_amp16.all import PrecisionReport
from fastai_amp16.diagnosis.diagnose import diagnose
from fastai_amp16.diagnosis.headroom import Headroom,least_room,plot_room
from fastai_amp16.train.history import StepRecord
from common import Do,Drop,Poison,between,both,clean,equal,fit,learner,mlp,mse,plain_mlp,state,times_and_back,weights
from overflows import bf16,fp16,hot
from test_diagnose import verdicts

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning') # those of overflows, which other files look at

overflows = between(Do(times_and_back))
coarse = between(Do(lambda x: (x+300)-300)) # in bf16, and so its predictions are wrong
def overflow_twice(): return nn.Sequential(nn.Linear(8,16), Do(times_and_back), nn.Linear(16,16), Do(times_and_back), nn.Linear(16,1))

def eventful(to=hot, model=overflows, at=(1,3), cbs=(), **kwargs):
    "The first batch runs again, at other loss scales and with a layer in fp32; those `at` cannot be used"
    return to(learner(model, cbs=[Poison(set(at), 'backward'), *L(cbs)], **kwargs))

def happened(learn, rows=None):
    "How many batches ran again, how many steps were skipped, and how many layers moved to fp32, by the history"
    mp = learn.mixed_precision
    df = mp.history if rows is None else mp.history[rows]
    return (df.reruns>0).sum(),df.skipped.sum(),sum(o in {*df.step} for o in mp.log.kept_since.values())

# %% one line at the end of a fit
line = re.compile(r'(fp16|bf16): (no|\d+) (batch|batches) ran again, (no|\d+) (step was|steps were) skipped'
                  r'(?:; (\d+) (layer|layers) moved to fp32: (.+?))?(?:; loss scale (.+))?\.')

def number(text): return 0 if text in (None,'no') else int(text)

def told(capsys, f, *args, **kwargs):
    "The lines about mixed precision that `f` prints"
    capsys.readouterr()
    f(*args, **kwargs)
    return [o for o in capsys.readouterr().out.splitlines() if 'ran again' in o or 'loss scale' in o or o.startswith(('fp16','bf16'))]

def fit_aloud(learn, n=2, lr=None):
    with learn.no_bar(): learn.fit(n, lr)

def says(learn, text):
    "What the line says is what happened in the fit, by the history"
    m = line.fullmatch(text)
    assert m, text
    mp = learn.mixed_precision
    of_last = mp.history.fit==mp.history.fit.max()
    reruns,skipped,moved = happened(learn, of_last)
    assert m[1]==mp.amp_mode.value
    assert (number(m[2]),number(m[4]),number(m[6]))==(reruns,skipped,moved)
    assert (m[3],m[5])==('batches' if reruns>1 else 'batch', 'steps were' if skipped>1 else 'step was')
    if moved: assert re.findall('`(.+?)`', m[8])==mp.promoted and m[7]==('layers' if moved>1 else 'layer')
    return m[9]

fits = {'ran again':(hot, plain_mlp, ()), 'one skipped':(fp16, plain_mlp, [2]), 'two skipped':(fp16, mlp, [1,3]),
        'moved':(fp16, overflows, ()), 'two moved':(fp16, overflow_twice, ()), 'all':(hot, overflows, [1,3]),
        'bf16':(bf16, plain_mlp, [1,3]), 'bf16 moved':(bf16, coarse, ()), 'ends early':(hot, plain_mlp, range(1,9))}

@pytest.mark.parametrize('to,model,at', fits.values(), ids=fits)
def test_a_fit_ends_with_a_line_on_what_happened(to, model, at, capsys):
    learn = eventful(to, model, at)
    text, = told(capsys, fit_aloud, learn)
    scale = says(learn, text)
    assert len(learn.mixed_precision.history)==(4 if len(at)>2 else 8) and any(happened(learn))
    if to is bf16: assert scale is None
    else: assert re.fullmatch(r'2\^-?\d+', scale) and 2.**int(scale[2:])==learn.mixed_precision.scaler.get_scale()

def test_another_loss_scale_is_told_as_a_number(capsys):
    learn = eventful(lambda o: fp16(o, init_scale=1000.), plain_mlp)
    text, = told(capsys, fit_aloud, learn)
    assert float(says(learn, text))==learn.mixed_precision.scaler.get_scale()==1000

@pytest.mark.parametrize('to', [fp16,bf16,Learner.to_fp32,Learner.to_fp16], ids=lambda o: o.__name__)
def test_nothing_is_told_of_a_fit_without_events(to, capsys): assert told(capsys, fit_aloud, to(learner()))==[]

def test_nothing_is_told_without_logging_in_lr_find_or_by_other_ranks(capsys, monkeypatch):
    learn = eventful()
    def quiet():
        with learn.no_logging(): fit_aloud(learn)
    def find():
        with learn.no_bar(): learn.lr_find(num_it=8, show_plot=False)
    assert told(capsys, quiet)==[] and all(happened(learn))
    learn = eventful()
    assert told(capsys, find)==[] and all(happened(learn))
    learn = eventful(cbs=LRFinder(num_it=8)) # `lr_find` itself turns logging off
    assert told(capsys, fit_aloud, learn)==[] and all(happened(learn))
    monkeypatch.setenv('RANK', '1')
    learn = eventful()
    assert told(capsys, fit_aloud, learn)==[] and all(happened(learn))

def test_each_fit_is_told_once_and_alone(capsys):
    "Four batches are a fit; `fine_tune` is two of them"
    learn = eventful(at=(1,9,12,13))
    lines = [told(capsys, fit_aloud, learn, 1) for _ in range(3)]
    assert [len(o) for o in lines]==[1,0,1]
    df = learn.mixed_precision.history
    assert number(line.fullmatch(lines[0][0])[6])==1 and df.skipped[df.fit==0].sum()==1
    assert line.fullmatch(lines[2][0]).groups()[1:7]==('1','batch','1','step was',None,None)
    with learn.no_bar(): lines = told(capsys, learn.fine_tune, 1, freeze_epochs=1)
    assert len(lines)==1 and number(line.fullmatch(lines[0])[4])==2

class Far(nn.Module):
    "Overflows in validations only"
    def forward(self, x): return x if self.training else times_and_back(x)

def test_what_moves_in_a_validation_is_told_by_the_fit_around_it(capsys):
    "Not by the next fit, nor by one after a validation alone"
    learn = learner(between(Far())).to_fp16_dynamic()
    (first,),then = (told(capsys, fit_aloud, learn, 1) for _ in range(2))
    assert line.fullmatch(first).groups()[1:8]==('no','batch','no','step was','1','layer','`1`') and then==[]
    learn = learner(overflows).to_fp16_dynamic()
    with learn.no_bar(): assert told(capsys, learn.validate)==told(capsys, fit_aloud, learn)==[]
    assert learn.mixed_precision.promoted==['1']

# %% the progress bar
class Comments(Callback):
    "What the bar says after each batch: as fastai's callback has written it, and at the end"
    order = ProgressCallback.order+1
    def before_fit(self): self.fastais,self.ends = [],[]
    def look(self): self.ends.append(self.progress.pbar.comment)
    def before_batch(self):
        if self.iter: self.look()
    def after_batch(self): self.fastais.append(self.progress.pbar.comment)
    def after_train(self): self.look()
    after_validate = after_train

def fit_with_bar(learn, n=1, cbs=()):
    learn.fit(n, cbs=[comments := Comments(), *cbs])
    assert all(re.fullmatch(r'\d+\.\d{4}', o) for o in comments.fastais) and len(comments.ends)==len(comments.fastais)==5*n
    return [end.removeprefix(before) for before,end in zip(comments.fastais, comments.ends)]

def in_words(reruns, skipped, moved):
    words = (reruns,'ran again'),(skipped,'skipped'),(moved,'moved to fp32')
    return ''.join(f', {n} {what}' for n,what in words if n)

def test_the_progress_bar_counts_what_happened_in_the_fit():
    "From the batch in which it happens on, also while the fit validates; and not in the next fit, in which nothing happens"
    learn = eventful(model=plain_mlp, to=fp16)
    df = (mp := learn.mixed_precision).history
    added = fit_with_bar(learn)
    df = mp.history
    assert added==[in_words((df.reruns[:i]>0).sum(), df.skipped[:i].sum(), 0) for i in (1,2,3,4,4)] and added[0]=='' and added[1]
    assert fit_with_bar(learn)==['']*5
    learn = eventful()
    assert fit_with_bar(learn)==[in_words(*happened(learn, slice(i))) for i in (1,2,3,4,4)] and happened(learn)[2]==1

def test_without_bar_or_logging_training_is_the_same():
    "And without logging the bar says what fastai's says"
    learns = [eventful() for _ in range(4)]
    learns[0].fit(1)
    with learns[1].no_bar(): learns[1].fit(1)
    with learns[2].no_logging(): assert fit_with_bar(learns[2])==['']*5
    fit(learns[3], 1)
    for o in learns[1:]: assert equal(state(learns[0]), state(o)) and happened(o)==happened(learns[0])

# %% the event
class Hears(Callback):
    "Notes each change, and the events around it"
    order = 3
    def __init__(self, stop_at=None): self.stop_at,self.events,self.changes = stop_at,[],[]
    def before_batch(self): self.events.append('before_batch')
    def after_batch(self): self.events.append('after_batch')
    def after_precision_change(self):
        change = self.learn.mixed_precision.change
        self.events.append('change')
        self.changes.append((self.train_iter,change))
        df = self.learn.mixed_precision.history
        if change.row is not None: assert change.row._asdict()=={k: df[k].iloc[-1] for k in StepRecord._fields}
        if self.train_iter==self.stop_at: raise CancelFitException

def changed(df): return df.step[(df.reruns>0) | df.skipped].tolist()

def hears_all(learn, changes):
    "Each change once, with all reports and layers"
    mp = learn.mixed_precision
    assert [o for _,c in changes for o in c.reports]==mp.reports and [o for _,c in changes for o in c.promoted]==mp.promoted

@pytest.mark.parametrize('to', [hot,bf16], ids=['fp16','bf16'])
def test_a_callback_hears_of_each_batch_in_which_something_changed(to):
    "Once, after its step and before `after_batch`"
    learn = eventful(to, at=(1,2,5), cbs=(hears := Hears()))
    fit(learn)
    mp = learn.mixed_precision
    assert [i for i,_ in hears.changes]==changed(mp.history)==([0]*(to is hot)+[1,2,5])
    assert [c.row for _,c in hears.changes]==[mp.log.steps[i] for i in changed(mp.history)] and mp.change is hears.changes[-1][1]
    hears_all(learn, hears.changes)
    assert len(mp.promoted)==(to is hot) and mp.reports
    at = [i for i,o in enumerate(hears.events) if o=='change']
    assert all(hears.events[i-1:i+2]==['before_batch','change','after_batch'] for i in at)

def test_a_function_hears_the_same_as_a_method():
    heard = []
    def hear(cb): heard.append((cb.learn.train_iter,cb.learn.mixed_precision.change))
    fit(eventful(cbs=[Callback(after_precision_change=hear), hears := Hears(), silent := Callback(after_batch=noop)]))
    assert heard==hears.changes and heard and not hasattr(silent, 'after_precision_change')

def test_the_batch_that_ends_a_fit_is_heard():
    "As the last one of several in a row that nothing can use"
    learn = fit(eventful(at=range(1,9), cbs=(hears := Hears())))
    mp = learn.mixed_precision
    assert [i for i,_ in hears.changes]==changed(mp.history)==[*range(4)] and mp.stopped and hears.changes[-1][1].row.skipped
    hears_all(learn, hears.changes)

def test_of_accumulated_batches_the_last_one_is_heard():
    "In which the step ends"
    learn = fit(hot(learner(plain_mlp, cbs=[GradientAccumulation(32), hears := Hears(), Poison({5}, 'backward')])))
    df = learn.mixed_precision.history
    assert len(df)==4 and [i for i,_ in hears.changes]==[2*i+1 for i in changed(df)]==[1,5]
    hears_all(learn, hears.changes)

@pytest.mark.parametrize('look', [Learner.validate,Learner.get_preds], ids=['validate','get_preds'])
def test_a_layer_that_moves_in_a_validation_is_heard_without_a_step(look):
    learn = learner(overflows, cbs=(hears := Hears())).to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(): look(learn)
    (_,change), = hears.changes
    assert change.row is None and change.promoted==['1'] and len(learn.mixed_precision.history)==0
    hears_all(learn, hears.changes)
    assert hears.events.index('change')<hears.events.index('after_batch')

def test_a_validation_in_a_fit_is_heard_without_a_step():
    learn = fit(learner(between(Far()), cbs=(hears := Hears())).to_fp16_dynamic(), 1)
    (_,change), = hears.changes
    df = learn.mixed_precision.history
    assert change.row is None and change.promoted==['1'] and len(df)==4 and not changed(df)

def test_the_event_can_end_the_fit(capsys):
    "As fastai's events can: `after_fit` follows, the line is told, and the next fit is an ordinary one"
    learn = eventful(at=(1,2,5), cbs=(hears := Hears(stop_at=2)))
    text, = told(capsys, fit_aloud, learn)
    mp = learn.mixed_precision
    assert says(learn, text) and len(mp.history)==3 and hears.events[-1]=='change' and mp.plan is None
    clean(learn)
    learn.remove_cb(hears)
    fit(learn, 1)
    assert len(mp.history)==7 and mp.log.ending=='complete'

@pytest.mark.parametrize('make', [eventful, lambda cbs: fp16(learner(cbs=cbs)), lambda cbs: learner(cbs=cbs)],
                         ids=['eventful','eventless','fp32'])
def test_who_hears_changes_nothing(make):
    "Bit for bit; where nothing happens, and in plain fp32, there is nothing to hear"
    plain,learn = fit(make(cbs=[])),fit(make(cbs=(hears := Hears())))
    assert equal(state(plain), state(learn)) and bool(hears.changes)==(make is eventful)

# %% TensorBoard and W&B
def expected(learn):
    "What is logged of each step, by the history"
    mp = learn.mixed_precision
    df = mp.history
    since = [mp.log.kept_since[o] for o in mp.promoted]
    promoted = [sum(o<=i for o in since) for i in df.step]
    return dict(loss_scale=df.loss_scale.tolist(), reruns=df.reruns.tolist(), skipped=df.skipped.astype(int).tolist(),
                grad_norm=df.grad_norm.tolist(), promoted=promoted)

def logged_by_tensorboard(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(path), size_guidance={'scalars':0}).Reload()
    return {o: [(e.step,e.value) for e in events.Scalars(o)] for o in events.Tags()['scalars']}

@pytest.mark.parametrize('accumulates', [1,2], ids=['','accumulated'])
def test_tensorboard_has_the_history(accumulates, tmp_path):
    "At the steps at which fastai logs the loss of the same batches"
    from fastai.callback.tensorboard import TensorBoardCallback
    board = TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learn = fit(eventful(cbs=[board, GradientAccumulation(16*accumulates)]))
    logged = logged_by_tensorboard(tmp_path)
    batches = sorted({i for i,_ in logged['train_loss']})
    assert batches==[*range(1,9)] and len(learn.mixed_precision.history)==8//accumulates
    for name,values in expected(learn).items():
        steps,numbers = zip(*logged[f'mixed_precision/{name}'])
        assert [*steps]==batches[accumulates-1::accumulates] and [*numbers]==pytest.approx(values, rel=1e-6), name
    assert {o for o in logged if o.startswith('mixed_precision/')}=={f'mixed_precision/{o}' for o in expected(learn)}
    find_lr(learn)
    assert logged_by_tensorboard(tmp_path)==logged and board.run

def find_lr(learn):
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=5, show_plot=False)
    assert learn.mixed_precision.history.kind.iloc[-1]=='lr_find'

def test_lr_find_before_any_fit_logs_nothing(tmp_path, wandb):
    from fastai.callback.tensorboard import TensorBoardCallback
    find_lr(eventful(cbs=TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)))
    find_lr(eventful(cbs=wandb.callback()))
    assert not [*tmp_path.iterdir()] and not [o for o,_ in wandb.logged if o]

@pytest.fixture
def wandb(monkeypatch):
    "In place of the package: notes what is logged in which step; with fastai's own callback"
    logged = []
    def log(numbers, step=None): logged.append((numbers,step))
    run,config = SimpleNamespace(step=5, summary={'epoch':0}),SimpleNamespace(update=lambda *args, **kwargs: None)
    fake = SimpleNamespace(run=run, config=config, log=log)
    for o in ('wandb','fastai.callback.wandb'): monkeypatch.setitem(sys.modules, o, fake)
    monkeypatch.delitem(sys.modules, 'fastai.callback.wandb') # it imports the one that is there
    monkeypatch.setattr(Learner, 'gather_args', None, raising=False) # its import patches that
    from fastai.callback.wandb import WandbCallback
    monkeypatch.setattr(Learner, 'gather_args', lambda self: {}) # which takes data sets for objects with attributes
    return SimpleNamespace(logged=logged, callback=lambda: WandbCallback(log_preds=False))

@pytest.mark.parametrize('accumulates', [1,2], ids=['','accumulated'])
def test_wandb_has_the_history(accumulates, wandb):
    "In the steps in which fastai logs the loss of the same batches"
    class Losses(Callback):
        order,run_valid = 99,False
        def before_fit(self): self.all = []
        def after_batch(self): self.all.append(self.loss.clone())
    learn = fit(eventful(cbs=[wandb.callback(), losses := Losses(), GradientAccumulation(16*accumulates)]))
    steps = [step for numbers,step in wandb.logged if numbers]
    assert steps==sorted(steps) # wandb leaves out what is of an earlier step
    at = {}
    for numbers,step in wandb.logged: at.setdefault(step, {}).update(numbers)
    batches = [step for step,numbers in at.items() if 'raw_loss' in numbers]
    assert batches==[*range(5,13)] and torch.stack([at[i]['raw_loss'] for i in batches]).equal(torch.stack(losses.all))
    ours = [i for i in at if 'mixed_precision/reruns' in at[i]]
    assert ours==batches[accumulates-1::accumulates]
    for name,values in expected(learn).items(): assert [at[i][f'mixed_precision/{name}'] for i in ours]==values
    n = len(wandb.logged)
    find_lr(learn)
    assert not [o for o,_ in wandb.logged[n:] if o]

# %% dicts
def as_json(o):
    "What comes out of JSON, in which there is no NaN and no infinity"
    res = json.loads(json.dumps(o, allow_nan=False))
    assert res==o # plain values only
    return res

def is_finite(o): return not isinstance(o, float) or math.isfinite(o)

def same_report(d, r):
    "The dict `d` has the values of the report `r`"
    names = {'module':'producer', 'operation':'op', 'kept':'promoted'}
    same = 'verdict sentence module operation kept scale new_scale samples done remedy hint'.split()
    assert {*d}=={*same, 'dtype', 'table'}
    for k in same: assert d[k]==getattr(r, names.get(k, k)), k
    assert getattr(torch, d['dtype']) is r.dtype and len(d['table'])==len(r.table)
    for row,(_,values) in zip(d['table'], r.table.iterrows()):
        assert [*row]==[*r.table.columns]
        for k,v in values.items(): assert row[k] is None if v is None or not is_finite(v) else row[k]==v, k

@pytest.mark.parametrize('name', verdicts)
def test_a_report_as_a_dict(name):
    r = diagnose(verdicts[name][0]())
    same_report(as_json(r.to_dict()), r)
    assert r.verdict==verdicts[name][1] and len(r.table)

def test_numbers_that_json_has_not_become_none():
    df = pd.DataFrame([dict(module='a', output=math.inf, bits=-math.inf, lost=math.nan, nonfinite=True, order=np.int64(3))])
    row, = as_json(PrecisionReport('data', 'No.', table=df).to_dict())['table']
    assert row==dict(module='a', output=None, bits=None, lost=None, nonfinite=True, order=3)
    assert as_json(PrecisionReport('data', 'No.').to_dict())['table']==[]

@pytest.mark.parametrize('to', [hot,bf16], ids=['fp16','bf16'])
def test_mixed_precision_as_a_dict(to):
    "Before a fit and after it; with what was kept in fp32 from the start"
    learn = eventful(lambda o: to(o, keep_fp32=['2']))
    mp = learn.mixed_precision
    def same():
        d,df = as_json(mp.to_dict()),mp.history
        assert (d['precision'],d['steps'],d['reruns'],d['skipped'])==(mp.amp_mode.value,len(df),(df.reruns>0).sum(),df.skipped.sum())
        assert d['loss_scale']==(None if to is bf16 else mp.scaler.get_scale())
        assert len(d['reports'])==len(mp.reports) and d['kept']=={'2':None, **{o: mp.log.kept_since[o] for o in mp.promoted}}
        for o,r in zip(d['reports'], mp.reports): same_report(o, r)
        return d
    assert same()['last_fit']=='none'
    fit(learn)
    assert same()['last_fit']=='complete' and mp.reports and mp.n_skipped==2 and bool(mp.promoted)==(to is hot)
    learn = fit(eventful(to, at=range(1,9)))
    assert as_json(learn.mixed_precision.to_dict())['last_fit']==learn.mixed_precision.stopped

def test_entries_that_are_no_names_have_names_in_the_dict():
    mp = learner().to_fp16_dynamic(keep_fp32=[nn.Linear]).mixed_precision
    assert as_json(mp.to_dict())['kept']=={'0':None, '3':None}

# %% headroom
class Twice(nn.Sequential):
    "A container that computes something itself"
    def forward(self, x): return 2*super().forward(x)

def nested(): return nn.Sequential(nn.Linear(8,16), nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.ReLU()), Twice(nn.Linear(16,16)),
                                   nn.Sequential(nn.Tanh()), nn.Linear(16,1))
hands_on = '','1','3' # these of its modules return what a module in them returns

compared = [0,7,39]
def long(to, model=nested, cbs=(), n=41, **kwargs): return to(learner(model, n=16*n, cbs=cbs, **kwargs))

class Reference(Callback):
    "What plain PyTorch computes of each batch in fp32, by a copy of the model, and the gradients of each step"
    order,run_valid = 99,False
    def before_fit(self): self.largest,self.rms = [],[]
    def before_batch(self):
        model,seen = copy.deepcopy(self.learn.model),{}
        for name,m in model.named_modules():
            m.register_forward_hook(lambda m, args, out, name=name: seen.update({name: out.abs().max().item()}))
        with torch.no_grad(): model(*self.xb)
        self.largest.append(seen)
    def before_step(self):
        def rms(m):
            grad = max(m.parameters(recurse=False), key=torch.numel).grad
            return grad.double().square().mean().sqrt().item()
        self.rms.append({n: rms(m) for n,m in self.model.named_modules() if [*m.parameters(recurse=False)]})

@both
def test_room_is_what_plain_pytorch_finds_in_fp32(to, dtype):
    learn = fit(long(getattr(Learner, to), cbs=(reference := Reference())), 1)
    df = learn.mixed_precision.headroom
    assert df.step.drop_duplicates().tolist()==compared and not df.in_fp32.any()
    assert not df.duplicated(['step','module']).any()
    for step,rows in df.groupby('step'):
        true = {k: v for k,v in reference.largest[step].items() if k not in hands_on}
        found = dict(zip(rows.module, rows.largest))
        assert found==pytest.approx(true, rel=1e-5) and len(found)==8
        assert dict(zip(rows.module, rows.bits))==pytest.approx({k: math.log2(torch.finfo(dtype).max/v) for k,v in true.items()}, rel=1e-5)

@pytest.mark.parametrize('k', [1.,1e-4,1e-6,1e-14])
def test_lost_bits_are_what_plain_computation_from_the_gradients_gives(k):
    "Below 2**-14, a number loses one bit with each power of 2, and it has 10 of them; none can be seen where all gradients are 0"
    learn = fit(long(lambda o: fp16(o, init_scale=4.), plain_mlp, loss_func=lambda p,t: k*mse(p, t), cbs=(reference := Reference())), 1)
    mp = learn.mixed_precision
    df = mp.headroom.set_index(['step','module']).lost
    assert df.loc[:,'2'].isna().all() # it has no weights
    for step in compared:
        for name,rms in reference.rms[step].items():
            bits = math.log2(2**-14/(rms*mp.history.loss_scale[step])) if rms else math.nan
            assert df[step,name]==pytest.approx(min(max(bits, 0), 10), abs=1e-3, nan_ok=True)
    lost = df.dropna()
    assert {1.:(lost==0).all(), 1e-4:lost.between(1, 9).any(), 1e-6:(lost>9).all(), 1e-14:lost.empty}[k]

def test_the_loss_scale_is_that_of_the_attempt_that_counts():
    learn = fit(hot(learner(plain_mlp, cbs=(reference := Reference()))), 1)
    df,history = learn.mixed_precision.headroom,learn.mixed_precision.history
    assert history.reruns[0] and df.step.tolist()==[0]*3 and not df.module.duplicated().any()
    assert df.largest.tolist()==pytest.approx([reference.largest[0][o] for o in df.module], rel=1e-5)

def test_what_is_kept_in_fp32_is_marked():
    "From the start, and as it moves; its gradients lose nothing"
    learn = fit(long(lambda o: fp16(o, keep_fp32=['4']), overflow_twice), 1)
    df = learn.mixed_precision.headroom
    kept = {'4',*learn.mixed_precision.promoted}
    assert {*df.module[df.in_fp32]}==kept=={'1','3','4'} and not df.in_fp32[~df.module.isin(kept)].any()
    assert df.lost[df.in_fp32].isna().all() and df.lost[df.module.isin(['0','2'])].notna().all()

def ignored(monkeypatch): monkeypatch.setattr(Headroom, 'watch', lambda self, entry: nullcontext())

def dropping(): return between(Drop(0.2), nn.BatchNorm1d(16), nn.Sequential(nn.ReLU(inplace=True)))()

@pytest.mark.parametrize('make', [lambda: long(fp16, dropping), lambda: long(bf16, dropping), lambda: eventful(at=(1,3,8))],
                         ids=['fp16','bf16','eventful'])
def test_training_is_the_same_where_nothing_is_noted(make, monkeypatch):
    "Bit for bit"
    def run():
        learn = fit(make(), 1)
        return learn,torch.get_rng_state()
    noted,draws = run()
    ignored(monkeypatch)
    plain,their_draws = run()
    mp,theirs = noted.mixed_precision,plain.mixed_precision
    assert equal(state(noted), state(plain)) and torch.equal(draws, their_draws) and mp.history.equals(theirs.history)
    assert len(mp.headroom) and not len(theirs.headroom)

def test_a_batch_that_is_cancelled_is_not_noted():
    "Nor with the gradients of the next one"
    class Cancels(Callback):
        def after_pred(self):
            if self.training and self.train_iter==compared[1]: raise CancelBatchException
    df = fit(long(fp16, plain_mlp, cbs=Cancels()), 1).mixed_precision.headroom
    assert df.step.drop_duplicates().tolist()==[compared[0],compared[2]]

def test_a_validation_within_a_step_takes_nothing_away():
    "An epoch ends between two accumulated batches, of which the first is compared"
    df = fit(long(fp16, plain_mlp, n=15, cbs=GradientAccumulation(32)), 2).mixed_precision.headroom
    assert df.step.drop_duplicates().tolist()==compared[:2]

class CountReads:
    "How often the host asks a tensor for its numbers, by the end of each batch"
    def __init__(self, monkeypatch):
        self.n = 0
        for name in 'item tolist __bool__ __int__ __float__ numpy'.split(): monkeypatch.setattr(torch.Tensor, name, self.counted(name))
    def counted(self, name):
        f = getattr(torch.Tensor, name)
        def count(t, *args, **kwargs):
            self.n += t.device.type==default_device().type
            return f(t, *args, **kwargs)
        return count
    def of(self, learn):
        reads = []
        def note(cb):
            if cb.training: reads.append(self.n)
        fit(learn, 1, cbs=Callback(after_batch=note))
        return np.diff(reads).tolist()

def on_device(learn):
    notes = learn.mixed_precision.comparison.headroom.notes
    return [isinstance(ts, torch.Tensor) for o in notes for ts in (o.ends,o.norms)]

@pytest.mark.parametrize('to', [fp16,bf16], ids=['fp16','bf16'])
def test_nothing_is_read_from_the_device_before_the_end(to, monkeypatch):
    "As many reads in each batch as where nothing is noted, and no more than plain fp32's and one in those that are not compared"
    at_end = []
    class Look(Callback):
        def after_epoch(self): at_end.extend(on_device(self.learn))
    with monkeypatch.context() as patch:
        reads = CountReads(patch).of(learn := to(learner(n=16*16, cbs=Look())))
    assert at_end==[True]*4 and on_device(learn)==[False]*4 and len(learn.mixed_precision.headroom)
    with monkeypatch.context() as patch: fp32 = CountReads(patch).of(learner(n=16*16))
    ignored(monkeypatch)
    assert reads==CountReads(monkeypatch).of(to(learner(n=16*16)))
    assert [n for i,n in enumerate(reads, 1) if i not in compared]==[n+1 for i,n in enumerate(fp32, 1) if i not in compared]

def test_the_room_goes_with_copies_of_a_learner(tmp_path):
    "By `deepcopy` and pickle; an export leaves mixed precision out, and predicts as before"
    learn = fit(long(fp16, n=9), 1)
    df = learn.mixed_precision.headroom
    for o in (copy.deepcopy(learn),pickle.loads(pickle.dumps(learn))):
        assert o.mixed_precision.headroom.equals(df)
        fit(o, 1)
        now = o.mixed_precision.headroom
        assert now[:len(df)].equals(df) and now.step.drop_duplicates().tolist()==[0,7,9,16] and {*now.module}=={*df.module}
    assert learn.mixed_precision.headroom.equals(df)
    learn.export(tmp_path/'learn.pkl')
    exported = load_learner(tmp_path/'learn.pkl', cpu=False)
    assert equal(weights(exported), weights(learn)) and not hasattr(exported, 'mixed_precision')

def test_a_model_that_is_replaced_is_free():
    "Its room stays known"
    learn = fit(learner().to_fp16_dynamic(), 1)
    df,model = learn.mixed_precision.headroom,weakref.ref(learn.model)
    learn.model = mlp()
    learn.create_opt()
    gc.collect()
    assert model() is None and learn.mixed_precision.headroom.equals(df) and len(df)

def test_the_room_can_be_read_in_a_fit():
    "In any event of a batch, which changes nothing"
    class Reads(Callback):
        run_valid = False
        def read(self): self.n = len(self.learn.mixed_precision.headroom)
        before_batch = after_pred = after_loss = before_step = after_step = after_batch = read
    learn,plain = fit(long(fp16, cbs=(reads := Reads()), n=9), 1),fit(long(fp16, n=9), 1)
    df = plain.mixed_precision.headroom
    assert learn.mixed_precision.headroom.equals(df) and reads.n==len(df)

@pytest.mark.parametrize('where', ['forward','backward'])
@pytest.mark.parametrize('at', [{0},{7},{0,7}], ids=str)
def test_of_a_skipped_step_nothing_is_noted(at, where):
    "Neither under its own number nor under that of the next one"
    learn = fit(long(fp16, cbs=[Poison(at, where), reference := Reference()], n=12), 1)
    df,history = learn.mixed_precision.headroom,learn.mixed_precision.history
    assert history.step[history.skipped].tolist()==sorted(at)
    assert not history.skipped[df.step.unique()].any()
    for step,rows in df.groupby('step'): # what there is, is of its own batch
        assert dict(zip(rows.module, rows.largest))==pytest.approx({k: reference.largest[step][k] for k in rows.module}, rel=1e-5)

def test_nothing_is_noted_of_a_fit_that_ended_within_a_step():
    "Even where the next fit compares nothing"
    class Ends(Callback):
        def after_pred(self): raise CancelFitException
    learn = learner().to_fp16_dynamic()
    fit(learn, 1, cbs=Ends())
    assert not len(learn.mixed_precision.headroom) and not learn.mixed_precision.comparison.headroom.ends

class Grows(nn.Module):
    "Multiplies by more in each step, up or down, and `Shrinks` divides by it"
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.register_buffer('n', torch.zeros(()))
    @property
    def factor(self): return 2**(self.rate*self.n)
    def forward(self, x):
        if self.training: self.n += 1
        return x*self.factor

def growing(rate):
    grows = Grows(rate)
    return nn.Sequential(nn.Linear(8,16), grows, Do(lambda x: x/grows.factor), nn.Linear(16,1))

times = r"(?:between steps|from step) (\d+)(?: and (\d+)| on)"
forecast = re.compile(r"next to overflow: `(.+)`, ([\d.]+) bits at step (\d+), ([\d.]+) at step (\d+):\nat this rate "+times)

def titles(mp):
    "What the picture said when each step was noted, by step"
    df,history = mp.headroom,mp.history
    return {step: least_room(df[df.step<=step], history[:step+1]) for step in dict.fromkeys(df.step)}

@pytest.mark.parametrize('first', [[], [Do(lambda x: x*3e3),Do(lambda x: x/3e3)]], ids=['','after a layer with less room'])
def test_a_forecast_comes_true(first):
    "A layer grows by a constant factor a step; it moves to fp32 about when the forecast of an earlier step says"
    model = nn.Sequential(*first, *growing(0.2))
    name = str(len(first)+1)
    learn = fit(long(fp16, model, n=110), 1)
    mp = learn.mixed_precision
    moved = mp.log.kept_since[name]
    assert mp.promoted==[name] and 39<moved<103
    df,history = mp.headroom,mp.history
    said = forecast.fullmatch(titles(mp)[39])
    assert said and said[1]==name and (int(said[3]),int(said[5]))==(39,7)
    bits = df[df.module==name].set_index('step').bits
    assert (float(said[2]),float(said[4]))==pytest.approx((bits[39],bits[7]), abs=0.06)
    assert 0.85*moved<=int(said[6])<=1.15*moved # at a constant factor, it is the first of the steps
    assert said[7] is None or moved<=int(said[7])
    assert df.in_fp32[(df.module==name) & (df.step==103)].all() and f'`{name}`' not in titles(mp)[103] # in fp32 it has room
    made = pd.concat([history[:40], history[40:41].loc[[40]*(moved-30)]], ignore_index=True) # what was made is no forecast
    assert int(forecast.fullmatch(least_room(df[df.step<=39], made))[6])==len(made)

def test_a_layer_that_began_with_zeros_hides_no_forecast():
    "As where a residual branch starts with weights of 0: its room was infinite, and is ample"
    history = pd.DataFrame(dict(step=range(40), fit=0, kind='fit'))
    rows = [(step,name,1.,bits,0.,False) for step,*both in ((7,math.inf,12.), (39,15.,4.)) for name,bits in zip(('branch','head'), both)]
    df = pd.DataFrame(rows, columns=['step','module','largest','bits','lost','in_fp32'])
    said = least_room(df, history)
    assert forecast.fullmatch(said)[1]=='head' and said==least_room(df[df.module=='head'], history)

@pytest.mark.parametrize('seed', range(3))
def test_noise_is_no_growth(seed):
    "From batch to batch, the largest numbers differ by some bits, also at the beginning of a fit"
    set_seed(seed)
    x = torch.distributions.StudentT(3.).sample((640, 8))
    learn = learner(mlp, n=640).to_fp16_dynamic()
    learn.dls = DataLoaders(*[DataLoader([*zip(x, x[:,:1])], bs=32, shuffle=True) for _ in range(2)], device=default_device())
    learn.loss_func = nn.functional.mse_loss
    for _ in range(6): fit(learn, 1, 1e-3)
    said = titles(learn.mixed_precision)
    assert len(said)==12 and all(o.startswith('least room') for o in said.values())

def test_what_grows_in_a_search_for_a_learning_rate_is_no_forecast():
    "Its weights are gone"
    model = growing(0.2)
    learn = long(fp16, model, n=110)
    with learn.no_bar(): learn.lr_find(show_plot=False, num_it=60, stop_div=False)
    mp = learn.mixed_precision
    assert 39 in {*mp.headroom.step} and all(o.startswith('least room') for o in titles(mp).values())

def test_an_overflow_that_does_no_harm_is_no_layer_in_fp32():
    "A tanh bounds it; it is not what has the least room"
    learn = fit(long(fp16, nn.Sequential(nn.Linear(8, 16), Do(lambda x: x*1e6), nn.Tanh(), nn.Linear(16, 1))), 1)
    df = learn.mixed_precision.headroom
    assert not learn.mixed_precision.promoted and (df.bits[df.module=='1']<0).all()
    assert not df.in_fp32.any() and '`1`' not in least_room(df, learn.mixed_precision.history)

@pytest.mark.parametrize('rate', [0.,-0.1])
def test_no_forecast_where_the_room_does_not_shrink(rate):
    learn = fit(long(fp16, growing(rate), lr=0.), 1)
    df,history = learn.mixed_precision.headroom,learn.mixed_precision.history
    df = df[df.module=='1'] # the others' room changes with the batch
    if rate==0: df = pd.concat([df[df.step==0], df[df.step==0].assign(step=7)], ignore_index=True)
    assert least_room(df, history).startswith('least room: `1`') and 'overflow' not in least_room(df[df.step==0], history)
    assert least_room(df.assign(in_fp32=True), history)==least_room(df[:0], history)==''

def test_a_plot_of_the_room():
    "What it draws is what the table and the history say"
    learn = fit(long(hot, overflows, cbs=Poison({2,40}, 'backward')), 1)
    mp = learn.mixed_precision
    df,history = mp.headroom,mp.history
    events,above,below = axs = mp.plot_headroom()
    assert events.get_title()==least_room(df, history)
    drawn = dict(zip([o.get_text() for o in events.get_yticklabels()], [o.get_xdata() for o in events.lines]))
    assert [len(drawn[o]) for o in ('ran again','layers moved to fp32')]==[(history.reruns>0).sum(),1]
    assert len(drawn['loss scale fell'])==(history.loss_scale.diff()<0).sum()
    columns = above.get_xticks()
    again = dict(zip(history.step[history.reruns>0], drawn['ran again'])) # where, between the columns and after the last one
    assert again[0]==columns[0]<again[2]<columns[1] and again[40]>columns[-1]
    mesh, = above.collections
    bits = df.pivot(index='module', columns='step', values='bits')
    assert (mesh.get_array().reshape(bits.shape)==bits.values).all() and [o.get_text() for o in above.get_yticklabels()]==[*bits.index]
    assert [o.get_text() for o in below.get_xticklabels()]==[str(o) for o in compared]
    dots, = above.lines
    assert [int(o) for o in dots.get_ydata()]==[1]*3 # the layer in fp32
    axs[0].figure.canvas.draw()
    _,mine = plt.subplots(3, 1)
    assert mp.plot_headroom(axs=mine) is mine and mine[0].get_title() and mine[1].collections
    plt.close('all')

def test_a_plot_of_gradients_that_lose_bits():
    learn = fit(long(lambda o: fp16(o, init_scale=1.), plain_mlp, loss_func=lambda p,t: 1e-4*mse(p, t), n=9), 1)
    df = learn.mixed_precision.headroom
    _,_,below = learn.mixed_precision.plot_headroom()
    lost = df[df.module.isin(df.module[df.lost>0])].pivot(index='module', columns='step', values='lost')
    mesh, = below.collections
    assert len(lost) and (mesh.get_array().reshape(lost.shape)==lost.values).all()
    plt.close('all')

def test_a_plot_of_many_steps_and_layers_can_be_read():
    steps = range(0, 600, 10)
    history = fit(long(fp16, plain_mlp, n=41), 1).mixed_precision.history
    history = pd.concat([history]*15, ignore_index=True).assign(step=range(615))
    df = pd.DataFrame([(s,f'm{i}',1.,5+i/100,i/100,False) for s in steps for i in range(100)],
                      columns=['step','module','largest','bits','lost','in_fp32'])
    _,above,below = plot_room(df, history)
    rows = [[o.get_text() for o in ax.get_yticklabels()] for ax in (above,below)]
    assert rows==[[f'm{i}' for i in range(40)],[f'm{i}' for i in range(60, 100)]] # the least room, and the most bits lost
    labels = [o.get_text() for o in below.get_xticklabels()]
    assert 8<=len(labels)<=12 and all(int(o)/10==x-.5 for o,x in zip(labels, below.get_xticks()))
    plt.close('all')

def test_without_comparisons_it_says_so(capsys):
    learn = fit(learner().to_fp16_dynamic(rerun=False), 1)
    assert learn.mixed_precision.plot_headroom() is None and 'because of rerun=False' in capsys.readouterr().out

def test_what_was_seen_can_be_drawn_after_to_fp32():
    learn = fit(long(fp16, plain_mlp, n=9), 1)
    mp = learn.mixed_precision
    learn.to_fp32()
    mp.plot()
    assert len(mp.plot_headroom())==3
    plt.close('all')

@pytest.mark.parametrize('of', [lambda: learner().to_fp16_dynamic(), lambda: learner().to_fp16_dynamic(keep_fp32=[nn.Module])],
                         ids=['before a fit','all in fp32'])
def test_without_a_comparison_there_is_nothing_to_draw(of, capsys):
    learn,drawn = of(),plt.get_fignums()
    mp = learn.mixed_precision
    if mp.keep_fp32: fit(learn, 1)
    assert mp.plot_headroom() is None and 'No step was compared' in capsys.readouterr().out
    assert [*mp.headroom.columns]==['step','module','largest','bits','lost','in_fp32'] and not len(mp.headroom)
    assert plt.get_fignums()==drawn
