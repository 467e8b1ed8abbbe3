"""How often half precision is found where it is finite but wrong, and nothing is said of what is healthy, over random programs

A program of [families.py](families.py) is *wrong* if plain half precision ends with more than 1.5 times the loss of fp32, and with the part
at fault in fp32 within 1.2 times that; it is *healthy* if plain half precision ends within 1.1, with no loss scale below 1. Plain half
precision is autocast with a loss scale, without anything that this package finds. All are trained with `fit_one_cycle`.
silent_gpu.json has the rows of three runs on a GPU (`--habits cpu`, from the seeds in it), whose habits are called "cuda" there."""
import gc,json,subprocess,sys,time,warnings
from collections import defaultdict
from pathlib import Path
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import fastai
    from fastai.basics import noop
    from fastai_amp16.precision.plan import PrecisionPlan
from benchmarks.accuracy import families
from benchmarks.accuracy.cuda_habits import follow_cuda
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser

kinds = dict(wrong=families.wrong, healthy=families.healthy)
until = dict(wrong=.65, healthy=1.) # of the time: not all programs that should be wrong are so
ways = dict(fp16='to_fp16_dynamic', bf16='to_bf16_dynamic')
plainly = dict(rerun=False, on_spiral='warn') # what autocast does by itself
is_wrong,is_mended,is_right,is_healthy,left_in_half = 1.5,1.2,1.3,1.1,0.7 # of fp32's loss; the last one of the layers

# %% one program
def draw(kind, seed):
    "The program of this seed; each family has its turn"
    fs = kinds[kind]
    torch.manual_seed(seed)
    return fs[seed%len(fs)](families.Draw(seed))

def train(p, to, **kwargs):
    "The loss in the end, the learner, and the number of warnings"
    learn = p.learner()
    getattr(learn, to)(**kwargs)
    mp = getattr(learn, 'mixed_precision', None)
    with warnings.catch_warnings(record=True) as told, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        later = mp if p.end!='fit' else None # what was trained in fp32 is looked at in half precision
        if later: learn.remove_cb(later)
        learn.fit_one_cycle(p.epochs)
        if later: learn.add_cb(later)
        if p.end=='fit': loss = learn.recorder.values[-1][-1]
        else: loss = learn.validate()[0] if p.end=='validate' else p.loss(*learn.get_preds(act=noop))
    told = [o for o in told if 'On a CPU, convolutions' not in str(o.message)]
    return float(f'{loss:.5g}'),learn,len(told)

def in_half(learn):
    "The number of modules with weights that compute in half precision, and of those that do so in the beginning"
    mp = learn.mixed_precision
    def layers(keep):
        plan = PrecisionPlan(learn.model, mp.dtype, keep)
        return len([m for m in plan.in_half if [*m.parameters(recurse=False)]])
    return layers(mp.keeps(learn.model)),layers([])

def kind_of(kind, seed, to, fp32):
    "How plain half precision ends, with what in fp32 it ends as fp32 does, and whether the program is of this kind then"
    p = draw(kind, seed)
    loss,learn,_ = train(p, to, **plainly)
    if kind=='healthy':
        fits = not (learn.mixed_precision.history.loss_scale<1).any() # or gradients overflow at every scale
        return dict(plain=loss, counts=fits and loss-fp32<=(is_healthy-1)*abs(fp32))
    res = dict(plain=loss, counts=False)
    if loss<=is_wrong*fp32: return res
    for part in p.at if isinstance(p.at, list) else [p.at]:
        if train(draw(kind, seed), to, keep_fp32=part, **plainly)[0]<=is_mended*fp32: return {**res, 'counts':True, 'part':part}
    return res

def column(kind, seed, to, fp32):
    "What becomes of a program in one precision"
    res = kind_of(kind, seed, to, fp32)
    if not res['counts']: return res
    ours,learn,told = train(draw(kind, seed), to)
    promoted,(half,n) = [str(o) for o in learn.mixed_precision.promoted],in_half(learn)
    if kind=='healthy': ok = not told and not promoted
    else: ok = ours<=is_right*fp32 and half>=min(left_in_half*n, n-1) and bool(promoted) and told>0
    return {**res, 'ours':ours, 'told':told, 'promoted':promoted, 'half':half, 'of':n, 'ok':ok}

def row(kind, seed):
    p = draw(kind, seed)
    res = dict(kind=kind, family=kinds[kind][seed%len(kinds[kind])].__name__, seed=seed, end=p.end, loss=p.loss_name, opt=p.opt_name)
    res['fp32'] = train(p, 'to_fp32')[0]
    return {**res, **{k: column(kind, seed, to, res['fp32']) for k,to in ways.items()}}

# %% many
def rows_until(n, seed, end, kind):
    "Rows until `n` programs count in both precisions, or the time is over; one at a time"
    counted = defaultdict(int)
    while min(counted[k] for k in ways)<n and time.perf_counter()<end:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: r = row(kind, seed)
            except Exception as e: r = dict(kind=kind, seed=seed, error=f'{type(e).__name__}: {e}')
        for k in ways: counted[k] += r.get(k, {}).get('counts', False)
        yield r
        seed += 1

def show(r):
    if 'error' in r: return print(r['kind'], r['seed'], r['error'], flush=True)
    def one(o):
        if not o['counts']: return f"{o['plain']:.3g}"
        return f"{o['plain']:.3g} {o['ours']:.3g} {o['promoted']} {'ok' if o['ok'] else 'NOT OK'}"
    print(f"{r['kind']:8}{r['seed']:6} {r['family']:18} fp32 {r['fp32']:.3g}", *(f'| {k} {one(r[k])}' for k in ways), flush=True)

def in_processes(a):
    "One process with CUDA's habits, and one without them"
    files = {habits: a.out.with_suffix(f'.{habits}.json') for habits in ('cpu','as_cuda')}
    cmd = [sys.executable, __file__, '--n', str(a.n), '--seed', str(a.seed), '--minutes', str(a.minutes)]
    runs = [subprocess.Popen([*cmd, '--habits', h, '--out', str(f)]) for h,f in files.items()]
    if any(run.wait() for run in runs): raise SystemExit('a process failed')
    res = [json.loads(f.read_text()) for f in files.values()]
    for f in files.values(): f.unlink()
    rows = [dict(habits=h, **r) for h,o in zip(files, res) for r in o['rows']]
    return {**res[0], 'rows':rows}

def main(args=None):
    p = parser(__file__, __doc__, n=(300,'how many programs of each kind to count'), seed=(0,'of the first program'),
               minutes=(40.,'the most time to take'))
    p.add_argument('--habits', choices=['cpu','as_cuda'], help="only with these habits: those of this machine, or CUDA's")
    a = p.parse_args(args)
    torch.set_num_threads(1)
    if a.habits is None: res = in_processes(a)
    else:
        if a.habits=='as_cuda': follow_cuda()
        rows,start = [],time.perf_counter()
        gc.freeze() # all that is imported: to look through it takes a fifth of the time
        for kind in kinds:
            for r in rows_until(a.n, a.seed, start+a.minutes*60*until[kind], kind): rows.append(r), show(r)
        gc.unfreeze()
        res = dict(machine=machine(), fastai=fastai.__version__, seed=a.seed, rows=rows)
    a.out.write_text(json.dumps(res).replace('}, {', '},\n{')+'\n') # a row a line

# %% what the page says
def counted(rows, kind, habits, k):
    "The rows of this kind in one column"
    return [r for r in rows if r['kind']==kind and r.get('habits','cpu')==habits and r.get(k, {}).get('counts')]

columns = {(habits,k): f'{k}{also}' for habits,also in (('cpu',''),('as_cuda',", CUDA's lists")) for k in ways}

def rates(rows):
    "By kind and column, how many programs are as they should be, and how many there are"
    def rate(kind, habits, k):
        rs = counted(rows, kind, habits, k)
        return sum(r[k]['ok'] for r in rs),len(rs)
    return {kind: {o: rate(kind, *o) for o in columns} for kind in kinds}

def n_families(rows, kind):
    "How many families the programs of this kind are from"
    return len({r['family'] for r in rows if r['kind']==kind and 'family' in r})

def worst(rows, kind):
    "The setting in which the fewest programs are as they should be: how many, of how many, and its name"
    (ok,n),setting = min(((o,columns[c]) for c,o in rates(rows)[kind].items() if o[1]), key=lambda o: o[0][0]/o[0][1])
    return ok,n,setting

def claim(rows):
    "The rates in sentences"
    (ok,n,setting),(fine,healthy,also) = worst(rows, 'wrong'),worst(rows, 'healthy')
    quiet = 'All healthy programs' if fine==healthy else f'Of the healthy ones, {fine} of {healthy} (worst setting: {also})'
    return (f"Of the random programs that half precision makes wrong without an infinity, {ok} of {n} ({ok/n:.1%}) end as in fp32 (worst "
            f"setting: {setting}), with most layers in half precision. {quiet} train without a warning")

def on_a_gpu(res):
    "What became of the programs that ran on a GPU, in a sentence"
    rows = {(kind,k): counted(res['rows'], kind, 'cuda', k) for kind in kinds for k in ways}
    def count(kind, k):
        oks = [r[k]['ok'] for r in rows[kind,k]]
        return f"{'all' if all(oks) else f'{sum(oks)} of'} {len(oks)} in {k}"
    wrong,healthy = (markdown.listed(count(kind, k) for k in ways) for kind in ('wrong','healthy'))
    return (f"Fewer programs ran on a GPU ({res['machine']}). Of those that half precision makes wrong, {wrong} end as in fp32; of the "
            f"healthy ones, {healthy} train without a warning")

def table(rows):
    "A Markdown table of the rates"
    what = dict(wrong='wrong programs that end as in fp32', healthy='healthy programs without a warning')
    of = rates(rows)
    def cell(ok, n): return f'{ok} of {n} ({ok/n:.1%})' if n else '–'
    lines = ((name, *(cell(*of[kind][o]) for kind in what)) for o,name in columns.items())
    return markdown.table(['setting', *what.values()], lines)

def by_family(rows):
    "The families that have programs that are not as they should be, in words"
    bad = defaultdict(list)
    for kind in kinds:
        for habits,k in columns:
            for r in counted(rows, kind, habits, k): bad[kind,r['family']].append(r[k]['ok'])
    return markdown.listed(f'{oks.count(False)} of {len(oks)} of `{family}`' for (_,family),oks in bad.items() if not all(oks))

def section(res):
    rows,gpu = res['rows'],json.loads(Path(__file__).with_name('silent_gpu.json').read_text())
    return f"""### Finite but wrong

{claim(rows)}.

{table(rows)}

{on_a_gpu(gpu)}.

The programs are small trainings, drawn at random from {n_families(rows, 'wrong')} families of wrong ones and
{n_families(rows, 'healthy')} of healthy ones ([families.py](accuracy/families.py)): from the size of numbers to the optimizer. We chose the
families, but not the programs. "CUDA's lists" means that the CPU follows CUDA's autocast lists. {markdown.ran(res)}

- A program is **wrong** if plain half precision ends with more than {is_wrong} times the loss of fp32, and within {is_mended} times with
  the part at fault in fp32. It **ends as in fp32** if its loss is within {is_right} times, a report names what stays in fp32, and
  {left_in_half:.0%} of its layers (or all but one) remain in half precision.
- A program is **healthy** if plain half precision ends within {is_healthy} times the loss of fp32, with no loss scale below 1. **Without a
  warning** also means that no layer moves to fp32.

Over the four settings, the wrong and healthy programs that fail these tests are {by_family(rows)}."""

if __name__=='__main__': main()
