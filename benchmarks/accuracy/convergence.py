"Where trainings in fp16 and bf16 end, compared with fp32 over the same seeds"
import math,warnings,zlib
import fastai,torch
from fastcore.all import nested_attr
from matplotlib.figure import Figure
from scipy.stats import t as student
from benchmarks.accuracy.trainings import Callback,trainings # first: it hides a warning of fastai's import
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fastais
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store

contenders = ('to_fp32','to_fp16','to_fp16_dynamic','to_bf16_dynamic')

class Watch(Callback):
    "Counts skipped steps, and computes a checksum of the first weights and of all batches"
    order,skipped,checksum = -5,0,0
    def _add(self, tensors):
        for o in tensors: self.checksum = zlib.crc32(o.detach().cpu().numpy().tobytes(), self.checksum)
    def before_fit(self): self._add(self.model.parameters())
    def before_batch(self): self._add((*self.xb, *self.yb))
    def after_cancel_step(self): self.skipped += 1

def run(name, to, seed, opt_func=None):
    "Trains and returns the final metric (`None` if there is none or it is not finite), counts and errors"
    t,watch,figure,error = trainings[name],Watch(),math.nan,None
    learn = t.make(seed).add_cb(watch)
    if opt_func: learn.opt_func = opt_func
    try:
        with fastais(), learn.no_bar(), learn.no_logging(): getattr(learn, to)().fit_one_cycle(t.epochs, t.lr)
        figure = float(learn.recorder.values[-1][-1])
    except Exception as e: error = f'{type(e).__name__}: {e}'
    return dict(figures=figure if math.isfinite(figure) else None, skipped=watch.skipped, errors=error, checksum=watch.checksum,
                reruns=nested_attr(learn, 'mixed_precision.n_rerun', 0), promoted=len(nested_attr(learn, 'mixed_precision.promoted', [])))

def compare(name, seeds):
    "A row for each contender"
    runs = [{to: run(name, to, seed) for to in contenders} for seed in range(seeds)]
    for o in runs:
        if len({r['checksum'] for r in o.values() if not r['errors']})>1: raise RuntimeError(f'{name}: first weights or batches differ')
    metric,keys = trainings[name].make(0).metrics[0].name,('figures','skipped','reruns','promoted','errors')
    return [dict(training=name, metric=metric, contender=to, **{k: [o[to][k] for o in runs] for k in keys}) for to in contenders]

def figures(row): return torch.tensor([math.nan if o is None else o for o in row['figures']], dtype=torch.float64)
def trouble(row): return next((o.split(':')[0] for o in row['errors'] if o), 'not finite')

def difference(row, base):
    "The mean of the paired differences, its standard error, and whether it is significant at 5% (by chance, 1 in 20 is)"
    d = figures(row)-figures(base)
    mean,error = d.mean().item(),d.std().item()/len(d)**0.5
    return mean,error,bool(abs(mean)>student.ppf(0.975, len(d)-1)*error)

def cell(row, base):
    "Mean ± standard deviation in fp32; elsewhere the difference from it ± standard error, bold if significant"
    f,(mean,error,told) = figures(row),difference(row, base)
    if f.isnan().any(): return f'{trouble(row)} ({int(f.isnan().sum())} of {len(f)})'
    return f'{f.mean():.3f} ± {f.std():.3f}' if row is base else f'{"**"*told}{mean:+.4f}{"**"*told} ± {error:.4f}'

def ends(row, base):
    "Whether all seeds end with a finite metric, not significantly different from fp32"
    return not figures(row).isnan().any().item() and not difference(row, base)[2]

def claim(res):
    "How many trainings end where fp32 ends, in a sentence"
    by = {r['training']: {} for r in res['rows']}
    for r in res['rows']: by[r['training']][r['contender']] = r
    n = {to: sum(ends(o[to], o['to_fp32']) for o in by.values()) for to in contenders}
    return (f"`to_fp16_dynamic` ends without a significant difference from fp32 in {n['to_fp16_dynamic']} of {len(by)} trainings, "
            f"`to_bf16_dynamic` in {n['to_bf16_dynamic']}, and fastai's `to_fp16` in {n['to_fp16']}")

def table(res):
    "A Markdown table"
    names = list(dict.fromkeys(r['training'] for r in res['rows']))
    def line(some): return some[0]['training'],some[0]['metric'],*(cell(r, some[0]) for r in some)
    rows = [line([r for r in res['rows'] if r['training']==name]) for name in names]
    return markdown.table(['training','metric',*(f'`{o}`' for o in contenders)], rows, 'l')

def section(res):
    seeds = len(res['rows'][0]['figures'])
    summary = 'In fp32, the final metric ± standard deviation; elsewhere the difference ± standard error, bold if significant'
    return f"""### Whole trainings

{claim(res)}.

![Differences between the final metrics and those of fp32, a dot per seed](accuracy/convergence.png)

Each training runs with {seeds} seeds. With a given seed, all precisions get the same data, weights and batches. A difference is significant
if a paired t-test says so at the 5% level. By chance, 1 in 20 would be; with {seeds} seeds, a difference must be about three standard
errors large. fastai's `to_fp16` fails with raw counts, which are beyond fp16, and with an LSTM, since PyTorch has none in fp16
for CPUs; `to_fp16_dynamic` computes it in fp32 there. {markdown.ran(res)}

{markdown.folded(summary, table(res))}"""

def chart(res):
    "A dot for each seed; the gray bar spans one standard deviation of fp32 to either side"
    trained = {r['training']: [o for o in res['rows'] if o['training']==r['training']] for r in res['rows']}
    ax = (fig := Figure(figsize=(9, 2+0.5*len(trained)), layout='constrained')).subplots()
    for i,(base,*rest) in enumerate(trained.values()):
        std,label = figures(base).std().item(),None if i else 'standard deviation of to_fp32'
        ax.barh(i, 2*std, left=-std, height=0.85, color='0.88', label=label)
        for j,row in enumerate(rest):
            d,y,color = figures(row)-figures(base),i+0.25*(j-1),f'C{j}'
            ax.plot(d, [y]*len(d), 'o', color=color, alpha=0.6, ms=5, mec='none', label=label and row['contender'])
            if d.isnan().all(): ax.text(-1.1, y, trouble(row), color=color, va='center', size=8)
    ax.axvline(0, color='0.5', lw=0.8)
    ax.set_xscale('symlog', linthresh=0.02)
    ax.set_xticks(ticks := [-1,-0.1,-0.02,-0.01,0,0.01,0.02,0.1], [f'{o:+g}' if o else '0' for o in ticks])
    ax.set_yticks(range(len(trained)), [f"{name}\n({rows[0]['metric']})" for name,rows in trained.items()])
    ax.set(xlabel='difference from fp32 (linear within ±0.02, logarithmic beyond)', xlim=(-1.2,0.2), ylim=(len(trained)-0.5,-0.5))
    fig.suptitle(f"Final metrics, compared with fp32 and the same seed ({len(res['rows'][0]['figures'])} seeds)")
    fig.legend(loc='outside lower center', ncols=4)
    return fig

def main(argv=None):
    p = parser(__file__, __doc__, 'file for the results; the chart goes next to it', seeds=(5,'number of seeds, at least two'),
               only=(trainings,'which trainings'))
    a = p.parse_args(argv)
    res = dict(machine=machine(), fastai=fastai.__version__, rows=[])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in a.only: res['rows'] += compare(name, a.seeds)
    print(table(res))
    store(res, a.out)
    chart(res).savefig(a.out.with_suffix('.png'), dpi=120)

if __name__=='__main__': main()
