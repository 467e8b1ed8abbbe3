"The scripts of `benchmarks/`, in sizes that show nothing but that all of it runs; no test looks at a time"
import json,math
import pytest,torch
import bf16_cpu,memory,scale_policy,scaling,step_cost,timing
from fastai_amp16.all import DynamicScaler
from trainings import trainings

def read(path): return json.loads(path.read_text())

def test_step_cost(tmp_path, capsys, monkeypatch):
    "What the README claims and no machine changes: operators and reads"
    name,make = next(iter(step_cost.models.items()))
    monkeypatch.setattr(step_cost, 'models', {name: make})
    step_cost.main(f'--rounds 2 --steps 4 --bs 8 --out {tmp_path}/x.json'.split())
    of = {r['contender']: r for r in read(tmp_path/'x.json')['rows']}
    assert list(of)==list(step_cost.stacks) and all(r['ms'][0]>0 for r in of.values()) and '| ours |' in capsys.readouterr().out
    ours,theirs = of[step_cost.own],of[step_cost.first]
    assert ours['tensors']==161 and ours['operators_step']<=30 and ours['reads']==1 and theirs['operators_step']>10*161
    assert of[step_cost.hand]['reads']==0 and of[step_cost.loop]['operators_step']<10

def test_operators_are_counted():
    p = torch.nn.Parameter(torch.ones(3))
    def stack(model, batches):
        def run():
            for x in batches:
                (x*p).sum().backward()
                if (p.grad>0).all(): p.grad.mul_(2).tolist() # gt, all, a read, mul_, and a read without an operator
            return []
        return run
    assert step_cost.count(stack, None, timing.Batches([torch.ones(3)]*4))==dict(operators_forward_backward=6, operators_step=4, reads=2)

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
    scaling.main(f'--numbers 2 5 --sizes 10 100 --number 3 --rounds 2 --out {tmp_path}/x.json'.split())
    res = read(tmp_path/'x.json')
    assert [(r['tensors'],r['elements']) for r in res['by_number']+res['by_size']]==[(2,200),(5,500),(3,30),(3,300)]
    assert (tmp_path/'x.png').stat().st_size>10_000 and all(r['copy'][1]>0 for r in res['by_size'])

@pytest.mark.parametrize('make', [scaling.learner,scaling.by_hand], ids=['ours','by hand'])
def test_scaling_trains_in_half(make):
    "The gradients that are given reach the weights, unscaled"
    model,seen = scaling.Weights(3, 5, torch.device('cpu')),[]
    for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    batches = timing.Batches([(torch.zeros(1),torch.zeros(1))]*2)
    (make('to_fp16_dynamic', model, batches) if make is scaling.learner else make(model, batches))()
    assert len(seen)==6 and all(g.dtype==torch.float32 and torch.equal(g, torch.full((1,5), 1e-3).half().float()) for g in seen)

def test_bf16(tmp_path):
    bf16_cpu.main(f'--width 16 --depth 1 --seq 4 --mlp_width 16 --mlp_depth 1 --bs 2 --mlp_bs 2 --steps 3 --rounds 2 --out {tmp_path}/x.json'.split())
    rows = read(tmp_path/'x.json')['rows']
    assert [r['model'] for r in rows]==['transformer','MLP'] and all(r['ours'][1]>0 and r['by_hand'][1]>0 for r in rows)

def test_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, 'contenders', ('to_bf16_dynamic',))
    memory.main(f'--width 1500 --depth 4 --bs 2 --out {tmp_path}/x.json'.split())
    row, = read(tmp_path/'x.json')['rows']
    assert row['batch_size']==2 and 2<row['to_bf16_dynamic']<6 # moments are two, gradients one more

# %% the policies
def test_replay():
    "Two steps are skipped, on the way from 2^16 to 2^14, where gradients below 2^-39 become 0"
    res = scale_policy.replay(scale_policy.scaler(), [16]*50+[14]*50, {-41:1,-40:1,-39:1,0:1})
    assert res==dict(skipped=2., bits=0., zeros=pytest.approx(100*48/98/2))
    assert scale_policy.replay(scale_policy.policies['static, 512'], [16]*9+[8], {-35:1,-34:1})==dict(skipped=pytest.approx(10), bits=7., zeros=50.)

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
    assert scale_policy.replay(scale_policy.scaler(growth_interval=20), rooms, {0:1})['skipped']==pytest.approx(100*skipped/300) and skipped>10

def test_record_and_replay(tmp_path, capsys):
    args = f'--maxima {tmp_path}/m.json --out {tmp_path}/x.json --steps 120'.split()
    scale_policy.main([*args, '--record', 'tabular regression'])
    (name,real),= read(tmp_path/'m.json')['trainings'].items()
    assert name=='tabular regression' and len(real['rooms'])>=120 and sum(real['octaves'].values())>1000
    scale_policy.main(args) # what was recorded
    for more,skipped in ((0,0),(2,1)): # the first step of fp16 itself bears the scale that was found, and no larger one
        learn = trainings[name].make(0).to_fp16_dynamic(init_scale=2.**(real['rooms'][0]+more))
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, trainings[name].lr)
        assert learn.mixed_precision.history.skipped[0]==skipped
    rows = read(tmp_path/'x.json')['rows']
    assert {r['data'] for r in rows if r['kind']=='training'}=={name} and {r['policy'] for r in rows}==set(scale_policy.policies)
    assert '| ours | ' in capsys.readouterr().out
