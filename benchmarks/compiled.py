"The time of a step with `torch.compile` and without: this package, fastai's `to_fp16`, and a hand-written PyTorch loop"
import argparse,json
from copy import deepcopy
from functools import partial
from pathlib import Path
import torch
from fastai.basics import default_device,set_seed
from machine import machine
from step_cost import data,fit,models,ours,shown,wrapper
from timing import by_hand,interleaved,quartiles,ratio

def compiled(contender, backend):
    "`contender`, with a model that went through `torch.compile`"
    return lambda model,batches: contender(torch.compile(model, backend=backend), batches)

hand,fastais,own = 'PyTorch by hand','fastai `to_fp16`, `OptimWrapper(AdamW, fused=True)`, `GradientClip`','ours'
stacks = {hand: by_hand, fastais: partial(fit, wrapper), own: partial(fit, ours)}
sizes = {'as an xresnet50': 96, '26-block MLP': 128, 'ViT of 6 layers': 64} # wide enough for the arithmetic to matter

def measure(name, a):
    "A row for each contender, compiled and not"
    set_seed(0)
    model,device = models[name](sizes[name]),default_device()
    both = {(k,c): compiled(s, a.backend) if c else s for k,s in stacks.items() for c in (True,False)}
    runs = {k: s(deepcopy(model), data(a.steps, a.bs, device)) for k,s in both.items()}
    times = interleaved(runs, a.rounds)
    def row(k, compiled, t):
        ratios = dict(over_hand=ratio(t, times[hand,compiled]), over_uncompiled=ratio(t, times[k,False]))
        return dict(model=name, width=sizes[name], contender=k, compiled=compiled, ms=[1e3*o for o in quartiles(t)], **ratios)
    return [row(*k, t) for k,t in times.items()]

def table(res):
    "A Markdown table"
    head = ['model', 'training loop', 'compiled', 'ms per step (quartiles)', 'relative to PyTorch loop', 'relative to uncompiled']
    lines = ['| '+' | '.join(head)+' |', '| --- | --- | --- |'+' --: |'*3]
    for r in res['rows']:
        ms,ratios = '{1:.1f} ({0:.1f} to {2:.1f})'.format(*r['ms']),[f'{r[k][1]:.3f}' for k in ('over_hand','over_uncompiled')]
        lines.append('| '+' | '.join([shown(r['model']), shown(r['contender']), 'yes' if r['compiled'] else 'no', ms, *ratios])+' |')
    return '\n'.join(lines)

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,default,what in (('bs',32,'batch size'), ('steps',10,'steps per round'), ('rounds',21,'rounds')):
        p.add_argument('--'+name, type=int, default=default, help=what)
    p.add_argument('--models', nargs='+', choices=models, default=[*models], help='which models')
    p.add_argument('--backend', default='inductor', help='backend of `torch.compile`')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    rows = [r for name in a.models for r in measure(name, a)]
    res = dict(machine=machine(), backend=a.backend, batch_size=a.bs, steps=a.steps, rounds=a.rounds, rows=rows)
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
