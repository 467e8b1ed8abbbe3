"A row for each step: as a table, a picture and columns of the training log"
import math,threading,warnings
import matplotlib.pyplot as plt
import pytest,torch
from fastai.basics import Callback
from fastai_amp16.all import GradNorm,GradientNormClip,LossScale,PrecisionWarning,SkippedSteps
from fastai_amp16.optim import clip as clip_module
from fastai_amp16.train.history import History,plot_history
from common import Poison,fit,learner

def test_steps_are_counted():
    log = History()
    rows = (2.**16,5,False,1.),(2.**16,0,False,2.),(2.**16,1,True,math.inf),(2.**15,0,True,math.nan),(2.**15,2,False,3.)
    for row in rows: log.add(*row)
    assert (log.n_rerun,log.n_skipped)==(8,2)
    df = log.frame()
    assert list(df.columns)==['step','fit','kind','epoch','lr','loss_scale','reruns','skipped','grad_norm']
    assert df.step.tolist()==[*range(5)] and df.skipped.dtype==bool
    assert df.reruns.tolist()==[5,0,1,0,2] and len(History().frame())==0 and History().frame().skipped.dtype==bool

def test_fp32_comes_first_after_three_diagnoses_that_found_nothing():
    "Until one helps"
    log = History()
    def diagnosed(helped):
        log.add_diagnosis(helped)
        return log.fp32_first
    assert [diagnosed(o) for o in (False,False,True,False,False,False,False,True,False)]==[False]*5+[True]*2+[False]*2

def metrics(): return [LossScale(), SkippedSteps(), GradNorm()]

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_history_and_metrics_of_a_fit():
    "The first batch runs again until a scale is found; three that fp32 cannot hold are skipped"
    learn = learner(cbs=[Poison({1,3,5}, 'backward'), GradientNormClip(0.25)], metrics=metrics()).to_fp16_dynamic(init_scale=2.**24)
    fit(learn, 2)
    mp = learn.mixed_precision
    df = mp.history
    assert df.skipped.tolist()==[i in (1,3,5) for i in range(8)] and mp.n_skipped==3 and df.reruns[0]>1 and mp.n_rerun==df.reruns.sum()
    norms = df.grad_norm
    assert df.loss_scale[~df.skipped].nunique()==1 and norms[df.skipped].map(math.isinf).all() and norms[~df.skipped].between(0, 100).all()
    assert learn.recorder.metric_names==['epoch','train_loss','valid_loss','loss_scale','skipped_steps','grad_norm','time']
    assert [v[2:4] for v in learn.recorder.values]==[[mp.scaler.get_scale(),2],[mp.scaler.get_scale(),1]]
    assert type(learn.recorder.values[0][2]) is int # which fastai's table shows without zeros
    for v,d in zip(learn.recorder.values, (df[:4],df[4:])): assert v[4]==pytest.approx(d.grad_norm[~d.skipped].mean())
    _,axs = plt.subplots(2, 1)
    mp.log.kept_since = {'0': 3, '2': 3, '4': None, '6': 99} # the latter are of a checkpoint and of another fit
    mp.plot(axs)
    assert axs[0].get_title() and all([o.get_xdata()[0] for o in ax.lines if o.get_color()=='tab:purple']==[3] for ax in axs)
    assert 'layers moved to fp32: 2' in [o.get_text() for o in axs[0].get_legend().get_texts()]
    drawn = {o.get_label(): list(o.get_xdata()) for o in axs[0].lines}
    assert drawn['ran again, step taken: 1']==[0] and drawn['skipped: 3']==[1,3,5] and axs[0].get_yscale()=='log'
    limit, = [o for o in axs[1].lines if o.get_label()=='clipped at 0.25']
    assert set(limit.get_ydata())=={0.25}
    with pytest.warns(PrecisionWarning, match='will be None'): fit(learn.to_fp32(), 1)
    assert learn.recorder.values[-1][2:]==[None]*3

def test_metrics_of_an_epoch_without_a_step():
    learn = learner(metrics=metrics()).to_fp16_dynamic()
    with learn.no_bar(), learn.no_logging(): assert list(learn.validate())[1:]==[2**16,0,None]

@pytest.mark.parametrize('rows', [[], [(1.,0,True,math.inf)]*3, [(1.,2,True,math.nan),(2.,1,False,1.)]], ids=['nothing','skipped','both'])
def test_plots_of_any_history(rows):
    log = History()
    for row in rows: log.add(*row)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fig,axs = plt.subplots(2, 1)
        plot_history(log.frame(), [0.5], axs)
        fig.canvas.draw()
        plot_history(log.frame())
    legend = axs[0].get_legend()
    texts = [o.get_text() for o in legend.get_texts()] if legend else []
    counts = {'ran again, step taken': sum(r[1]>0 and not r[2] for r in rows), 'skipped': sum(r[2] for r in rows)}
    assert texts==[f'{k}: {n}' for k,n in counts.items() if n]
    plt.close('all')

@pytest.mark.filterwarnings('ignore::UserWarning')
def test_fits_are_told_apart():
    "As numbers with epochs and learning rates, by lines in the plot, and one alone; `lr_find` is one of its own kind"
    learn = learner().to_fp16_dynamic()
    fit(learn, 2, lr=0.25)
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=8, show_plot=False)
    fit(learn, 1)
    mp = learn.mixed_precision
    df = mp.history
    assert df.drop_duplicates('fit').kind.tolist()==['fit','lr_find','fit'] and df[df.fit==0].epoch.tolist()==[0]*4+[1]*4
    assert set(df[df.fit==0].lr)=={0.25} and df[df.fit==1].lr.is_monotonic_increasing and df[df.fit==1].lr.nunique()>1
    def drawn(**kwargs):
        _,axs = plt.subplots(2, 1)
        mp.plot(axs, **kwargs)
        plt.close('all')
        return axs[0].lines[0].get_xdata().tolist(),[o.get_text() for o in axs[0].texts]
    assert drawn()==(df.step.tolist(), ['lr_find 1','fit 2'])
    assert drawn(last=True)==drawn(fit=2)==(df.step[df.fit==2].tolist(), []) and drawn(fit=1)[0]==df.step[df.fit==1].tolist()
    with pytest.raises(ValueError, match=r'fit.*one of \[0, 1, 2\]'): mp.plot(fit=9)

def filled(n=200):
    "A history of two fits with `n` steps each, the last one skipped"
    log = History()
    for _ in range(2):
        log.begin_fit('fit')
        for i in range(n): log.add(1., 0, i==n-1, float(i), lr=i)
    return log

def test_what_a_step_asks_of_the_history_does_not_depend_on_its_length():
    "Only the last steps are looked at"
    class Steps(list):
        n_read = 0
        def __getitem__(self, i):
            res = super().__getitem__(i)
            self.n_read += len(res) if isinstance(i, slice) else 1
            return res
        def __reversed__(self):
            for o in super().__reversed__():
                self.n_read += 1
                yield o
        def __iter__(self): raise AssertionError('all steps are read')
    log = filled()
    log.steps = Steps(log.steps)
    assert log.largest_norm==198 and log.n_in_fit==200 and log.last_lr==198
    assert log.steps.n_read<=34
    log.begin_fit('fit')
    assert log.largest_norm==math.inf and log.n_in_fit==0 and log.last_lr is None
    log.add(1., 0, True, math.inf, lr=1.)
    assert log.last_lr is None and log.n_in_fit==1 and log.largest_norm==math.inf

def test_a_fit_reads_only_the_last_steps_of_its_history(monkeypatch):
    "In each of its steps"
    class Steps(list):
        most = 0
        def __getitem__(self, i):
            res = super().__getitem__(i)
            if isinstance(i, slice): self.most = max(self.most, len(res))
            return res
        def __iter__(self): raise AssertionError('all steps are read')
    learn = learner(cbs=GradientNormClip()).to_fp16_dynamic()
    log = learn.mixed_precision.log
    log.steps = Steps()
    class Fills(Callback):
        def before_train(self):
            for _ in range(500): log.add(2.**16, 0, False, 1.)
    fit(learn, 1, cbs=Fills())
    assert log.n_in_fit==504 and log.steps.most<=32

def test_each_norm_is_read_once():
    "At the end of each epoch, only those of the epoch"
    learn = learner(cbs=GradientNormClip())
    clip,read = learn.gradient_norm_clip,[]
    with pytest.MonkeyPatch.context() as patch:
        def count(os, f=clip_module.read_all):
            read.append(len(os))
            return f(os)
        patch.setattr(clip_module, 'read_all', count)
        fit(learn, 3)
    assert read==[4,4,4] and len(clip.norms)==12 and all(isinstance(o, float) for o in clip.norms)

def test_norms_that_are_added_while_another_thread_reads_them_are_kept(monkeypatch):
    learn = fit(learner(cbs=GradientNormClip()), 1)
    clip = learn.gradient_norm_clip
    def read(os, f=clip_module.read_all):
        res = f(os)
        clip._norms.append(torch.tensor(9.))
        return res
    monkeypatch.setattr(clip_module, 'read_all', read)
    assert len(clip.norms)==5
    monkeypatch.undo()
    assert len(clip.norms)==5 and clip.norms[-1]==9

def test_the_history_can_be_read_while_another_thread_adds_steps():
    log,stop = filled(2000),threading.Event()
    def add():
        while not stop.is_set(): log.add(1., 0, False, 1.)
    thread = threading.Thread(target=add)
    thread.start()
    try: lengths = [len(log.frame()) for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    assert lengths==sorted(lengths) and lengths[-1]>4000

@pytest.mark.parametrize('to', ['to_fp32','to_fp16'])
def test_metrics_say_that_they_need_mixed_precision(to):
    "In one warning a fit, though not in `lr_find`, which shows no table"
    learn = getattr(learner(metrics=metrics()), to)()
    with pytest.warns(PrecisionWarning, match='LossScale, SkippedSteps, GradNorm will be None in the training log') as told:
        with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert len([o for o in told if o.category is PrecisionWarning])==1 and told[-1].filename==__file__
    with learn.no_bar(), learn.no_logging(): learn.lr_find(num_it=8, show_plot=False)
