"`benchmarks/speed/gpu.py` with toys: everybody gets the same to train, a turn in each round, and a row; nobody stops the others"
import copy,gc,itertools,json,weakref
from types import SimpleNamespace
import pytest,torch
from conftest import asked
from fastai.basics import default_device,nn
from benchmarks.speed import gpu

toy = "--toy --size 32 --seq 8 --steps 2 --skip 1 --rounds 1".split()
cpu = default_device().type=='cpu'

@pytest.fixture(autouse=True)
def little_to_collect():
    "Each turn begins with `gc.collect()`, which would look through all that other tests have imported"
    gc.freeze()
    yield
    gc.unfreeze()

def cells(res): return [(r['model'],r['bs'],r['contender']) for r in res['rows']]

def run(path, *args): return gpu.main([*toy, *map(str, args), '--out', str(path/'x.json')])

def last_loss(model, batches):
    "A contender that only looks"
    for x,y in batches: loss = gpu.loss_func(model(x), y)
    return dict(loss=loss.detach(), precision='fp32')

@pytest.fixture
def clock(monkeypatch):
    "Time that passes only where a contender works"
    now = SimpleNamespace(t=0.)
    monkeypatch.setattr(gpu.time, 'perf_counter', lambda: now.t)
    def worker(seconds, ahead=0, build=0.):
        "A contender that takes `seconds` a batch, and asks for batches that many `ahead`, if there are more"
        def train(model, batches):
            now.t += build
            it = iter(batches)
            waiting = [next(it) for _ in range(ahead)]
            for _ in range(len(batches)):
                if len(waiting)<=ahead: waiting += itertools.islice(it, 1)
                waiting.pop(0)
                now.t += seconds
            return dict(loss=torch.tensor(1.), precision='fp32')
        return train
    return SimpleNamespace(now=now, worker=worker)

@pytest.mark.slow
def test_everybody_trains_everything(tmp_path, capsys):
    res = run(tmp_path, '--bs', 2)
    out = capsys.readouterr().out
    assert json.loads((tmp_path/'x.json').read_text())==res and (tmp_path/'x.png').read_bytes()[:4]==b'\x89PNG'
    assert cells(res)==list(itertools.product(gpu.models, (2,), gpu.contenders))
    assert res['versions']['torch'] and res['versions']['fastai_amp16'] and res['machine'] and res['arguments']['size']==32
    assert all(line.count('|')==11 for line in out.splitlines()) and len(out.splitlines())==2+len(res['rows'])
    errors = {(r['model'],r['contender']) for r in res['rows'] if 'error' in r}
    # oneDNN's LSTM knows no fp16, and bf16 on some CPUs only; ours keeps it in fp32 there
    others = [] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ['to_bf16','accelerate','lightning']
    assert errors==({('text_lstm',o) for o in ('to_fp16','to_fp16_fused',*others)} if asked=='cpu' else set())
    for r in res['rows']:
        if 'error' in r:
            assert 'samples_per_second' not in r and 'LSTM' in r['error']
            continue
        assert 0<r['quartiles'][0]<=r['samples_per_second']<=r['quartiles'][1] and r['finite'] and r['rounds']==1
        assert (r['over_to_fp16'] is None)==((r['model'],'to_fp16') in errors) and (r['contender']!='to_fp16' or r['over_to_fp16']==1)
        assert (r['skipped'] is not None)==('dynamic' in r['contender'])
        assert all((r[k] is None)==cpu for k in ('peak_mib','syncs_per_step'))
        half = 'bf16' if 'bf16' in r['contender'] or cpu and r['contender'] in ('lightning','accelerate') else 'fp16'
        assert r['precision']==('fp32' if r['contender']=='fp32' else half)
    ours = res['ours_over_to_fp16']
    assert [(o['model'],o['bs'],'to_fp16_dynamic') for o in ours]==[o for o in cells(res) if o[2]=='to_fp16_dynamic']
    by = dict(zip(cells(res), res['rows']))
    for o in ours: assert o['over_to_fp16']==by[o['model'],o['bs'],'to_fp16_dynamic']['over_to_fp16']

@pytest.mark.usefixtures('uncompared')
@pytest.mark.parametrize('name', gpu.contenders)
def test_a_contender_trains_all_of_the_model_and_leaves_nothing(name, monkeypatch):
    "From the weights given, which stay as they are, on the batches given, in the precision that it tells; the copy it trained is gone"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    before,seen,dtypes,copies = {k: v.clone() for k,v in model.state_dict().items()},[],set(),[]
    def deepcopy(model, fastais=copy.deepcopy):
        new = fastais(model)
        if isinstance(model, nn.Sequential):
            new.register_forward_pre_hook(lambda m, xs: seen.append((xs[0].detach().clone(), m[1].weight.detach().float().clone())))
            new[1].register_forward_hook(lambda m, xs, out: dtypes.add(out.dtype))
            copies.append(weakref.ref(new))
        return new
    monkeypatch.setattr(gpu.copy, 'deepcopy', deepcopy)
    data = [(0.1*torch.randn(2, 3, 2, 2).to(default_device()), torch.tensor([0,3]).to(default_device())) for _ in range(2)]
    res = gpu.turn(name, model, gpu.Batches(data, 3, 1, float('inf')))
    assert 'error' not in res and res['finite'] and all(torch.equal(v, before[k]) for k,v in model.state_dict().items())
    assert dtypes=={dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)[res['precision']]}
    xs,ws = zip(*seen)
    assert len(xs)==5 and all(torch.equal(x.float(), data[i%2][0]) for i,x in enumerate(xs))
    assert torch.allclose(ws[0].cpu(), before['1.weight'].cpu(), atol=1e-2) and not torch.equal(ws[0], ws[-1])
    assert len(copies)==1 and not torch.is_autocast_enabled(default_device().type)
    gc.collect()
    assert copies[0]() is None

def test_the_fair_contender_differs_by_the_optimizer_alone(monkeypatch):
    "`to_fp16_fused` steps with PyTorch's fused AdamW, `to_fp16` with fastai's Adam; both clip and are scaled by the same callbacks"
    seen = {}
    class Noting(gpu.Learner):
        def fit_one_cycle(self, *args):
            res = super().fit_one_cycle(*args)
            seen[len(seen)] = self.opt,[type(o) for o in self.cbs]
            return res
    monkeypatch.setattr(gpu, 'Learner', Noting)
    data = [(torch.randn(2, 12).to(default_device()), torch.tensor([0,3]).to(default_device()))]*2
    for c in ('to_fp16','to_fp16_fused'): assert 'error' not in gpu.turn(c, nn.Linear(12, 4), gpu.Batches(data, 2, 1, float('inf')))
    (adam,theirs),(fused,same) = seen.values()
    assert theirs==same and isinstance(fused.opt, torch.optim.AdamW) and fused.opt.param_groups[0]['fused'] and not hasattr(adam, 'opt')

@pytest.mark.parametrize('toy', [False,True])
def test_large_predictions_are_the_most_of_their_model(toy):
    "At the smaller of the default batch sizes, they are more numbers than the weights, the gradients and two moments of each"
    a = gpu.parse_args([])
    model = gpu.models['large_predictions'][toy](a.size)
    x,y = gpu.make_batch(model, a.bs[0], a)
    assert x.shape==y.shape==(16,72) and torch.equal(x[:,1:], y[:,:-1])
    pred = model(x)
    assert pred.shape==(16,72,1000 if toy else 10_000) and pred.numel()>4*sum(p.numel() for p in model.parameters())
    assert gpu.loss_func(pred, y).isfinite()

@pytest.mark.parametrize('fails_in', [0,1,2])
def test_who_raises_stops_nobody(fails_in, tmp_path, monkeypatch):
    "In the warm-up and in the first round there are no numbers to keep, later there are; a ratio needs both"
    calls = itertools.count()
    def boom(model, batches):
        if next(calls)>=fails_in: raise RuntimeError('what it says\nand where')
        return last_loss(model, batches)
    monkeypatch.setattr(gpu, 'contenders', dict(fp32=last_loss, to_fp16=boom, late=last_loss))
    res = run(tmp_path, '--models', 'vit_small', '--bs', 2, '--rounds', 3)
    first,failed,late = res['rows']
    assert first['rounds']==late['rounds']==3 and (tmp_path/'x.png').exists()
    if fails_in<2: assert failed['error']=='RuntimeError: what it says' and 'rounds' not in failed and first['over_to_fp16'] is None
    else: assert 'error' not in failed and failed['rounds']==1 and first['over_to_fp16']>0

def test_who_stops_early_has_no_speed(tmp_path, monkeypatch):
    "As a fit does that a callback ends"
    def stops(model, batches): return last_loss(model, itertools.islice(batches, len(batches)-1))
    monkeypatch.setattr(gpu, 'contenders', dict(stops=stops, to_fp16=last_loss))
    stopped,other = run(tmp_path, '--models', 'vit_small', '--bs', 2)['rows']
    assert stopped['error']=='RuntimeError: it stopped before the last batch' and other['rounds']==1

@pytest.mark.parametrize('ahead', [0,1,2])
def test_speed_is_that_of_the_loop(ahead, tmp_path, monkeypatch, clock):
    "Whether it looks ahead or not; neither building nor the first steps count"
    monkeypatch.setattr(gpu, 'contenders', dict(to_fp16=clock.worker(.5, ahead, build=3.), fast=clock.worker(.25, ahead)))
    slow,fast = run(tmp_path, '--models', 'vit_small', '--bs', 2, '--steps', 7, '--skip', 3, '--rounds', 3)['rows']
    assert (slow['samples_per_second'],fast['samples_per_second'],fast['over_to_fp16'])==(4,8,2) and slow['quartiles']==[4,4]

def test_ratios_are_of_the_same_round(tmp_path, monkeypatch, clock):
    "Seconds a batch in the warm-up and three rounds: 2, 4 and 1.5 times as fast, while the ratio of the medians is 4"
    def worker(*seconds):
        turns = iter(seconds)
        return lambda *args: clock.worker(next(turns))(*args)
    monkeypatch.setattr(gpu, 'contenders', dict(to_fp16=worker(9., 1., 2., 3.), ours=worker(9., .5, .5, 2.)))
    base,ours = run(tmp_path, '--models', 'vit_small', '--bs', 2, '--rounds', 3)['rows']
    assert (base['samples_per_second'],ours['samples_per_second'],ours['over_to_fp16'])==(1,4,2)

@pytest.mark.parametrize('minutes', [1,9])
def test_time_is_kept(minutes, tmp_path, monkeypatch, clock):
    "Rounds are dropped, then steps, and never a model; time that one does not need is the others'"
    monkeypatch.setattr(gpu, 'contenders', dict(to_fp16=clock.worker(.1, build=.2), slow=clock.worker(.2, build=.4)))
    res = run(tmp_path, '--bs', 2, 3, '--steps', 100, '--rounds', 5, '--minutes', minutes)
    assert clock.now.t<=60*minutes and not any('error' in r for r in res['rows'])
    rounds = [r['rounds'] for r in res['rows']]
    assert clock.now.t>30*minutes and (minutes<9 or min(rounds)==5) and (minutes>1 or min(rounds)<5)

def test_without_time_it_says_so(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(gpu, 'contenders', dict(to_fp16=clock.worker(1.), other=clock.worker(1.)))
    res = run(tmp_path, '--bs', 2, '--minutes', .5)
    assert len(res['rows'])==2*len(gpu.models) and clock.now.t<=31 and (tmp_path/'x.png').exists()
    missing = [r['error']=='TimeoutError: no time left' for r in res['rows'] if 'error' in r]
    assert 0<len(missing)<len(res['rows']) and all(missing)
