"A row for each step: as a table, a picture and columns of the training log"
import math,warnings
import matplotlib.pyplot as plt
import pytest
from fastai_amp16.all import GradNorm,GradientNormClip,LossScale,SkippedSteps
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
    for v,d in zip(learn.recorder.values, (df[:4],df[4:])): assert v[4]==pytest.approx(d.grad_norm[~d.skipped].mean())
    _,axs = plt.subplots(2, 1)
    mp.plot(axs)
    drawn = {o.get_label(): o.get_xdata().tolist() for o in axs[0].lines}
    assert drawn['ran again, step taken: 1']==[0] and drawn['skipped: 3']==[1,3,5] and axs[0].get_yscale()=='log'
    assert set(axs[1].lines[1].get_ydata())=={0.25}
    fit(learn.to_fp32(), 1)
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
    texts = [o.get_text() for o in axs[0].get_legend().get_texts()]
    assert texts==[f'ran again, step taken: {sum(r[1]>0 and not r[2] for r in rows)}', f'skipped: {sum(r[2] for r in rows)}']
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
