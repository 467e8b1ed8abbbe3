"The time of a step with `torch.compile` and without: this package, fastai's `to_fp16`, and a hand-written PyTorch loop"
from copy import deepcopy
from functools import partial
import torch
from benchmarks.speed.step_cost import data,fit,models,ours,shown,wrapper # first: it hides a warning of fastai's import
from fastai.basics import default_device,set_seed
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import by_hand,interleaved,milliseconds,ratio

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
        return dict(model=name, width=sizes[name], contender=k, compiled=compiled, ms=milliseconds(t), **ratios)
    return [row(*k, t) for k,t in times.items()]

short = {hand: 'PyTorch loop', fastais: '`to_fp16`, fused AdamW', own: '`to_fp16_dynamic`'}
def table(res):
    "A Markdown table"
    of = {(r['model'],r['contender'],r['compiled']): r for r in res['rows']}
    def cell(model, k):
        compiled,plain = of[model,k,True],of[model,k,False]
        return f"{compiled['over_uncompiled'][1]:.2f} ({compiled['ms'][1]:.1f} of {plain['ms'][1]:.1f})"
    lines = ((shown(model), *(cell(model, k) for k in stacks)) for model in dict.fromkeys(r['model'] for r in res['rows']))
    return markdown.table(['compiled / uncompiled (ms)', *short.values()], lines)

def section(res):
    ours = [r for r in res['rows'] if r['compiled'] and r['contender']==own]
    widths = markdown.listed(r['width'] for r in res['rows'][::2*len(stacks)])
    return f"""### Time per compiled step

With `torch.compile`, a step with `to_fp16_dynamic` takes {markdown.span(r['over_uncompiled'][1] for r in ours)} of the time without it, and
{markdown.span(r['over_hand'][1] for r in ours)} times as long as in a PyTorch loop written by hand, compiled as well.

The models and the loop are those of [Time per step](#time-per-step), with widths of {widths}, compiled by {res['backend']}.
{markdown.ran(res, f"{res['rounds']} rounds of {res['steps']} steps at batch size {res['batch_size']}")}

{table(res)}"""

def main(args=None):
    p = parser(__file__, __doc__, bs=(32,'batch size'), steps=(10,'steps per round'), rounds=(21,'rounds'), models=(models,'which models'),
               backend=('inductor','backend of `torch.compile`'))
    a = p.parse_args(args)
    torch.set_num_threads(1)
    rows = [r for name in a.models for r in measure(name, a)]
    res = dict(machine=machine(), backend=a.backend, batch_size=a.bs, steps=a.steps, rounds=a.rounds, rows=rows)
    print(table(res))
    store(res, a.out)

if __name__=='__main__': main()
