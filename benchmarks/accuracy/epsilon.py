"Where whole trainings end with another eps of Adam's than 1e-5, in fp32 and in fp16, over the same seeds"
import warnings
from functools import partial
import fastai
from benchmarks.accuracy.trainings import trainings # first: it hides a warning of fastai's import
from benchmarks.accuracy.convergence import cell,difference,run
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from fastai_amp16.all import AdamW16

all_eps = (1e-5,1e-4,1e-8) # that of `AdamW16` is first
precisions = ('to_fp32','to_fp16_dynamic')

def written(eps): return f'{eps:.0e}'.replace('e-0', 'e-')

def compare(name, seeds):
    "A row for each precision and eps"
    metric = trainings[name].make(0).metrics[0].name
    def row(to, eps):
        ends = [run(name, to, o, partial(AdamW16, eps=eps))['figures'] for o in range(seeds)]
        return dict(training=name, metric=metric, precision=to, eps=eps, figures=ends)
    return [row(to, eps) for to in precisions for eps in all_eps]

def groups(res):
    "The rows of each training in each precision, by eps"
    by = {}
    for r in res['rows']: by.setdefault((r['training'],r['precision']), []).append(r)
    return by

def counts(res):
    "In how many of the trainings each other eps than the first is significantly better, and worse"
    found = {(to,eps): [0,0] for to in precisions for eps in all_eps[1:]}
    for (_,to),(base,*others) in groups(res).items():
        for r in others:
            mean,_,told = difference(r, base)
            if told: found[to,r['eps']][mean<0] += 1
    return [dict(precision=to, eps=eps, better=better, worse=worse) for (to,eps),(better,worse) in found.items()]

def table(res):
    "A Markdown table: with the first eps the metric, with each other one the difference from it"
    first,*others = map(written, dict.fromkeys(r['eps'] for r in res['rows']))
    head = ['training','precision',f'eps {first}',*(f'{o} instead' for o in others)]
    def line(name, to, rows): return name,to.split('_')[1],*(cell(r, rows[0]) for r in rows)
    return markdown.table(head, (line(*o, rows) for o,rows in groups(res).items()), 'llr')

def section(res):
    n,base = len(groups(res))//len(precisions),written(res['rows'][0]['eps'])
    of = {(written(o['eps']),o['precision'].split('_')[1]): o for o in res['counts']}
    def many(eps, how):
        counts = {k: of[eps,k][how] for k in ('fp16','fp32')}
        return ' and '.join(f'{o} in {k}' for k,o in counts.items()) if any(counts.values()) else 'none'
    def claim(eps): return (f"With {eps}, {many(eps, 'better')} ended significantly better than with {base}, and {many(eps, 'worse')} "
                            "significantly worse.")
    told = [r for rows in groups(res).values() if any(difference(o, rows[0])[2] for o in rows[1:]) for r in rows]
    claims = ' '.join(map(claim, dict.fromkeys(eps for eps,_ in of)))
    title = f'The significant ones (bold): metric ± standard deviation with {base}, and differences from it ± standard error'
    shown = '\n\n'+markdown.folded(title, table(dict(rows=told))) if told else ''
    return f"""### Adam's eps

We ran {n} trainings with several values of `AdamW16`'s eps. {claims} All other differences may be chance.

The trainings, the test of significance and the number of seeds are those of [Whole trainings](#whole-trainings).
{markdown.ran(res)}{shown}"""

def main(args=None):
    p = parser(__file__, __doc__, seeds=(5,'number of seeds, at least two'), only=(trainings,'which trainings'))
    a = p.parse_args(args)
    res = dict(machine=machine(), fastai=fastai.__version__, rows=[])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in a.only:
            res['rows'] += compare(name, a.seeds)
            print(table(dict(rows=res['rows'][-len(precisions)*len(all_eps):])), flush=True)
    res['counts'] = counts(res)
    store(res, a.out)

if __name__=='__main__': main()
