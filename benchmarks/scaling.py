"How the cost of mixed precision itself grows with the number of tensors and with their size, compared with copying as many bytes"
import argparse,json,warnings
from pathlib import Path
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.utils import get_total_norm
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoaders,Learner,default_device
    from fastai_amp16.all import FusedAdam
from machine import machine
from timing import Batches,by_fastai,interleaved,quartiles

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
    p.add_argument('--rounds', type=int, default=11, help='rounds')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    device = default_device()
    by_number = [measure(n, a.size, a.rounds, device) for n in a.numbers]
    by_size = [measure(a.number, s, a.rounds, device) for s in a.sizes]
    res = dict(machine=machine(), number=a.number, size=a.size, rounds=a.rounds, by_number=by_number, by_size=by_size)
    for r in by_number+by_size:
        print(f"{r['tensors']:6} tensors {r['elements']:10} elements:", *(f"{k} {r[k][1]:.3g} ms" for k in ('ours','by_hand','copy')))
    a.out.write_text(json.dumps(res, indent=1)+'\n')
    chart(res, a.out.with_suffix('.png'))

if __name__=='__main__': main()
