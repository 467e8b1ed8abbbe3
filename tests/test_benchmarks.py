"The scripts of `benchmarks/`, in sizes that show nothing but that all of it runs; no test looks at a time"
import importlib.util,json,math,subprocess,sys
from pathlib import Path
from unittest.mock import patch
import pytest,torch
from benchmarks.accuracy import epsilon,families,published,scale_policy,short_fits,silent
from benchmarks.compatibility import compatibility,libraries
from benchmarks.diagnosis import diagnosis,doctor
from benchmarks.memory import accumulation,memory
from benchmarks.shared import timing
from benchmarks.speed import bf16_cpu,compiled,cuda_dispatch,fp16_cpu,scaling,step_cost
from fastai.basics import DataLoaders,Learner
from torch._dynamo.utils import counters
from fastai_amp16.all import DynamicScaler
from benchmarks.accuracy.trainings import trainings

pytestmark = pytest.mark.not_as_cuda('these scripts measure what a CPU does')

def read(path): return json.loads(path.read_text())

# %% running again
def test_short_fits(tmp_path, capsys):
    "All are trained on the same batches from the same weights; running again ends nearer to fp32, and the claim says how near"
    short_fits.main(['--steps', '4', '8', '--seeds', '2', '--only', 'broken pixels', '--out', f'{tmp_path}/x.json'])
    rows = read(tmp_path/'x.json')['rows']
    assert [(r['steps'],r['contender']) for r in rows]==[(n,to) for n in (4,8) for to in ('skipping','running again')]
    for skipping,again in (rows[:2],rows[2:]):
        assert max(skipping['skipped'])>0 and skipping['reruns']==again['skipped']==[0,0] and max(again['reruns'])>0
        assert any(again['promoted']) and max(again['distance'])<1<max(skipping['distance'])
    out,furthest,nearest = capsys.readouterr().out,*(max(r['distance']) for r in rows[:2])
    assert f'After 4 steps, fits that run batches again are within {short_fits.percent(nearest)} of' in out
    assert f'fits that skip steps are up to {short_fits.percent(furthest)} off' in out
    assert (tmp_path/'x.png').stat().st_size>10_000 and '\n| training | 4 steps | 8 steps |' in out

def test_short_fits_claim_only_what_they_show():
    def row(to, *distance): return dict(contender=to, steps=15, distance=list(distance))
    better = [row('skipping', 1., 3.), row('running again', 0., 2.)]
    assert '2%' in short_fits.claim(better) and '3%' in short_fits.claim(better)
    assert '%' not in short_fits.claim([*better, row('skipping', 0.1), row('running again', 0.2)])

@pytest.mark.parametrize('name', [o for o in short_fits.cases if o!='collaborative filtering']) # the slowest, and like the first
def test_a_short_fit_loses_no_step_where_batches_run_again(name):
    "And is one of as many steps, on the same batches, as the one in fp32"
    seen = []
    def run(to):
        learn = short_fits.with_steps(short_fits.cases[name].make(0), 3)
        seen.append([*learn.model.parameters(), *(t for b in learn.dls.train for t in b)])
        return short_fits.run(name, to, 0, 3)
    fp32,again = run('fp32'),run('running again')
    assert fp32['steps']==again['steps']==3 and again['skipped']==0 and all(map(torch.equal, *seen))
    assert again['loss']==pytest.approx(fp32['loss'], rel=1e-2)

@pytest.mark.slow
def test_accumulation(tmp_path, capsys):
    "What is counted is what the images take"
    accumulation.main(f'--accumulation 13 --size 256 --bs 8 --out {tmp_path}/x.json'.split()) # 6 MiB a batch
    row, = read(tmp_path/'x.json')['rows']
    assert row['kept']==12*8*(3*256*256*4+8) and row['taken']==1
    assert row['peak']==pytest.approx(row['kept'], rel=0.3)
    assert '| 8 | 72 |' in (out:=capsys.readouterr().out) and 'runs again' in out

def test_beyond_the_bound_a_step_is_skipped(monkeypatch):
    monkeypatch.setattr('fastai_amp16.train.rerun._most_bytes', 2*4*(3*8*8*4+8)) # of two batches
    for n,taken in ((3,1),(4,0)):
        res = accumulation.train(n, 4, 8, True)
        assert res['taken']==taken and bool(res['kept'])==bool(taken)

@pytest.mark.slow
def test_diagnosis(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, 'added_by', lambda job, n, promoted=(): (100,300) if job in ('fp32','fit') else (100,400))
    args = '--depth 2 --width 8 --steps 20 --rounds 1 --blocks 2 --fits 1 --after 1 --trainings norm_free'
    diagnosis.main(f'{args} --out {tmp_path}/x.json'.split())
    res = read(tmp_path/'x.json')
    assert res['steps']==20 and 'out' not in res and res['fit_with_over_without']>0 and res['report_in_steps'][1]>0
    rows = res['by_depth']
    assert [(r['fault'],r['faulty'],r['promoted']) for r in rows]==[(k,n,n) for k in diagnosis.kinds for n in (1,2)]
    assert all(4<r['passes']<18 and r['layers']==14 and r['in_half']==14-r['promoted']*(r['fault']=='linear') for r in rows)
    half,layers = res['hostile']['norm_free']
    assert 0<half<layers==18
    after = res['afterwards']
    assert after['in_half']==after['layers']==8 and after['added']['healed']==[100,400] and after['over']['fp32'][1]>0
    assert '| diagnosis | 0 | 0 |' in diagnosis.memory_table(res['memory'])
    said = ' '.join(diagnosis.section({**res, 'where': ''}).split())
    assert 'healed adds 1.50 times as much' in said and 'fit in fp16, and 1.00 times as much as one in fp32' in said
    table = diagnosis.depth_table([{**rows[0], 'passes': 18, 'pause': 60.2}])
    assert '| 2 blocks |' in table and table.endswith('| one | 18 / 60 / 100% |')

@pytest.mark.slow
def test_memory_of_a_diagnosis():
    "In a process of its own; it raises where nothing was healed"
    before,top = diagnosis.added_by('diagnosis', 2**12)
    assert 10*2**20<top-before<400*2**20

def test_a_fit_in_which_a_batch_runs_again_is_not_measured(monkeypatch):
    learn = diagnosis.learner(2, 8, 2, 4, init_scale=2.**24)
    monkeypatch.setattr(learn, 'loss_func', lambda p,y: 100*(p-y).square().mean())
    with pytest.raises(RuntimeError, match='batches ran again'): diagnosis.fit(learn)

def test_step_cost(tmp_path, capsys, monkeypatch):
    "What the README claims and no machine changes: operators and reads"
    name,make = next(iter(step_cost.models.items()))
    monkeypatch.setattr(step_cost, 'models', {name: make})
    step_cost.main(f'--rounds 1 --steps 3 --bs 8 --out {tmp_path}/x.json'.split())
    res = read(tmp_path/'x.json')
    of = {r['contender']: r for r in res['rows']}
    assert list(of)==list(step_cost.stacks) and all(r['ms'][0]>0 for r in of.values())
    assert '| **`to_fp16_dynamic`**, ' in capsys.readouterr().out
    assert [(r['model'],r['contender']) for r in res['small']]==[(m,k) for m in step_cost.small for k in step_cost.small_stacks]
    assert [r['over_to_fp16'][1] for r in res['small'] if r['contender']==step_cost.small_first]==[1,1,1]
    ours,theirs = of[step_cost.own],of[step_cost.first]
    assert ours['tensors']==161 and ours['operators_step']<=30 and ours['reads']==1 and theirs['operators_step']>9*161
    assert of[step_cost.hand]['reads']==0 and of[step_cost.loop]['operators_step']<10
    assert 0<ours['operators_forward_backward']-of[step_cost.careful]['operators_forward_backward']<10 # the casts of norms are in both

def test_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled, 'models', dict(small=lambda d: torch.nn.Sequential(torch.nn.Linear(256, d), torch.nn.Linear(d, 10))))
    monkeypatch.setattr(compiled, 'sizes', dict(small=8))
    counters.clear()
    compiled.main(f'--rounds 1 --steps 3 --backend eager --out {tmp_path}/x.json'.split())
    rows,out = read(tmp_path/'x.json')['rows'],capsys.readouterr().out
    assert [(r['contender'],r['compiled']) for r in rows]==[(k,c) for k in compiled.stacks for c in (True,False)]
    assert all(r['ms'][0]>0 for r in rows) and rows[0]['over_hand'][1]==rows[1]['over_uncompiled'][1]==1
    assert counters['frames']['ok']>0 and out.count('\n| small |')==1 and out.count(' of ')==3

def test_operators_are_counted():
    p = torch.nn.Parameter(torch.ones(3))
    def stack(model, batches):
        def run():
            for x in batches:
                (x*p).sum().backward()
                if (p.grad>0).all(): p.grad.mul_(2).tolist() # gt, all, a read, mul_, and a read without an operator
            return []
        return run
    assert step_cost.count(stack, None, timing.Batches([torch.ones(3)]*4))==dict(operators_forward_backward=5, operators_step=4, reads=2)

def test_interleaved():
    calls = []
    def run(k, t): return lambda: calls.append(k) or [t, 2*t, 3*t]
    res = timing.interleaved({k: run(k, t) for k,t in dict(a=1., b=2., c=3.).items()}, 5)
    assert res=={'a':[2.]*5, 'b':[4.]*5, 'c':[6.]*5} and timing.ratio(res['c'], res['a'])==[3.]*3
    assert [''.join(calls[i:i+3]) for i in range(0, 18, 3)]==['abc','bca','cab']*2
    assert timing.quartiles([1.,2.,3.,4.,5.])==[2.,3.,4.]

def test_batches():
    batches = timing.Batches([1,2,3])
    assert len(batches)==3 and list(batches)==[1,2,3] and len(batches.times)==4 and len(batches.steps())==2 and min(batches.steps())>=0

def test_scaling(tmp_path):
    cases = [*scaling.cases][5:7]
    scaling.main([*f'--numbers 2 5 --sizes 10 100 --number 3 --rounds 1 --steps 4 --out {tmp_path}/x.json --cases'.split(), *cases])
    res = read(tmp_path/'x.json')
    assert [(r['tensors'],r['elements']) for r in res['by_number']+res['by_size']]==[(2,200),(5,500),(3,30),(3,300)]
    assert (tmp_path/'x.png').stat().st_size>10_000 and all(r['copy'][1]>0 for r in res['by_size'])

@pytest.mark.parametrize('make', [scaling.learner,scaling.by_hand], ids=['ours','by hand'])
def test_scaling_trains_in_half(make):
    "The gradients that are given reach the weights; hooks see what is true of them"
    model,seen = scaling.Weights(3, 5, torch.device('cpu')),[]
    for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    batches = timing.Batches([(torch.zeros(1),torch.zeros(1))]*2)
    (make('to_fp16_dynamic', model, batches) if make is scaling.learner else make(model, batches))()
    given = torch.full((1,5), 1e-3).half().float()/(2.**16 if make is scaling.learner else 1.)
    assert len(seen)==6 and all(g.dtype==torch.float32 and torch.equal(g, given) for g in seen)

def test_bf16(tmp_path):
    sizes = '--width 16 --depth 1 --seq 4 --mlp_width 16 --mlp_depth 1 --bs 2 --mlp_bs 2 --steps 3 --rounds 1'
    bf16_cpu.main(f'{sizes} --out {tmp_path}/x.json'.split())
    rows = read(tmp_path/'x.json')['rows']
    assert [r['model'] for r in rows]==['transformer','MLP'] and all(r['ours'][1]>0 and r['by_hand'][1]>0 for r in rows)

def test_fp16(tmp_path, monkeypatch):
    monkeypatch.setattr(fp16_cpu, 'resnet18', lambda num_classes: fp16_cpu.convs(2)) # a real one takes a minute
    fp16_cpu.main(f'--sizes 4 --resnet 8 --width 2 --bs 2 --steps 3 --rounds 1 --out {tmp_path}/x.json'.split())
    rows = read(tmp_path/'x.json')['rows']
    assert [r['network'] for r in rows]==['4 convolutions of 2 and 4 channels','ResNet-18']
    for r in rows: assert set(r['slower'])=={'to_fp16_dynamic','to_bf16_dynamic'} and all(q[1]>0 for q in r['slower'].values())

@pytest.mark.slow
def test_epsilon(tmp_path, monkeypatch):
    "An eps that hardly moves the weights is worse in both precisions"
    monkeypatch.setattr(epsilon, 'all_eps', (1e-5,1e4))
    monkeypatch.setitem(trainings, 'tabular regression', trainings['tabular regression']._replace(epochs=3))
    epsilon.main(f'--seeds 2 --out {tmp_path}/x.json --only'.split()+['tabular regression'])
    res = read(tmp_path/'x.json')
    for base,large in epsilon.groups(res).values(): assert epsilon.difference(large, base)[0]<0
    assert epsilon.table(res).count('\n| tabular regression |')==2

def test_epsilon_counts_what_is_significant():
    def row(eps, *figures): return dict(training='a', precision='to_fp32', eps=eps, figures=list(figures))
    rows = [row(1e-5, .1, .2, .3), row(1e-4, .21, .3, .41), row(1e-8, 0., .1, .21)]
    found = {(o['precision'],o['eps']): (o['better'],o['worse']) for o in epsilon.counts(dict(rows=rows))}
    assert (found['to_fp32',1e-4],found['to_fp32',1e-8],found['to_fp16_dynamic',1e-8])==((1,0),(0,1),(0,0))

@pytest.mark.slow
def test_memory(tmp_path, monkeypatch, capsys):
    "Of weights, and of predictions in a validation, which fp32 holds twice: the loss makes a `log_softmax` of them"
    monkeypatch.setattr(memory, 'contenders', ('to_bf16_dynamic',))
    monkeypatch.setattr(memory, 'large_contenders', dict.fromkeys(['to_fp32','to_bf16_dynamic(rerun=False)']))
    monkeypatch.setattr(memory, 'parts', ('validation',))
    memory.main(f'--width 2000 --depth 4 --bs 2 --predictions 16 64 10000 --out {tmp_path}/x.json'.split())
    res,of_predictions = read(tmp_path/'x.json'),16*64*10_000*4/2**20
    (row,),(large,) = res['rows'],res['large']
    assert row['batch_size']==2 and 2<row['to_bf16_dynamic']<6 # moments are two, gradients one more
    assert res['predictions']==[16,64,10_000] and 1.8<large['mib']['to_fp32']/of_predictions<2.5
    assert 0.5<large['over_fp32']['to_bf16_dynamic(rerun=False)']<1.5 and large['over_fp32']['to_fp32']==1
    assert f"| `to_fp32` | 1.00 ({large['mib']['to_fp32']:.0f}) |" in capsys.readouterr().out

@pytest.mark.filterwarnings('ignore')
def test_doctor(tmp_path, capsys):
    "A healthy model, hostile ones, one that nothing is said of, and what is left out where a library is missing"
    find_spec = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as m:
        m.setattr(importlib.util, 'find_spec', lambda name: None if name=='timm' else find_spec(name))
        doctor.main(['--only', 'squeezenet1_1', 'test_vit_relpos', 'hazards', 'tiny_loss', 'MLP, 3 layers', '--steps', '3', '--rounds', '1',
                     '--out', f'{tmp_path}/x.json'])
    res,out = read(tmp_path/'x.json'),capsys.readouterr().out
    worst = {r['name']: r['worst'] for r in res['rows']}
    assert worst.pop('squeezenet1_1')!='warning' and worst.pop('tiny_loss') is None
    assert set(worst)==set(doctor.hazards) and res['in_steps']['MLP, 3 layers'][1]>0
    shown = '`masked_fill` of -1e9','a mask of -1e9 is added','RMS norm, squares of 60'
    assert [worst[o] for o in shown]==['error','warning',None] # by this batch
    assert 'timm is not installed: its 1 healthy models' in out and '| hostile | hazards | 10 |' in out
    assert 'False alarms: none' in out and '`tiny_loss` (trainings)' in out

def test_the_doctor_is_said_to_be_wrong_where_it_is():
    def row(kind, name, worst): return dict(kind=kind, group='g', name=name, worst=worst)
    models = ('healthy','a','warning'),('healthy','b','info'),('hostile','c','info'),('hostile','d','error')
    res = dict(rows=[row(*o) for o in models])
    assert doctor.alarms(res).startswith('False alarms: `a` (g). ') and doctor.alarms(res).endswith('without a warning: `c` (g).')
    assert 'about 1 of 2 models' in doctor.claim(res) and 'about 1 of 2 healthy' in doctor.claim(res)
    assert 'about none of the 1 healthy' in doctor.claim(dict(rows=res['rows'][1:]))
    assert '| healthy | g | 2 | 0 | 1 | 1 | 0 |' in doctor.table(res)

def test_silent(tmp_path, monkeypatch):
    "A program of each kind, drawn until one of each counts"
    monkeypatch.setattr(silent, 'kinds', dict(wrong=[families.bias_at_level], healthy=[families.ordinary]))
    silent.main(f'--n 1 --habits cpu --out {tmp_path}/x.json'.split())
    rows = read(tmp_path/'x.json')['rows']
    wrong,healthy = [silent.counted(rows, kind, 'cpu', 'fp16') for kind in ('wrong','healthy')]
    r = wrong[0]
    assert r['fp16']['plain']>1.5*r['fp32'] and r['fp16']['promoted']==[r['fp16']['part']] and r['fp16']['told']==1
    assert all(o['fp16']['ok'] and not o['fp16']['told'] for o in healthy)
    n = len(wrong)
    assert silent.rates(rows)['wrong']['cpu','fp16']==(n,n) and f'| {n} of {n} (100.0%) |' in silent.table(rows)
    assert f'{n} of {n} (100.0%) end as in fp32' in silent.claim(rows) and 'All healthy programs' in silent.claim(rows)
    on_a_gpu = dict(machine='a GPU', rows=[{**o, 'habits':'cuda'} for o in rows])
    assert f'(a GPU). Of those that half precision makes wrong, all {n} in fp16' in silent.on_a_gpu(on_a_gpu)
    r['fp16']['ok'] = on_a_gpu['rows'][rows.index(r)]['fp16']['ok'] = False
    assert f'makes wrong, {n-1} of {n} in fp16' in silent.on_a_gpu(on_a_gpu)
    assert ' of `bias_at_level`' in silent.by_family(rows) and '`ordinary`' not in silent.by_family(rows)

# %% the policies
def test_replay():
    "Two steps are skipped, on the way from 2^16 to 2^14, where gradients below 2^-39 become 0"
    res = scale_policy.replay((scale_policy.scaler(),scale_policy.skips), [16]*50+[14]*50, {-41:1,-40:1,-39:1,0:1})
    assert res==dict(skipped=2., reruns=0., bits=0., zeros=pytest.approx(100*48/98/2))
    static = scale_policy.replay(scale_policy.policies['static, 512'], [16]*9+[8], {-35:1,-34:1})
    assert static==dict(skipped=pytest.approx(10), reruns=0., bits=7., zeros=50.)

def test_replay_of_what_runs_again():
    "After an outlier that two halvings and a large step answer, and fp32's gradients, the scale comes back by a doubling every eight steps"
    rooms = [16]*10+[8]+[16]*90
    res = scale_policy.replay(scale_policy.policies['ours'], rooms, {0:1})
    below = 2+8*sum(range(1, 11)) # the outlier itself at 2^6 of 2^8, then eight steps each of 10, 9, ... bits
    assert res==dict(skipped=0., reruns=pytest.approx(100*5/101), bits=pytest.approx(below/101), zeros=0.)

def test_replay_is_what_a_scaler_does():
    "Beside `DynamicScaler` on real fp16 gradients: the same steps are skipped"
    rng = torch.Generator().manual_seed(0)
    tops = [2**o for o in (3*torch.randn(300, generator=rng)-2).tolist()]
    s,skipped = DynamicScaler('cpu', growth_interval=20),0
    for t in tops:
        bad = torch.tensor(t*s.get_scale()).half().isinf().item()
        skipped += bad
        s.update(found_inf=bad)
    rooms = [math.floor(scale_policy.top-math.log2(t)) for t in tops]
    res = scale_policy.replay((scale_policy.scaler(growth_interval=20),scale_policy.skips), rooms, {0:1})
    assert res['skipped']==pytest.approx(100*skipped/300) and skipped>10

def test_running_again_is_what_a_fit_does():
    "Beside a fit whose gradient in fp16 is known, with an outlier that only a diagnosis answers"
    rng = torch.Generator().manual_seed(0)
    tops = (torch.randn(120, generator=rng)-2).exp2()
    tops[50] = 2.**16
    batches = timing.Batches([(torch.ones(1, 1), t.view(1, 1)) for t in tops])
    model = torch.nn.Linear(1, 1, bias=False)
    learn = Learner(DataLoaders(batches, []), model, lambda p,y: (p*y).sum(), lr=0.).to_fp16_dynamic(growth_interval=20)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    scaler,history = DynamicScaler('cpu', growth_interval=20),learn.mixed_precision.history
    rooms = [math.floor(scale_policy.top-math.log2(t)) for t in tops.tolist()]
    steps = [scale_policy.runs_again(scaler, room) for room in rooms]
    assert list(zip(history.loss_scale.map(math.log2), history.reruns))==steps and not history.skipped.any()
    assert len({scale for scale,_ in steps})>5 and max(reruns for _,reruns in steps[1:])>3

def test_record_and_replay(tmp_path, capsys):
    args = f'--maxima {tmp_path}/m.json --out {tmp_path}/x.json --steps 120'.split()
    scale_policy.main([*args, '--record', 'tabular regression'])
    (name,real),= read(tmp_path/'m.json')['trainings'].items()
    assert name=='tabular regression' and len(real['rooms'])>=120 and sum(real['octaves'].values())>1000
    scale_policy.main(args) # what was recorded
    for more in (0,2): # the first step of fp16 itself bears the scale that was found, and no larger one
        first = DynamicScaler('cpu', init_scale=2.**(real['rooms'][0]+more))
        learn = trainings[name].make(0).to_fp16_dynamic(init_scale=first.get_scale())
        short_fits.with_steps(learn, 1)
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
        scale,reruns = scale_policy.runs_again(first, real['rooms'][0])
        row = learn.mixed_precision.history.iloc[0]
        assert (math.log2(row.loss_scale),row.reruns,row.skipped)==(scale,reruns,False) and bool(reruns)==bool(more)
    rows = read(tmp_path/'x.json')['rows']
    assert {r['data'] for r in rows if r['kind']=='training'}=={name} and {r['policy'] for r in rows}==set(scale_policy.policies)
    assert '| **`to_fp16_dynamic`** | ' in capsys.readouterr().out

# %% published failures
@pytest.mark.parametrize('name,entry', [('T5','body.encoder.block.1.layer.1.DenseReluDense.wo'), ('XCiT','blocks.1.attn')])
def test_published(name, entry, tmp_path, capsys):
    "A layer whose numbers are too large, and an operation in a module's own code"
    for o in published.needs: pytest.importorskip(o)
    published.main(['--only', name, '--out', f'{tmp_path}/x.json'])
    r, = read(tmp_path/'x.json')['rows']
    assert r['named'] and published.ends(r) and r['plain'].startswith('53% of 15 steps skipped') # all since the fault
    assert [o.rstrip('.') for o in r['promoted']]==[entry] and not r['spare'] and r['half']<=r['could_be']<=r['layers'] and r['pause']>1
    assert f'| [{name}](https://' in (out := capsys.readouterr().out) and 'all 1 fits end' in out

def test_published_finds_what_is_to_spare():
    "A layer too many, and a layer of a module whose code alone is at fault"
    for o in published.needs: pytest.importorskip(o)
    *_,(o,),_ = published.healing('T5')
    wo, = o['new']
    assert published.least('T5', dict(o, new=[wo,'head']))==(['head'],[wo,'head'])
    *_,(o,),_ = published.healing('BLOOM')
    code = 'body.h.1.self_attention.'
    assert published.least('BLOOM', dict(o, new=[code[:-1]]))==([],[code])==published.least('BLOOM', dict(o, new=[code]))
    with pytest.raises(RuntimeError, match='not enough'): published.least('BLOOM', dict(o, new=['head']))

def test_published_says_what_goes_badly():
    good = dict(name='a', link='https://a', says='`wo`', plain='100% of 15 steps skipped', distance=0.001, rounding=0.02, skipped=0,
                named=True, spare=[], half=9, could_be=9, layers=10, pause=5.4, reports=[dict(producer='b.wo', op='linear')])
    bad = dict(good, name='z', distance=0.5, named=False, spare=['b.c'], half=3, reports=[dict(producer='', op=None)])
    table = published.table(dict(rows=[good, bad])).splitlines()
    assert table[2]=='| [a](https://a) | `wo` | 100% | 0.1% | `linear` in `b.wo` | 5 |'
    assert '| **50%** (2% by rounding alone) | no: ' in table[3]
    assert published.claim([good, bad]).count('1 of 2')==3 and 'In 1 of 2 fits' in published.explained([good, bad])
    assert 'The other 1 ends 50% away' in published.explained([good, bad]) and not published.explained([good])
    assert not published.ends(dict(good, skipped=1))

def test_published_without_the_libraries(monkeypatch, capsys):
    monkeypatch.setattr(published, 'needs', ('transformers','no_such_library'))
    with pytest.raises(SystemExit): published.main([])
    assert 'no_such_library must be installed' in capsys.readouterr().err

# %% programs
def _notebook(path, module, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(cells=[dict(cell_type='code', source=s) for s in (f'#| default_exp {module}', *cells)])))

@pytest.mark.slow
def test_compatibility(tmp_path, capsys, monkeypatch):
    "A checkout with two notebooks, one of which is about learners; each mode imports fastai anew"
    monkeypatch.setattr(compatibility, 'modes', ('plain','to_fp16_dynamic'))
    (tmp_path/'fastai').mkdir()
    (tmp_path/'fastai'/'__init__.py').write_text('__version__ = "9.9"')
    _notebook(tmp_path/'nbs'/'01_nothing.ipynb', 'losses', '1/0')
    _notebook(tmp_path/'nbs'/'02_learner.ipynb', 'learner',
        '#| export\nfrom fastai.basics import *\nclass Learner: pass # of the module, and not run',
        'from fastai.test_utils import synth_learner', 'learn = synth_learner()\nn = len(learn.cbs)\ntest_eq(n, 1)',
        'learn.fit(1)', 'test_eq(len(learn.cbs), 3)', '#|eval: false\n1/0', '#|cuda\nx = 1', 'x',
        "from urllib.error import URLError\nif True: y = 1; raise URLError('offline')", '_ = missing',
        'import torch\nfor p in learn.model.parameters(): test_eq(p.dtype, torch.float32)',
        "seen = []\nlearn.model.register_forward_hook(lambda *args: seen.append(1))\nlearn.validate()\nassert seen")
    compatibility.main(f'--fastai {tmp_path} --limit 200 --out {tmp_path}/x.json'.split())
    res = read(tmp_path/'x.json')
    row, = res['rows']
    assert res['checkout']=='9.9' and row['notebook']=='02_learner' and row['cells']==10
    assert row['lacks']=={'a download':1, 'a GPU':2, 'a package':0} and len(row['fails'])==2 # `n`, and `missing`
    out = capsys.readouterr().out
    assert '| 02_learner | 10 | 1 | 2 | 0 |' in out and row['passed']['plain']>=row['passed']['to_fp16_dynamic']>0
    assert all('len(learn.cbs)' in d['source'] for d in row['differs'] if d['mode'].endswith('dynamic'))

def test_reasons():
    def cell(source='', error='AssertionError: ==:\n1\n2', follows=None): return dict(source=source, error=error, follows=follows)
    assert 'callbacks' in compatibility.reason(cell('test_eq(len(tst_learn.cbs), 2)'))
    assert 'precision' in compatibility.reason(cell(error='AssertionError: close:\ntensor([1.0001, 2.5000])\ntensor([1.0000, 2.5003])'))
    assert 'AssertionError' in compatibility.reason(cell(error='AssertionError: close:\ntensor([1.0001])\ntensor([7.5000])'))
    assert 'follows' in compatibility.reason(cell(follows=3))

def test_libraries():
    "What a table says of flows, one of which does not run with ours"
    fine = dict(steps=6, reruns=0, skipped=0, losses=0.001, preds=0.1, kept=[])
    def row(flow, **kw): return dict(library='tsai', flow=flow, **{c: kw.get(c, fine) for c in libraries.contenders})
    res = dict(libraries=dict(tsai='1.0'), rows=[row('a'), row('b', fp16=dict(error='ValueError: no')), row('c', plain=dict(error='x'))])
    assert '| tsai | 1.0 | 2 | 1 | 2 |' in libraries.table(res)
    assert libraries.failing(res).count('ValueError: no')==1 and 'fails with `to_fp16_dynamic`, *b* (tsai)' in libraries.failing(res)

def test_libraries_that_are_missing_are_said(monkeypatch):
    def no_module(): raise ImportError("No module named 'torchio'")
    groups = dict(a=libraries.Group('no-such-package', None, {}), b=libraries.Group('torch', no_module, {}))
    monkeypatch.setattr(libraries, 'groups', groups)
    res = libraries.measure({'a':{}, 'b':{}}, limit=60)
    assert res==dict(libraries={}, rows=[], skipped=dict(a='no-such-package is not installed', b="ImportError: No module named 'torchio'"))
    assert libraries.skipped(res).splitlines()==[f'- not measured: {k}: {v}' for k,v in res['skipped'].items()]

def test_libraries_measured_again_replace_their_rows(monkeypatch):
    "A group that is skipped keeps the rows it has; rows of programs that are gone go"
    monkeypatch.setattr(libraries, 'groups', {k: libraries.Group(k, None, dict.fromkeys('12')) for k in 'abc'})
    def row(library, flow, n): return dict(library=library, flow=flow, n=n)
    old = dict(libraries=dict(b='1', c='1'), skipped=dict(a='no'), rows=[row('b', '1', 0), row('b', 'gone', 0), row('c', '2', 0)])
    new = dict(libraries=dict(a='2', b='2'), skipped=dict(c='no'), rows=[row('b', '2', 1), row('b', '1', 1), row('a', '2', 1)])
    assert libraries.updated(old, new)==dict(libraries=dict(a='2', b='2', c='1'), skipped={},
        rows=[row('a', '2', 1), row('b', '1', 1), row('b', '2', 1), row('c', '2', 0)])

@pytest.mark.slow
def test_libraries_runs_programs(tmp_path):
    "Each in fp32, fp16 and bf16; one half precision cannot hold as it is"
    script = sys.executable,'-W','ignore',Path(libraries.__file__)
    only = 'torch optimizers: SGD(nesterov)',"masked_fill` with -1e9, fastai's Adam"
    subprocess.run([*script, '--only', *only, '--out', tmp_path/'x.json'], check=True)
    easy,hard = read(tmp_path/'x.json')['rows']
    assert easy['flow']=='SGD(nesterov)' and hard['library']==libraries.hard
    for r in (easy,hard):
        for c in ('fp16','bf16'): assert r[c]['steps']==r['plain']['steps']>0==r[c]['skipped'] and r[c]['losses']<0.01
    assert [o['fp16']['kept'] for o in (easy,hard)]==[0,1]

@pytest.mark.skipif(bool(cuda_dispatch.not_here), reason=str(cuda_dispatch.not_here))
def test_cuda_dispatch(tmp_path, capsys):
    "Kernels and casts of a small model, as they can be counted by hand"
    class Small(torch.nn.Sequential):
        def __init__(self): super().__init__(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with patch.dict(cuda_dispatch.models, small=(Small, lambda: torch.empty(2, 4))):
        cuda_dispatch.main(f'--models small --out {tmp_path}/x.json'.split())
    row, = read(tmp_path/'x.json')['rows']
    # input, two weights, two biases; up before the norm, down after it or after the activation
    assert [row[k] for k in cuda_dispatch.contenders]==[[4,0],[11,7],[11,7],[11,7]]
    assert '| small | 4 (0) | 11 (7) | 11 (7) | 11 (7) |' in capsys.readouterr().out
