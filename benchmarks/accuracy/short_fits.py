"Where short fits end if batches that overflow run again, and if their steps are skipped, compared with fp32 on the same batches"
import warnings
from collections import namedtuple
from functools import partial
from itertools import chain,islice,repeat
from statistics import fmean
import torch
from matplotlib.figure import Figure
from benchmarks.accuracy import trainings # first: it hides a warning of fastai's import
from fastai.basics import DataLoaders,Learner,nn,set_seed
from fastai_amp16.all import GradientNormClip
from benchmarks.shared import hostile,markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import Batches

# `patience`, so that a fit that skips steps does not end early
contenders = {
    'fp32': Learner.to_fp32,
    'skipping': partial(Learner.to_fp16_dynamic, rerun=False, patience=10**6),
    'running again': Learner.to_fp16_dynamic}

# %% trainings
def claims(n):
    "Insurance claims: around 1, and once in a while a thousand"
    x = torch.randn(n, 8)
    return x,torch.exp(x[:,:3].sum(1, keepdim=True)/2+1.5*torch.randn(n, 1))

def heavy_tail(seed):
    def model(): return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    return hostile.learner(seed, claims, model, nn.MSELoss(), hostile.r2, n=2048, n_valid=1024).add_cb(GradientNormClip(1.))

Case = namedtuple('Case', 'make lr what')
cases = {
    'tabular regression': Case(trainings.regression, 1e-2, 'the first scale is too high'),
    'collaborative filtering': Case(trainings.ratings, 1e-2, 'the first scale is too high'),
    'insurance claims': Case(heavy_tail, 1e-2, 'batches with outliers'),
    'broken pixels': Case(hostile.broken_pixels, 1e-2, 'the forward pass overflows')}

# %% fits
def with_steps(learn, n):
    "`learn`, with an epoch of `n` batches"
    dls = learn.dls
    learn.dls = DataLoaders(Batches(list(islice(chain.from_iterable(repeat(dls.train)), n))), dls.valid, device=dls.device)
    return learn

def run(name, to, seed, n):
    "Fits for `n` steps, and returns the validation loss, computed in fp32, and counts of steps and reruns"
    case = cases[name]
    learn = contenders[to](with_steps(case.make(seed), n))
    set_seed(seed, reproducible=True)
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, case.lr)
        steps,mp = len(learn.recorder.losses),getattr(learn, 'mixed_precision', None)
        loss = float(learn.to_fp32().validate()[0])
    counts = dict(skipped=mp.n_skipped, reruns=mp.n_rerun, promoted=mp.promoted) if mp else {}
    return dict(loss=loss, steps=steps, **counts)

def compare(name, n, seeds):
    "A row for each contender except fp32: the distance from the validation loss of fp32 in percent, and counts, by seed"
    runs = [{to: run(name, to, seed, n) for to in contenders} for seed in range(seeds)]
    def distance(o, to): return 100*abs(o[to]['loss']/o['fp32']['loss']-1)
    return [dict(training=name, steps=n, contender=to, distance=[distance(o, to) for o in runs],
                 **{k: [o[to][k] for o in runs] for k in ('loss','skipped','reruns','promoted')}) for to in contenders if to!='fp32']

# %% the result
def percent(x): return f'{x:.0f}%' if x>=10 else f'{x:.2g}%'

def claim(rows, which=min):
    "What the shortest fits show, in a sentence, or with `max` the longest"
    n = which(r['steps'] for r in rows)
    worst = {to: [max(r['distance']) for r in rows if r['contender']==to and r['steps']==n] for to in contenders}
    again,skipping = worst['running again'],worst['skipping']
    if all(a<=s for a,s in zip(again, skipping)):
        near,far = percent(max(again)),percent(max(skipping))
        return f"After {n} steps, fits that run batches again are within {near} of fp32's loss; fits that skip steps are up to {far} off"
    return 'How far from fp32 short fits end'

def table(res):
    "A Markdown table of the largest distances: of a fit that skips steps, and of one that runs batches again"
    by = {}
    for r in res['rows']: by.setdefault(r['training'], {}).setdefault(f"{r['steps']} steps", []).append(percent(max(r['distance'])))
    return markdown.table(['training',*next(iter(by.values()))], ((name,*map(' / '.join, of.values())) for name,of in by.items()))

def section(res):
    few = min(r['steps'] for r in res['rows'])
    lost = markdown.span((fmean(r['skipped']) for r in res['rows'] if (r['contender'],r['steps'])==('skipping',few)), '.0f')
    return f"""### Short fits

{claim(res['rows'])}. Of the {few} steps, skipping loses {lost} (means over seeds). {claim(res['rows'], max)}.
These are four trainings of our own that are hard for fp16.

![Distance from the loss of fp32 after 15, 50 and 150 steps: fits that run batches again end nearer](accuracy/short_fits.png)

The baseline is a fit in fp32 with the same data, weights, batches and dropout. The distance is the difference between the validation
losses, computed in fp32, in percent of the baseline's; the dashed line is at 1%. "Skipping" is `to_fp16_dynamic(rerun=False)`, which starts
at the same loss scale and skips steps as PyTorch's `GradScaler` does. {markdown.ran(res)}

{markdown.folded(f"Each training: the largest distance in {res['seeds']} seeds, skipping / running again", table(res))}"""

def chart(res):
    "A panel for each training, a dot for each seed"
    names,lengths = (list(dict.fromkeys(r[k] for r in res['rows'])) for k in ('training','steps'))
    fig = Figure(figsize=(7, 3*-(-len(names)//2)), layout='constrained')
    axs = fig.subplots(-(-len(names)//2), 2, sharey=True, squeeze=False).flat
    for ax,name in zip(axs, names):
        for to,label,color,marker,shift in (('skipping','steps are skipped','tab:red','x',-0.15),
                                            ('running again','batches run again','tab:blue','o',0.15)):
            rows = [r for r in res['rows'] if (r['training'],r['contender'])==(name,to)]
            points = [(lengths.index(r['steps'])+shift,max(d, least)) for r in rows for d in r['distance']]
            ax.plot(*zip(*points), marker, color=color, alpha=0.7, ms=6, label=label)
        ax.set(title=f'{name}:\n{cases[name].what}', xlabel='steps', yscale='log', xlim=(-0.5,len(lengths)-0.5))
        ax.set_xticks(range(len(lengths)), lengths)
        ax.axhline(1, color='0.5', lw=0.8, ls='--')
        ax.grid(axis='y', alpha=0.3)
    axs[0].yaxis.set_major_formatter(lambda x, _: f'≤ {x:g}' if x==least else f'{x:g}')
    fig.supylabel("distance from fp32's validation loss, %", fontsize='medium')
    fig.legend(*axs[0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
    return fig
least = 1e-3 # percent: the chart shows smaller distances as this

def main(args=None):
    p = parser(__file__, __doc__, 'file for the results; the chart goes next to it', steps=([15,50,150],'lengths of the fits'),
               seeds=(5,'number of seeds'), only=(cases,'which trainings'))
    a = p.parse_args(args)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rows = [r for name in a.only for n in a.steps for r in compare(name, n, a.seeds)]
    res = dict(machine=machine(), seeds=a.seeds, rows=rows)
    print(claim(rows), table(res), sep='\n\n')
    store(res, a.out)
    chart(res).savefig(a.out.with_suffix('.png'), dpi=120)

if __name__=='__main__': main()
