"How many programs that use other libraries run with `to_fp16_dynamic` and `to_bf16_dynamic`, and how near to the losses of fp32 they end"
import importlib.metadata,io,json,math,multiprocessing,os,re,sys,tempfile
from collections import namedtuple
from contextlib import redirect_stderr,redirect_stdout
if __name__=='__main__': os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MPLBACKEND='agg') # a forked process has no GPU
import fastai,numpy as np
from fastai.torch_core import set_seed
from benchmarks.compatibility.library_programs import fastmonais,fastxtends,optimizers,segmentation,tsais
from benchmarks.compatibility.library_programs.common import Steps
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store

contenders = dict(plain=None, fp16='to_fp16_dynamic', bf16='to_bf16_dynamic')

# the package; a function that imports it and returns its names, in a process of its own; programs, which take `to` and these names
Group = namedtuple('Group', 'package make flows')
hard = 'torch optimizers where fp16 fails'
groups = {
    'torch optimizers': Group('torch', optimizers.torchs, optimizers.of_torch),
    hard: Group('torch', optimizers.torchs, optimizers.of_hard),
    'optimi': Group('torch-optimi', optimizers.library('optimi'), optimizers.of_optimi),
    'pytorch_optimizer': Group('pytorch_optimizer', optimizers.library('pytorch_optimizer'), optimizers.of_pytorch_optimizer),
    'segmentation_models_pytorch': Group('segmentation_models_pytorch', segmentation.smp, segmentation.of_smp),
    'fastMONAI': Group('fastMONAI', fastmonais.fastmonai, fastmonais.of_fastmonai),
    'tsai': Group('tsai', tsais.tsai, tsais.of_ts),
    'fastxtend, unchanged': Group('fastxtend', fastxtends.fastxtend, fastxtends.of_fx),
    'fastxtend, three removed names restored': Group('fastxtend', fastxtends.fastxtend_old, fastxtends.of_old)}

# %% run the programs
def forked(f, *args, limit=None):
    "Calls `f` in a fork of this process; returns `None` if it crashes or takes more than `limit` seconds"
    fork = multiprocessing.get_context('fork')
    here,there = fork.Pipe(duplex=False)
    p = fork.Process(target=lambda: there.send(f(*args)))
    p.start(); there.close()
    try: return here.recv() if here.poll(limit) else None
    except EOFError: return None
    finally: p.kill(); p.join()

def without_paths(e): return re.sub(r'(?<!\w)/\S*/', '', ' '.join(f'{type(e).__name__}: {e}'.split()))[:200]

def one(flow, of, how):
    "The result of a program, or its error"
    from IPython.core.interactiveshell import InteractiveShell
    InteractiveShell.instance() # some of tsai's callbacks draw in a notebook
    set_seed(0)
    if 'tsai.utils' in sys.modules: sys.modules['tsai.utils'].rng = np.random.default_rng(0) # tsai has its own random generator
    learners = []
    def to(learn):
        learners.append(learn.add_cb(Steps()))
        return getattr(learn, how)() if how else learn
    try:
        with tempfile.TemporaryDirectory() as d, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            os.chdir(d)
            res = flow(to, of)
        if not all(map(math.isfinite, res['losses']+res['preds'])): raise FloatingPointError('a loss or a prediction is not finite')
    except Exception as e: return dict(error=without_paths(e))
    mps = [o.mixed_precision for o in learners if how and hasattr(o, 'mixed_precision')]
    return dict(res, reruns=sum(o.n_rerun for o in mps), skipped=sum(o.n_skipped for o in mps), kept=sum(len(o.promoted) for o in mps))

def apart(res, plain):
    "The counts of a run, and the largest difference of its losses (relative) and predictions from the unchanged run"
    if 'error' in res or 'error' in plain: return {k:v for k,v in res.items() if k not in ('losses','preds')}
    if any(len(res[k])!=len(plain[k]) for k in ('losses','preds')): return dict(error='has other numbers of losses or predictions')
    losses,preds = [np.subtract(res[k], plain[k]) for k in ('losses','preds')]
    return dict(res, **{k: float(f'{abs(v).max():.3g}') for k,v in dict(losses=losses/plain['losses'], preds=preds).items()})

def run(library, make, flows, limit):
    "The rows of a group, or why it cannot be imported. It is imported here, in a process of its own, since it may change fastai"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()): of = make()
    except Exception as e: return without_paths(e)
    found = {}
    for c,how in contenders.items():
        if how: import fastai_amp16.all # noqa: F401 (not earlier: unchanged programs run without it)
        for o,f in flows.items(): found[o,c] = forked(one, f, of, how, limit=limit) or dict(error=f'crashed, or not done in {limit:g} s')
    return [dict(library=library, flow=o, **{c: apart(found[o,c], found[o,'plain']) for c in contenders}) for o in flows]

def installed(package):
    "The version of a package; `None` if it is missing"
    try: return importlib.metadata.version(package).split('+')[0]
    except importlib.metadata.PackageNotFoundError: return None

def measure(chosen, limit):
    "Runs the programs `chosen`, a dict from names of groups to programs. Returns rows, versions, and the groups left out, with the reason"
    res = dict(libraries={}, rows=[], skipped={})
    for name,flows in chosen.items():
        package,make,_ = groups[name]
        version = installed(package)
        rows = forked(run, name, make, flows, limit) if version else f'{package} is not installed'
        if isinstance(rows, list): res['libraries'][package],res['rows'] = version,res['rows']+rows
        else: res['skipped'][name] = rows or 'it crashes when it is imported'
    return res

def updated(old, new):
    "The results `old`, with those of `new` in place of the same programs, in the order of `groups`. A group left out keeps its rows"
    rows = {(r['library'],r['flow']): r for r in (*old['rows'],*new['rows'])}
    there = [(g,o) for g in groups for o in groups[g].flows if (g,o) in rows]
    having = {g for g,_ in there}
    skipped = {g: why for g,why in {**old['skipped'],**new['skipped']}.items() if g not in having}
    return dict(new, libraries={**old['libraries'],**new['libraries']}, rows=[rows[o] for o in there], skipped=skipped)

# %% the result
def ran(rows, c): return [r[c] for r in rows if 'error' not in r['plain'] and 'error' not in r[c]]
def furthest(rows, c): return f"{100*max((o['losses'] for o in ran(rows, c)), default=math.nan):.2g}%"
def claim(rows):
    "How many programs run in half precision, and how far their losses are from fp32, in a sentence"
    (n,far),(n_bf16,far_bf16) = ((len(ran(rows, c)),furthest(rows, c)) for c in ('fp16','bf16'))
    return (f"Of {len(ran(rows, 'plain'))} programs that run unchanged, {n} also run with `to_fp16_dynamic`, with losses within {far} of "
            f"those in fp32, and {n_bf16} with `to_bf16_dynamic`, within {far_bf16}")
def healed(rows):
    "What becomes of programs that fp16 fails, in a sentence"
    fine = [r for r in rows if 'error' not in r['fp16'] and r['fp16']['steps']==r['plain']['steps'] and not r['fp16']['skipped']]
    return (f"Of {len(rows)} programs in which fp16 fails, {len(fine)} take every step of fp32 with `to_fp16_dynamic`, with losses within "
            f"{furthest(fine, 'fp16')}.")
def table(res):
    "A Markdown table with a row for each library. Differences of losses are relative to those of the unchanged program"
    def line(library):
        rows = [r for r in res['rows'] if r['library']==library]
        counts = [len(ran(rows, c)) for c in contenders]
        package = groups[library].package
        return library,res['libraries'][package],*counts,furthest(rows, 'fp16'),furthest(rows, 'bf16')
    head = ['library','version','run unchanged','run with `to_fp16_dynamic`','run with `to_bf16_dynamic`',
            'difference, fp16','difference, bf16']
    return markdown.table(head, map(line, dict.fromkeys(r['library'] for r in res['rows'])), 'llr')
in_words = {'its to_fp32 after ours': "fastxtend's own `to_fp32` does not switch off the mixed precision of this package"}
def failing(res):
    "Markdown: programs that run unchanged and fail in half precision"
    found = {}
    for r in res['rows']:
        for c,how in contenders.items():
            if 'error' in r[c] and 'error' not in r['plain']:
                found.setdefault((r['flow'],r['library'],r[c]['error']), []).append(f'`{how}`')
    return '\n'.join(f"- One program fails with {' and '.join(hows)}, *{flow}* ({library}): {in_words.get(flow, error)}."
                     for (flow,library,error),hows in found.items())

def skipped(res):
    "Markdown: the groups that were left out, and why"
    return '\n'.join(f'- not measured: {name}: {why}' for name,why in res['skipped'].items())

def section(res):
    failing_in_fp16 = [r for r in res['rows'] if r['library']==hard]
    summary = 'Programs of each library, and the largest difference between a smoothed loss and the same one in fp32'
    return f"""### Programs of other libraries

{claim([r for r in res['rows'] if r not in failing_in_fp16])}. {healed(failing_in_fp16)}

{failing(res)}

{skipped(res)}

The programs are small trainings with optimizers (by fastai's `OptimWrapper`), models, losses and callbacks, learning rate searches and
exports. Each runs unchanged in fp32, and with every learner in half precision. Where fp16 fails, `masked_fill` raises an error, or
activations or gradients overflow. Some modules of fastxtend, which was made for fastai 2.7, import names that fastcore and PyTorch have
removed since, and run with these names restored. {markdown.ran(res)}

{markdown.folded(summary, table(res))}""".rstrip()

def main(argv=None):
    p = parser(__file__, __doc__, limit=(300.,'timeout in seconds for a program in one precision'))
    p.add_argument('--only', nargs='*', default=[], help='parts of `group: program`; by default all')
    p.add_argument('--update', action='store_true', help='keep the results of all other programs that the file has')
    a = p.parse_args(argv)
    def is_chosen(name): return not a.only or any(o in name for o in a.only)
    chosen = {g: {k:v for k,v in groups[g].flows.items() if is_chosen(f'{g}: {k}')} for g in groups}
    here = dict(machine=machine(), fastai=fastai.__version__)
    old = json.loads(a.out.read_text()) if a.update and a.out.exists() else None
    if old and any(old[k]!=here[k] for k in here): p.error(f"{a.out.name} has results of {old['machine']}, fastai {old['fastai']}")
    res = dict(here, **measure({g: o for g,o in chosen.items() if o}, a.limit))
    if old: res = updated(old, res)
    print(table(res), skipped(res), failing(res), sep='\n\n')
    store(res, a.out)

if __name__=='__main__': main()
