"Trainings of different kinds end in half precision where they end in fp32, and the benchmark that says so can say otherwise"
import itertools,json,math
import pytest,torch
from fastai.basics import Learner
from fastai.callback.all import ShortEpochCallback
from scipy.stats import ttest_rel
from benchmarks.accuracy import convergence
from common import few
from benchmarks.accuracy.convergence import contenders,difference,figures,main,trainings

pytestmark = pytest.mark.usefixtures('as_in_programs') # fastai splits data by arrays, and scipy takes them

@pytest.fixture
def short(monkeypatch):
    "Sets a training to so many epochs, and other things if told; of the contenders some"
    def f(name, epochs, some=contenders, **kwargs):
        monkeypatch.setitem(trainings, name, trainings[name]._replace(epochs=epochs, **kwargs))
        monkeypatch.setattr(convergence, 'contenders', some)
    return f

def results(tmp_path, name):
    "The rows of the contenders"
    main(['--seeds', '2', '--only', name, '--out', str(tmp_path/'convergence.json')])
    assert (tmp_path/'convergence.png').stat().st_size>10_000
    return {r['contender']: r for r in json.loads((tmp_path/'convergence.json').read_text())['rows']}

@pytest.mark.slow
def test_ends_where_fp32_ends(tmp_path, short, capsys):
    name = 'tabular classification'
    short(name, 2)
    rows = results(tmp_path, name)
    assert list(rows)==list(contenders) and f'| {name} | accuracy | 0.9' in capsys.readouterr().out
    fp32 = figures(rows['to_fp32'])
    assert fp32.min()>0.85 # it learned
    for to in ('to_fp16_dynamic','to_bf16_dynamic'): assert (figures(rows[to])-fp32).mean().abs()<=fp32.std()+0.01, rows

def test_steps_that_are_lost_are_counted(tmp_path, short):
    "The gradients of diabetes overflow at the first scale of all: fastai skips, ours runs again"
    name = 'tabular regression'
    short(name, 1, ('to_fp32','to_fp16','to_fp16_dynamic'))
    rows = results(tmp_path, name)
    assert rows['to_fp32']['skipped']==rows['to_fp16_dynamic']['skipped']==[0,0]
    assert min(rows['to_fp16']['skipped'])>5 and rows['to_fp16']['reruns']==[0,0] and min(rows['to_fp16_dynamic']['reruns'])>3

def test_what_raises(tmp_path, short, monkeypatch, capsys):
    def broken(self): raise ValueError('not today')
    monkeypatch.setattr(Learner, 'to_fp16', broken)
    short('tabular regression', 1, ('to_fp32','to_fp16'))
    rows = results(tmp_path, 'tabular regression')
    assert rows['to_fp16']['figures']==[None]*2 and rows['to_fp16']['errors']==['ValueError: not today']*2
    assert rows['to_fp32']['errors']==[None]*2 and '| ValueError (2 of 2) |' in capsys.readouterr().out

def test_other_weights_are_noticed(tmp_path, short):
    name,seeds = 'tabular regression',itertools.count()
    short(name, 1, ('to_fp32','to_bf16_dynamic'), make=lambda seed, make=trainings[name].make: make(next(seeds)))
    with pytest.raises(RuntimeError, match='first weights or batches differ'): results(tmp_path, name)

def test_difference():
    "As scipy's paired t-test has it"
    torch.manual_seed(0)
    a,b = torch.randn(2, 5, dtype=torch.float64)
    for shift in torch.linspace(-3, 3, 121):
        t,(mean,error,told) = ttest_rel(a+shift, b),difference(*(dict(figures=o.tolist()) for o in (a+shift,b)))
        assert math.isclose(mean/error, t.statistic) and told==(t.pvalue<0.05)

def test_difference_of_equals():
    row = dict(figures=[0.9,0.8,0.7])
    assert difference(row, row)==(0., 0., False)
    assert not difference(dict(figures=[None,0.5]), dict(figures=[0.5,0.4]))[2]

@pytest.mark.filterwarnings('ignore::UserWarning','ignore::FutureWarning') # that layers overflow; that fastai has the old weight_norm
@pytest.mark.parametrize('name', few(trainings, *[*trainings][::3]))
def test_one_batch(name):
    "Made of the same seed they are the same; in half precision the first batch is trained on, and validation gives finite figures"
    learns = [trainings[name].make(0) for _ in range(2)]
    for a,b in zip(*(o.model.parameters() for o in learns)): assert torch.equal(a, b)
    learn,once = learns[0].to_fp16_dynamic(),ShortEpochCallback(0., short_valid=False)
    once.order = 99 # after the recorder
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=once)
    valid_loss,figure = learn.recorder.values[-1]
    assert len(learn.recorder.losses)==1 and math.isfinite(valid_loss) and math.isfinite(figure)
    before,after = (torch.cat([p.detach().flatten().cpu() for p in o.model.parameters()]) for o in learns[::-1])
    assert not torch.equal(before, after) and not learn.mixed_precision.n_skipped
