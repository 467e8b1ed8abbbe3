"The cost of comparing predictions with fp32, of a report and of healing: in training steps, afterwards, and in memory"
import json,statistics,time,warnings
import torch
import torch.nn.functional as F
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoader,DataLoaders,Learner,MergeLayer,SequentialEx,default_device,nn,set_seed
    from fastai_amp16.all import AdamW16
    from fastai_amp16.precision.plan import PrecisionPlan
from benchmarks.memory.memory import peak
from benchmarks.shared import hostile,markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import in_new_process,parser,store
from benchmarks.shared.timing import Batches,StepTimer,by_fastai,interleaved,quartiles,ratio

look = 7 # the step, counted from 0, of the second comparison of predictions with fp32; the first is in step 0

def residual(d): return SequentialEx(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), MergeLayer())
def plain(d): return nn.Sequential(nn.Linear(d, d), nn.ReLU())

def learner(depth, width, steps, bs, block=residual, init_scale=64., **kwargs):
    "At this scale, gradients fit. With `plain` blocks, predictions hardly differ between samples: rounding makes them look wrong"
    set_seed(0)
    x = torch.randn(steps*bs, width)
    dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=bs), DataLoader([], bs=bs), device=default_device())
    model = nn.Sequential(*[block(width) for _ in range(depth)], nn.Linear(width, 1))
    return Learner(dls, model, nn.MSELoss(), AdamW16, lr=1e-4, cbs=StepTimer()).to_fp16_dynamic(init_scale=init_scale, **kwargs)

def fit(learn, is_healthy=True):
    "Seconds of each step; raises if batches of a healthy fit ran again"
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    n = learn.mixed_precision.n_rerun
    if is_healthy and n: raise RuntimeError(f'{n} batches ran again')
    return learn.step_timer.steps()

def report(learn):
    "Seconds of a report"
    start = time.perf_counter()
    learn.diagnose_fp16()
    return time.perf_counter()-start

def measure(args, rounds):
    "Takes turns: fits that can run batches again, fits that cannot, reports; in steps of the same fit, since the speed of a machine varies"
    able,unable,looks,searches,reports,steps = [],[],[],[],[],[]
    for i in range(rounds+1):
        fits = {rerun: fit(learner(*args, rerun=rerun)) for rerun in ((True,False),(False,True))[i%2]}
        if not i: continue # it warms up
        step = {k: statistics.median(v) for k,v in fits.items()}
        able.append(sum(fits[True])/step[False])
        unable.append(sum(fits[False])/step[False])
        looks.append(fits[True][look]/step[True]-1)
        searched = fit(learner(*args, block=plain), is_healthy=False)
        searches.append(searched[0]/statistics.median(searched)-fits[True][0]/step[True])
        reports.append(report(learner(*args))/step[True])
        steps.append(step[True])
    return dict(ms_per_step=1e3*statistics.median(steps), fit_with_over_without=statistics.median(able)/statistics.median(unable),
                look_in_steps=quartiles(looks), search_in_steps=quartiles(searches), report_in_steps=quartiles(reports))

# %% healing
class Attention(nn.Module):
    "One attention head, whose scores are multiplied by `gain` and then divided by it"
    def __init__(self, d, gain):
        super().__init__()
        self.q,self.k,self.v,self.o = [nn.Linear(d, d) for _ in range(4)]
        self.gain = gain
    def forward(self, x):
        scores = self.q(x)@self.k(x).transpose(-2,-1)*self.gain
        return self.o((scores/self.gain/x.shape[-1]**.5).softmax(-1)@self.v(x))

class Block(nn.Module):
    "A transformer block; with a fault, it computes numbers beyond 65504, which fp32 can hold, and scales them down again"
    def __init__(self, d, fault):
        super().__init__()
        self.norm1,self.norm2,self.attn = nn.LayerNorm(d),nn.LayerNorm(d),Attention(d, 1e6 if fault=='scores' else 1.)
        self.fc1,self.fc2,self.fault = nn.Linear(d, 2*d),nn.Linear(2*d, d),fault
        if fault=='linear': self.fc1.weight.data *= 1e6
    def forward(self, x):
        x = x+self.attn(self.norm1(x))
        h = self.fc1(self.norm2(x))
        if self.fault=='linear': h = h*1e-6
        if self.fault=='product': h = h*3e5*3e5*1e-11
        return x+self.fc2(F.gelu(h))

class Transformer(nn.Module):
    "A model of `n` blocks, of which those in `at` have the fault"
    def __init__(self, n, fault, at, d):
        super().__init__()
        self.inp,self.head = nn.Linear(8, d),nn.Linear(d, 4)
        self.blocks = nn.Sequential(*[Block(d, fault if i in at else None) for i in range(n)])
    def forward(self, x): return self.head(self.blocks(self.inp(x)).mean(1))

kinds = dict(scores="attention scores", linear="output of a linear layer", product="product in the code of a block")

def transformer(n, fault=None, at=(), steps=7, bs=8, tokens=16, d=32):
    set_seed(0)
    batches = Batches([(torch.randn(bs, tokens, 8), torch.randint(4, (bs,))) for _ in range(steps)])
    dls = DataLoaders(batches, [], device=torch.device('cpu'))
    return Learner(dls, Transformer(n, fault, at, d), nn.CrossEntropyLoss(), AdamW16, lr=1e-4),batches

def quietly(learn):
    with warnings.catch_warnings(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('ignore') # healing warns
        learn.fit(1)

def in_half(learn):
    "The number of linear layers and convolutions that stay in half precision, and of all of them"
    linear = [m for m in learn.model.modules() if isinstance(m, (nn.Linear,nn.modules.conv._ConvNd))]
    fp32 = learn.mixed_precision.keeps(learn.model)
    plan = PrecisionPlan(learn.model, torch.float16, fp32)
    return sum(m not in plan.in_fp32 for m in linear),len(linear)

def heal(n, fault, at):
    "Fits a model with a fault: the forward passes and the time (in ordinary steps) of its first step, and the result of healing"
    learn,batches = transformer(n, fault, at)
    passes = []
    learn.model.inp.register_forward_hook(lambda *_: passes.append(1))
    quietly(learn.to_fp16_dynamic())
    mp,step = learn.mixed_precision,statistics.median(batches.steps())
    if mp.n_skipped or not mp.promoted: raise RuntimeError('nothing was healed')
    half,layers = in_half(learn)
    return dict(passes=len(passes)-len(batches), pause=(batches.times[1]-batches.times[0])/step, ms_per_step=1e3*step,
                promoted=len(mp.promoted), in_half=half, layers=layers)

def by_depth(depths, fits):
    "A row for each fault, in the middle block and in all blocks; the deepest model runs once"
    rows = []
    for n in depths:
        for fault in kinds:
            for at in ([n//2],range(n)):
                runs = [heal(n, fault, at) for _ in range(fits if n<=48 else 1)]
                medians = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
                rows.append(dict(blocks=n, fault=fault, faulty=len(at), **medians))
                print(rows[-1], flush=True)
    return rows

# %% after it
def shares(names):
    "The layers that stay in half precision after hostile trainings"
    res = {}
    for k in names:
        learn = hostile.zoo[k].make(0).to_fp16_dynamic()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore') # healing warns
            hostile.fit(learn, *hostile.zoo[k][1:])
        res[k] = in_half(learn)
    return res

size = dict(steps=5, bs=16, tokens=64, d=64)

def contender(name, blocks):
    "A learner for the transformer: in `fp32`, in `fp16` without the fault, or `healed` in its first fit"
    learn,batches = transformer(blocks, *(('scores',range(blocks)) if name=='healed' else ()), **size)
    return (learn if name=='fp32' else learn.to_fp16_dynamic()),batches

def afterwards(blocks, rounds):
    "Takes turns: fits of a healed model, of the same model in fp32, and of one without the fault in fp16"
    fits = {k: contender(k, blocks) for k in ('healed','fp32','fp16')}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        times = interleaved({k: by_fastai(*o) for k,o in fits.items()}, rounds) # the first round heals and does not count
    learn = fits['healed'][0]
    half,layers = in_half(learn)
    added = {k: added_by(k, blocks, learn.mixed_precision.promoted) for k in fits}
    return dict(blocks=blocks, in_half=half, layers=layers, ms={k: 1e3*statistics.median(v) for k,v in times.items()},
                over={k: ratio(times['healed'], times[k]) for k in ('fp32','fp16')}, added=added)

# %% memory
class Squares(nn.Module):
    "A layer that squares its activations and divides by their mean: three activations of the size of its input"
    def __init__(self, d):
        super().__init__()
        self.fc,self.act = nn.Linear(d, d),nn.ReLU()
    def forward(self, x):
        x = self.act(self.fc(x))
        x = x*x
        return x/(x.mean(1, keepdim=True)+1e-4)

def large(faulty, samples, d=64, blocks=4):
    "A learner with three activations of `samples`×`d` numbers per block; with `faulty`, the second batch overflows in the first block"
    set_seed(0)
    x,y = torch.randn(samples, d),torch.randint(10, (samples,))
    batches = Batches([(x*1000 if faulty and i==1 else x, y) for i in range(4)])
    model = nn.Sequential(*[Squares(d) for _ in range(blocks)], nn.Linear(d, 10))
    return Learner(DataLoaders(batches, [], device=torch.device('cpu')), model, nn.CrossEntropyLoss(), AdamW16, lr=1e-4)

def added(job, n, promoted=()):
    "Peak memory of this process before and after a fit, in bytes: of transformers for `healed`, `fp32` and `fp16`, else of `large`"
    if job in ('healed','fp32','fp16'):
        learn,_ = contender(job, n)
        if job=='healed': learn.to_fp16_dynamic(keep_fp32=list(promoted))
    else:
        learn = large(job=='diagnosis', n)
        if job!='fit in fp32': learn.to_fp16_dynamic()
    before = peak()
    quietly(learn)
    if job=='report': learn.diagnose_fp16()
    if job=='diagnosis' and not learn.mixed_precision.promoted: raise RuntimeError('nothing was healed')
    return before,peak()

def added_by(job, n, promoted=()):
    "The same in a new process, which gets the names of the layers that stay in fp32"
    return json.loads(in_new_process(__file__, '--job', job, '--size', n, '--keep', *promoted).splitlines()[-1])

jobs = 'fit','fit in fp32','diagnosis','report'

def by_job(samples):
    "Peak memory before and after each job, in bytes"
    return {k: added_by(k, samples) for k in jobs}

def main(args=None):
    p = parser(__file__, __doc__, depth=(25,'blocks of the model for comparisons and reports'), width=(64,'its width'),
               steps=(150,'its steps per fit'), bs=(32,'its batch size'), rounds=(15,'rounds'),
               blocks=([12,24,48,96],'depths of the transformers to heal'), fits=(3,'fits of each transformer with at most 48 blocks'),
               after=(8,'depth of the transformer that is timed after healing'), trainings=(hostile.zoo,'which trainings of hostile.py'),
               samples=(2**16,'samples of 64 numbers in a batch, to measure the memory of a diagnosis'))
    p.add_argument('--job', help='print only the memory of this job')
    p.add_argument('--size', type=int, help='samples or blocks of the job')
    p.add_argument('--keep', nargs='*', default=[], help='layers the job keeps in fp32')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    if a.job: return print(json.dumps(added(a.job, a.size, a.keep)))
    sizes = {k: getattr(a, k) for k in ('depth','width','steps','bs','rounds','fits','samples')}
    res = dict(machine=machine(), **sizes, **measure((a.depth, a.width, a.steps, a.bs), a.rounds),
               by_depth=by_depth(a.blocks, a.fits), hostile=shares(a.trainings), afterwards=afterwards(a.after, min(a.rounds, 7)),
               memory=by_job(a.samples))
    print(json.dumps(res, indent=1))
    store(res, a.out)

# %% tables
def depth_table(rows):
    "A Markdown table of the cost of healing: forward passes, pause in steps, and layers that are left in half precision"
    lines = {}
    for r in rows:
        line = lines.setdefault((r['fault'],r['faulty']>1), [kinds[r['fault']], 'all' if r['faulty']>1 else 'one'])
        line.append(f"{r['passes']:.0f} / {r['pause']:.0f} / {r['in_half']/r['layers']:.0%}")
    head = ('what overflows', 'in which blocks', *(f'{n} blocks' for n in dict.fromkeys(r['blocks'] for r in rows)))
    return markdown.table(head, lines.values(), 'llr')

def memory_table(res):
    "A Markdown table of peak memory"
    def cells(k):
        before,top = res[k]
        return 'fit in fp16' if k=='fit' else k,f'{top/2**20:.0f}',f'{(top-before)/2**20:.0f}'
    return markdown.table(('', 'peak, MiB', 'added, MiB'), map(cells, jobs))

# %% what the page says
def _of_reports(res):
    look,search,report = [f'{res[k][1]:.2g}' for k in ('look_in_steps','search_in_steps','report_in_steps')]
    return f"""### Comparisons with fp32 and reports

A fit that can run batches again takes {res['fit_with_over_without']:.3f} times as long as one with `rerun=False`, if no batch has to run
again.

The 1st, 8th, 40th, 104th and 232nd step of a fit, later one in 256, and the first batch of each validation also run in fp32, to see whether
the predictions are the same. Such a comparison takes as long as {look} steps, which are part of the time above. If predictions look wrong,
and the search for a fault finds none, it takes as long as {search} steps. A full report, with a row for each module
(`learn.diagnose_fp16()`), takes as long as {report} steps.

The model has {res['depth']} residual blocks, each with a layer norm and a linear layer of width {res['width']}. A fit has {res['steps']}
steps of {res['ms_per_step']:.1f} ms at batch size {res['bs']}. (The predictions that look wrong are those of as many linear layers without
norms and residuals: they hardly differ from sample to sample.) {markdown.ran(res, f"{res['rounds']} rounds")}"""

def _of_healing(res):
    after,over,rows = res['afterwards'],res['afterwards']['over'],res['by_depth']
    ends = [f(r['blocks'] for r in rows) for f in (min,max)]
    shown = depth_table([r for r in rows if r['blocks'] in ends])
    def times(k): return f'{over[k][1]:.2f}'
    def weight(k): return (after['added']['healed'][1]-after['added']['healed'][0])/(after['added'][k][1]-after['added'][k][0])
    shares = {k: half/layers for k,(half,layers) in res['hostile'].items()}
    least,average = min(shares, key=shares.get),statistics.mean(shares.values())
    return f"""### Healing

When layers move to fp32 (healing), the fit pauses for as long as {markdown.span((r['pause'] for r in rows), '.0f')} ordinary steps take.
Afterwards, {markdown.span((r['in_half']/r['layers'] for r in rows), '.0%')} of the layers still compute in half precision.

The models are transformers of {ends[0]} to {ends[1]} small blocks, each with six linear layers. In the first batch, numbers beyond 65504
occur in the middle block, or in all blocks. Numbers are medians of {res['fits']} fits; the deepest model ran once. {markdown.ran(res)}

{markdown.folded('Each fault: additional forward passes / pause in steps / layers left in half precision', shown)}

- **What stays in half precision.** After the {len(shares)} trainings of [hostile.py](shared/hostile.py), {100*average:.0f}% of the linear
  layers and convolutions compute in half precision on average: all of them in {list(shares.values()).count(1)} trainings, and
  {100*shares[least]:.0f}% in `{least}`.
- **Speed afterwards.** If attention scores overflow in all of {after['blocks']} blocks, a step after healing takes {times('fp16')} of the
  time of a step in fp16 without the fault. (It takes {times('fp32')} times as long as one in fp32: PyTorch has no fast fp16 on a CPU.)
- **Memory afterwards.** A new fit with the same layers in fp32 adds {weight('fp32'):.2f} times as much to peak memory as one in fp32, and
  {weight('fp16'):.2f} times as much as one in fp16 without the fault."""

def _of_memory(res):
    added = {k: top-before for k,(before,top) in res['memory'].items()}
    def ratio(k, to): return f'{added[k]/added[to]:.2f}'
    return f"""### Memory of a diagnosis

A fit in which a batch is diagnosed and healed adds {ratio('diagnosis', jobs[0])} times as much to the peak memory of its process as
a fit in fp16, and {ratio('diagnosis', jobs[1])} times as much as one in fp32; with a report, it is {ratio('report', jobs[0])} and
{ratio('report', jobs[1])} times. Both also run the batch in fp32, whose activations take twice as much memory.

The model has four blocks (a linear layer, a ReLU, and squares in the block's own code), whose activations have
{res['samples']*64*4/2**20:.0f} MiB each in fp32. In "diagnosis", a batch overflows in the first block. "Report" is `learn.diagnose_fp16()`
after a fit. "Added" excludes what the process took before the fit. {markdown.ran(res)}

{memory_table(res['memory'])}"""

def section(res): return '\n\n'.join(o(res) for o in (_of_reports,_of_healing,_of_memory))

if __name__=='__main__': main()
