"Does Adam's eps of 1e-4 end whole trainings better or worse than smaller ones, in fp32 and in fp16? Over the same seeds"
import argparse,json,warnings
from functools import partial
from pathlib import Path
import fastai
from trainings import trainings # first: it hides a warning of fastai's import
from convergence import difference,figures,run
from fastai_amp16.all import AdamW16
from machine import machine

all_eps = (1e-4,1e-5,1e-8) # that of `AdamW16` is first
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

def _cell(row, base):
    f = figures(row)
    if row is base: return f'{f.mean():.3f} ± {f.std():.3f}'
    mean,error,told = difference(row, base)
    bold = '**' if told else ''
    return f'{bold}{mean:+.4f}{bold} ± {error:.4f}'

def table(res):
    "A Markdown table: with the first eps the metric, with each other one the difference from it"
    first,*others = map(written, all_eps)
    head = ['training','metric','precision',f'eps {first}',*(f'{o} instead' for o in others)]
    lines = [head,['---']*3+['--:']*len(all_eps)]
    for (name,to),rows in groups(res).items():
        lines.append([name,rows[0]['metric'],to.split('_')[1],*(_cell(r, rows[0]) for r in rows)])
    return '\n'.join(f"| {' | '.join(o)} |" for o in lines)

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--seeds', type=int, default=5, help='number of seeds, at least two')
    p.add_argument('--only', nargs='+', choices=trainings, default=list(trainings), metavar='NAME', help='which trainings')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    res = dict(machine=machine(), fastai=fastai.__version__, rows=[])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in a.only:
            res['rows'] += compare(name, a.seeds)
            print(table(dict(rows=res['rows'][-len(precisions)*len(all_eps):])), flush=True)
    res['counts'] = counts(res)
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
