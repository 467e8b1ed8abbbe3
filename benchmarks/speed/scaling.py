"How the cost of mixed precision itself grows with the number of tensors, with their size, and with what else a learner has"
import argparse,json,time,warnings
from functools import partial
from pathlib import Path
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.utils import get_total_norm
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,DataLoaders,Learner,default_device,set_seed
    from fastai_amp16.all import FusedAdam
    from fastai_amp16.train.history import StepRecord
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fused_adamw
from benchmarks.shared.machine import machine
from benchmarks.shared.timing import Batches,by_fastai,interleaved,quartiles,ratio

half = torch.float16
bytes_per_element = (4+2)+(2+4)+(4+4)+4 # read and written: weight to half, gradient to fp32, unscale, norm

class Given(torch.autograd.Function):
    "A loss without arithmetic, with ready-made gradients"
    @staticmethod
    def forward(ctx, grads, *weights):
        ctx.grads = grads
        return weights[0].new_zeros((), dtype=torch.float32)
    @staticmethod
    def backward(ctx, _): return None,*ctx.grads

class Weights(nn.Module):
    "`n` linear layers of `size` weights each, with gradients for half-precision copies, or without gradients if `grads` is False"
    def __init__(self, n, size, device, grads=True):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, 1, bias=False, device=device) for _ in range(n)])
        self.grads = [torch.full((1,size), 1e-3, dtype=half, device=device) if grads else None for _ in range(n)]
    def forward(self, x): return Given.apply(self.grads, *[l.weight for l in self.layers])

class Idle(FusedAdam):
    "An optimizer that takes no steps"
    def step(self, closure=None): pass

def learner(to, model, batches):
    "A contender: fastai's loop, with an optimizer that does nothing"
    device = next(model.parameters()).device
    learn = Learner(DataLoaders(batches, [], device=device), model, lambda p,*_: p, Idle, lr=0.)
    return by_fastai(getattr(learn, to)(), batches)

def by_hand(model, batches, mixed=True):
    "A contender: what autocast, `GradScaler` and `clip_grad_norm_` do in a PyTorch loop, or without `mixed` the loop alone"
    ws = list(model.parameters())
    opt,scaler = torch.optim.SGD(ws, lr=0.),torch.amp.GradScaler(ws[0].device.type)
    opt.step = lambda: None
    def run():
        for _ in batches:
            if mixed:
                scaler.scale(Given.apply(model.grads, *[w.to(half) for w in ws])).backward()
                scaler.unscale_(opt)
                get_total_norm([w.grad for w in ws])
                scaler.step(opt)
                scaler.update()
            else: Given.apply(model.grads, *ws).backward()
            opt.zero_grad()
        return batches.steps()
    return run

def copy(n_bytes, device):
    "A contender: one copy that reads half of `n_bytes` and writes the other half"
    a = torch.ones(max(1, n_bytes//8), device=device)
    b = torch.ones_like(a)
    batches = Batches([0]*10)
    def run():
        for _ in batches:
            b.copy_(a)
            b[0].item() # waits for the device
        return batches.steps()
    return run

def measure(n, size, rounds, device):
    "The time that mixed precision adds to a step, and that of copying as many bytes, in milliseconds"
    batches = Batches([(torch.zeros(1, device=device),torch.zeros(1, device=device))]*(5 if n*size>1e7 else 12))
    def weights(grads=True): return Weights(n, size, device, grads)
    t = interleaved({'ours': learner('to_fp16_dynamic', weights(), batches), 'without': learner('to_fp32', weights(False), batches),
                     'by hand': by_hand(weights(), batches), 'by hand, without': by_hand(weights(False), batches, mixed=False),
                     'copy': copy(n*size*bytes_per_element, device)}, rounds)
    def more(a, b): return [x-y for x,y in zip(a, b)]
    costs = dict(ours=more(t['ours'], t['without']), by_hand=more(t['by hand'], t['by hand, without']), copy=t['copy'])
    return dict(tensors=n, elements=n*size, **{k: [1e3*o for o in quartiles(v)] for k,v in costs.items()})

# %% a tiny model in a learner that has much else
def layers(n):
    "A model of `n` modules"
    return nn.Sequential(nn.Linear(8, 8), *[nn.ReLU() for _ in range(n-2)], nn.Linear(8, 1))

class Summed(nn.Module):
    "`n` tensors, all trained"
    def __init__(self, n):
        super().__init__()
        self.parts,self.out = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(n)]),nn.Linear(8, 1)
    def forward(self, x): return self.out(x+1e-3*torch.stack([*self.parts]).sum(0))

class Own(nn.Module):
    "A module of one's own"
    def __init__(self):
        super().__init__()
        self.n,self.name,self.state,self.inner = 0,'own',None,None
    def forward(self, x): return x

class Beside(nn.Module):
    "A tiny model that also has modules which do not run, or frozen tensors"
    def __init__(self, idle=(), n_frozen=0):
        super().__init__()
        self.layers,self.idle = layers(4),nn.ModuleList(idle)
        self.frozen = nn.ParameterList([nn.Parameter(torch.randn(8), requires_grad=False) for _ in range(n_frozen)])
    def forward(self, x): return self.layers(x)

class Has(Callback):
    "Does nothing, before each batch"
    def __init__(self, i): self.i,self.items = i,[i]
    def before_batch(self): pass

class Long(Callback):
    "Lets the fit have a long history from its first batch on"
    def before_fit(self): self.is_long = False
    def before_batch(self):
        if self.is_long: return
        self.is_long,n,recorder = True,100_000,self.learn.recorder
        recorder.losses += [torch.tensor(1.)]*n
        recorder.lrs += [1e-3]*n
        recorder.iters += range(n)
        if log := getattr(self.learn.mixed_precision, 'log', None): log.steps += [StepRecord(0, 'fit', 0, 1e-3, 1., 0, False, 1.)]*n

def callbacks(n): return [type(f'Has{i}', (Has,), {})(i) for i in range(n)]
cases = { # what makes the model, the callbacks, and the number of lists that the learner has
    **{f'{n} modules': (partial(layers, n), list, 0) for n in (10,100,1000)},
    '1000 trained tensors': (lambda: Summed(1000), list, 0), '20 callbacks': (lambda: layers(4), lambda: callbacks(20), 0),
    'history of 100,000 steps': (lambda: layers(4), lambda: [Long()], 0),
    '1000 batch norms that do not run': (lambda: Beside([nn.BatchNorm1d(8) for _ in range(1000)]), list, 0),
    '1000 frozen tensors': (lambda: Beside(n_frozen=1000), list, 0),
    '1000 own modules that do not run': (lambda: Beside([Own() for _ in range(1000)]), list, 0),
    '1000 lists in the learner': (lambda: layers(4), list, 1000)}

def case(name, to, steps, device):
    "A contender: a learner with what the case has"
    set_seed(0)
    model,cbs,n_lists = cases[name]
    clock = time.process_time if device.type=='cpu' else time.perf_counter # on a CPU, other programs do not count
    batches = Batches([(torch.randn(16, 8, device=device),torch.randn(16, 1, device=device)) for _ in range(steps)], clock)
    learn = Learner(DataLoaders(batches, [], device=device), model(), nn.MSELoss(), fused_adamw, lr=1e-3, cbs=cbs())
    for i in range(n_lists): setattr(learn, f'list_{i}', [i])
    return by_fastai(to(learn), batches)

def measure_case(name, steps, rounds, device):
    "A step with `to_fp16` and one with `to_fp16_dynamic` and the same optimizer, in milliseconds"
    t = interleaved({to: case(name, getattr(Learner, to), steps, device) for to in ('to_fp16','to_fp16_dynamic')}, rounds)
    return dict(case=name, over=ratio(t['to_fp16_dynamic'], t['to_fp16']), **{k: [1e3*o for o in quartiles(v)] for k,v in t.items()})

def table(rows):
    "A Markdown table"
    def cells(r): return r['case'],*(f'{r[k][1]:.2f}' for k in ('to_fp16','to_fp16_dynamic'))
    return markdown.table(['a tiny model, and', '`to_fp16`, ms', '`to_fp16_dynamic`, ms'], map(cells, rows))

def chart(res, path):
    fig = Figure(figsize=(10,4), layout='constrained')
    panels = (('tensors', res['by_number'], f"number of tensors, {res['size']} elements each"),
              ('elements', res['by_size'], f"number of elements, in {res['number']} tensors"))
    lines = (('ours', 'to_fp16_dynamic', 'o-'), ('by_hand', 'PyTorch loop: autocast, GradScaler, norm', 's-'),
             ('copy', f'copying as many bytes ({bytes_per_element} per element)', 'k--'))
    for ax,(key,rows,what) in zip(fig.subplots(1, 2), panels):
        for k,label,style in lines: ax.plot([r[key] for r in rows], [r[k][1] for r in rows], style, label=label, ms=4)
        ax.set(xscale='log', yscale='log', xlabel=what, ylabel='ms per step')
        ax.grid(alpha=0.3)
    fig.legend(*ax.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    fig.suptitle(f"What mixed precision adds to a step ({res['machine']})")
    fig.savefig(path, dpi=100)

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--numbers', type=int, nargs='+', default=[10, 30, 100, 300, 1000, 3000, 10_000], help='numbers of tensors')
    p.add_argument('--sizes', type=int, nargs='+', default=[10**i for i in range(2, 8)], help='elements per tensor')
    p.add_argument('--number', type=int, default=10, help='number of tensors if sizes vary')
    p.add_argument('--size', type=int, default=100, help='elements per tensor if numbers vary')
    p.add_argument('--cases', nargs='*', choices=cases, default=[*cases], metavar='CASE', help='what else a learner has')
    p.add_argument('--steps', type=int, default=24, help='steps per round for these')
    p.add_argument('--rounds', type=int, default=11, help='rounds')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    device = default_device()
    by_number = [measure(n, a.size, a.rounds, device) for n in a.numbers]
    by_size = [measure(a.number, s, a.rounds, device) for s in a.sizes]
    by_case = [measure_case(name, a.steps, a.rounds, device) for name in a.cases]
    res = dict(machine=machine(), number=a.number, size=a.size, rounds=a.rounds, by_number=by_number, by_size=by_size, by_case=by_case)
    for r in by_number+by_size:
        print(f"{r['tensors']:6} tensors {r['elements']:10} elements:", *(f"{k} {r[k][1]:.3g} ms" for k in ('ours','by_hand','copy')))
    print(table(by_case))
    a.out.write_text(json.dumps(res, indent=1)+'\n')
    chart(res, a.out.with_suffix('.png'))

def section(res):
    few,many,large = (res[k][i] for k,i in (('by_number',0),('by_number',-1),('by_size',-1)))
    largest = max(r['to_fp16_dynamic'][1]-r['to_fp16'][1] for r in res['by_case'])
    summary = 'A model of four small layers (or of as many modules as the row says), and what its learner has besides'
    return f"""### Cost by number and size of tensors

With {few['tensors']} small tensors, mixed precision adds {few['ours'][1]:.2g} ms to a step ({few['by_hand'][1]:.2g} ms in a loop written
by hand); with {many['tensors']:,} tensors, it adds {many['ours'][1]:.0f} ms ({many['by_hand'][1]:.0f} ms).

![Time that mixed precision adds to a step, by number of tensors and by number of elements](speed/scaling.png)

For few small tensors, nearly all of this time is Python and fastai's events. With {large['elements']:,} elements, it is
{large['ours'][1]:.0f} ms ({large['by_hand'][1]:.0f} ms in a loop written by hand); a copy that reads and writes as many bytes
takes {large['copy'][1]:.0f} ms.

The time covers casts of weights and gradients, unscaling, the norm, the check for overflow, and fastai's events. There is no arithmetic,
the optimizer does nothing, and the time of the same loop without mixed precision is subtracted. {markdown.ran(res)}

A step also takes time for whatever a batch may change. In the learners below, with up to 1000 modules, tensors or lists, it takes at most
{largest:.1f} ms longer than with fastai's `to_fp16`.

{markdown.folded(summary, table(res['by_case']))}"""

if __name__=='__main__': main()
