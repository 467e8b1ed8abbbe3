"""Policies for the loss scale, replayed on the largest gradients of real trainings and on heavy tails

`--record` trains and writes gradient_maxima.json. Without it, the script replays the recorded gradients."""
import json,math,warnings
from pathlib import Path
from statistics import fmean
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback
    from fastai_amp16.all import DynamicScaler
    from fastai_amp16.precision.plan import convs
    from fastai_amp16.train.decide import Attempts,Next,Outcome,what_next
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store

top,flushed = math.log2(65504),-25 # log2 of the largest number in fp16, and of the number below which all round to 0

# %% recording
class Maxima(Callback):
    """Records for each training step the largest scale, as a power of two, at which no gradient in half precision overflows, and in each
    50th step how many gradients there are per octave. To be used with `to_bf16_dynamic`, which uses half precision where fp16 would, and
    never overflows."""
    run_valid,low,high = False,-80,40
    def before_fit(self):
        self.rooms,self.octaves = [],torch.zeros(self.high-self.low)
        self.hooks = [m.register_forward_hook(self.watch) for m in self.learn.model.modules()]
    def after_fit(self):
        for h in self.hooks: h.remove()
    def before_batch(self): self.grads = []
    def watch(self, module, args, out):
        if not self.learn.training: return
        def note(grad): self.grads.append(grad.detach())
        for t in out if isinstance(out, (tuple,list)) else [out]:
            if isinstance(t, torch.Tensor) and t.dtype==torch.bfloat16 and t.requires_grad: t.register_hook(note)
    def before_step(self):
        plan = self.learn.mixed_precision.ready()
        cast = torch.nn.Linear,torch.nn.MultiheadAttention,*convs
        half = [m for m in plan.model.modules() if isinstance(m, cast) and m not in plan.in_fp32]
        gs = self.grads+[p.grad for m in half for p in m.parameters(recurse=False) if p.grad is not None] # weights that autocast casts
        self.rooms.append(math.floor(top-math.log2(max(g.abs().max().item() for g in gs))))
        if len(self.rooms)%50==0:
            for g in gs: self.octaves += torch.histc(g[g!=0].float().abs().log2(), len(self.octaves), self.low, self.high)

def record(names, steps):
    from benchmarks.accuracy.trainings import trainings # slow to import, and not needed for a replay
    torch.set_num_threads(1)
    res = {}
    for name in names or trainings:
        t = trainings[name]
        learn = t.make(0).to_bf16_dynamic()
        learn.add_cb(Maxima())
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(math.ceil(steps/len(learn.dls.train)), t.lr)
        res[name] = dict(rooms=learn.maxima.rooms, octaves={o: int(n) for o,n in enumerate(learn.maxima.octaves.tolist(), Maxima.low) if n})
        print(name, len(learn.maxima.rooms), 'steps, room from', min(learn.maxima.rooms), 'to', max(learn.maxima.rooms))
    return res

# %% heavy tails
def heavy_tails(steps):
    "Maxima around 1, independent from step to step, from distributions with light to heavy tails"
    rng = torch.Generator().manual_seed(0)
    u,n = torch.rand(3, steps, generator=rng, dtype=torch.float64),torch.randn(2, steps, generator=rng, dtype=torch.float64)
    logs = {'log-normal, σ=1': n[0]/math.log(2), 'log-normal, σ=2': 2*n[1]/math.log(2),
            'Pareto, α=2': -u[0].log2()/2, 'Pareto, α=1': -u[1].log2(),
            '1 in 500 a thousand times as large': torch.where(u[2]<1/500, 10., 0.)}
    return {k: [math.floor(top-o) for o in v.tolist()] for k,v in logs.items()}

# %% policies: each returns the scale of a step, as a power of two, and updates the scaler
def skips(scaler, room):
    "Skips a step whose gradients overflow; returns the scale of the step (`None` if it is skipped) and the number of reruns"
    scale = math.log2(scaler.get_scale())
    scaler.update(found_inf=scale>room)
    return (None if scale>room else scale),0

def runs_again(scaler, room):
    "What this package does: runs the batch again until its gradients are finite"
    step,reruns,what = Attempts(floor=scaler.min_scale, proven=scaler.proven, scale=scaler.get_scale(), norm=1.),0,None
    while what is not Next.step:
        outcome = Outcome.overflow if math.log2(step.scale)>room else Outcome.fine
        step.note(outcome)
        what,lower = what_next(step, outcome)
        if what is Next.skip: return None,reruns
        if what is Next.diagnose: # it measures the gradients
            step.diagnoses,lower = step.diagnoses+1,max(scaler.min_scale, 2.**(room-1))
        if what is Next.reference: step.suspect_norm,lower = step.norm,step.scale # fp32's gradients are as large
        step.kind = what if what is Next.reference else Next.again
        if what is not Next.step: step.scale,reruns = lower,reruns+1
    scaler.room = room
    scaler.took(step.scale)
    return math.log2(step.scale),reruns

def scaler(**kwargs): return lambda: DynamicScaler('cpu', **kwargs)
torchs = dict(growth_interval=2000, min_scale=2.**-126, max_scale=math.inf)

class Icefall(DynamicScaler):
    "PyTorch's policy from a scale of 1, with two ways to grow faster while the scale is small"
    def __init__(self): super().__init__('cpu', init_scale=1., **torchs); self.i = 0
    def update(self, found_inf):
        super().update(found_inf=found_inf)
        self.i += 1
        if self.i%100==0 and (self.get_scale()<8 or self.get_scale()<32 and self.i%400==0): super().update(2*self.get_scale())

class IntoRoom(DynamicScaler):
    "Grows only if no gradient since it last grew would have overflowed at the new scale; has to be told the `room` of each step"
    def __init__(self): super().__init__('cpu'); self.least,self.room = math.inf,math.inf
    def took(self, scale):
        before,self.least = self.get_scale(),min(self.least, self.room)
        super().took(scale)
        if self.get_scale()>before and math.log2(self.get_scale())>self.least: self.update(before)
        if self._get_growth_tracker()==0: self.least = math.inf

policies = { # a scaler, and what to do with a batch whose gradients overflow
    'static, 512': (scaler(init_scale=512., dynamic=False),skips),
    'torch': (scaler(**torchs),skips),
    'apex': (scaler(**{**torchs, 'max_scale': 2.**24}),skips),
    'Keras 3': (scaler(**torchs, init_scale=2.**15),skips),
    'DeepSpeed': (scaler(growth_interval=1000, hysteresis=2, min_scale=1., max_scale=math.inf),skips),
    'Megatron-LM': (scaler(init_scale=2.**32, growth_interval=1000, hysteresis=2, min_scale=1., max_scale=math.inf),skips),
    'fairseq': (scaler(init_scale=2.**7, growth_interval=2**14, min_scale=1e-4, max_scale=math.inf),skips),
    'icefall': (Icefall,skips),
    'ours': (scaler(),runs_again),
    'ours, rerun=False': (scaler(),skips),
    **{f'ours, growth_interval={n}': (scaler(growth_interval=n),runs_again) for n in (100,1000,2000,4000)},
    'ours, hysteresis=2': (scaler(hysteresis=2),runs_again),
    'ours, growing into room only': (IntoRoom,runs_again)}

def replay(policy, rooms, octaves):
    """Percentage of steps that are skipped; reruns per 100 steps; how many bits the scale lies below the highest possible one, up to 2^24;
    and percentage of nonzero gradients that round to 0. The last two count only steps that are taken, and are `None` if there are none."""
    make,step = policy
    s,scales,bits,runs = make(),[],[],0
    for room in rooms:
        scale,reruns = step(s, room)
        runs += reruns
        if scale is None: continue
        scales.append(scale)
        bits.append(min(room, 24)-min(scale, 24))
    n,lost = sum(octaves.values()),{}
    for scale in set(scales): lost[scale] = sum(k for o,k in octaves.items() if int(o)<flushed-scale)/n
    percent,taken = 100/len(rooms),len(scales)
    return dict(skipped=percent*(len(rooms)-taken), reruns=percent*runs, bits=sum(bits)/taken if taken else None,
                zeros=100*sum(map(lost.get, scales))/taken if taken else None)

in_json_only = 'ours, growth_interval=1000','ours, growth_interval=4000','ours, hysteresis=2','ours, growing into room only'

columns = {'skipped': 'steps skipped, %', 'reruns': 'reruns per 100 steps', 'bits': 'bits below the best scale',
           'zeros': 'gradients that become 0, %'}

def shown(policy):
    "The name of a policy, as tables show it"
    first,*rest = policy.split(', ')
    if first=='ours':
        if policies[policy][0] is IntoRoom: return '`to_fp16_dynamic`, if it grew only where there is room (not an option)'
        return ', '.join(['**`to_fp16_dynamic`**', *(f'`{o}`' for o in rest)])
    return policy.replace('torch', 'PyTorch').replace('static, ', 'static scale of ')

def mean(rows, policy, key):
    "That over the trainings"
    some = [r[key] for r in rows if (r['policy'],r['kind'])==(policy,'training') and r[key] is not None]
    return fmean(some) if some else math.nan

def claim(rows):
    "How this package compares with PyTorch in the recorded trainings, in a sentence"
    def of(policy): return (mean(rows, policy, k) for k in ('skipped','bits'))
    (skipped,bits),(torchs_skipped,torchs_bits) = of('ours'),of('torch')
    return (f"In recorded trainings, `to_fp16_dynamic` skips {skipped:.2g}% of the steps and stays {bits:.1f} bits below the best possible "
            f"loss scale; with PyTorch's policy, it is {torchs_skipped:.2g}% and {torchs_bits:.1f} bits")

def table(rows):
    "A Markdown table with means over the trainings"
    def line(policy): return shown(policy),*(f'{mean(rows, policy, k):.3g}' for k in columns)
    return markdown.table(['policy', *columns.values()], map(line, dict.fromkeys(r['policy'] for r in rows)))

def section(res):
    n = len({r['data'] for r in res['rows'] if r['kind']=='training'})
    rows = [r for r in res['rows'] if r['policy'] not in in_json_only]
    details = f"""- **Steps skipped**: `to_fp16_dynamic` runs such batches again instead, which **reruns** counts.
- **Bits below the best scale**: how far the scale is below the largest possible one, up to 2^24.
- **Gradients that become 0**: nonzero ones that are too small for fp16 at this scale. The last two columns count only steps that are taken.

{table(rows)}"""
    return f"""### Policies for the loss scale

{claim(res['rows'])}.

A higher loss scale keeps more small gradients from rounding to 0, but overflows more often. `to_fp16_dynamic` lets the scale grow sooner
than PyTorch does, which regains bits at the cost of a few reruns ([the default](../nbs/train/00_scaler.ipynb)).

To compare policies, {n} trainings ([trainings.py](accuracy/trainings.py)) ran in bf16, which never overflows.
[gradient_maxima.json](accuracy/gradient_maxima.json) has the largest scale that each of their steps could have used in fp16. Each policy
is replayed on these steps. [scale_policy.json](accuracy/scale_policy.json) has more settings as well, and artificial gradients that vary
a lot.

{markdown.folded('Each policy: means over the trainings', details)}"""

def main(args=None):
    p = parser(__file__, __doc__, steps=(6000,'steps of each training'))
    p.add_argument('--record', nargs='*', metavar='NAME', help='first train and record these trainings of trainings.py, by default all')
    p.add_argument('--maxima', type=Path, default=Path(__file__).with_name('gradient_maxima.json'), help='file of the recorded gradients')
    a = p.parse_args(args)
    if a.record is not None:
        a.maxima.write_text(json.dumps(dict(machine=machine(), trainings=record(a.record, a.steps))).replace('}, "', '},\n"')+'\n')
    real = json.loads(a.maxima.read_text())['trainings']
    like = next(iter(real.values()))['octaves']
    tails = {k: dict(rooms=v, octaves=like) for k,v in heavy_tails(a.steps).items()}
    rows = [dict(policy=k, kind=kind, data=name, **replay(policy, **o)) for k,policy in policies.items()
            for kind,some in (('training',real),('heavy tail',tails)) for name,o in some.items()]
    res = dict(rows=rows)
    print(table(rows))
    store(res, a.out)

if __name__=='__main__': main()
