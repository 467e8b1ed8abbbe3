"""Samples per second and peak memory of whole trainings, with fastai, this package, Lightning and Accelerate

All train the same models from the same weights, on the same batches, which are on the device already. Each uses what its users use by
default: `Adam` and `GradientClip` in fastai, `AdamW16` and `GradientNormClip` with `to_fp16_dynamic`, and PyTorch's `AdamW` with clipping
and a one-cycle schedule elsewhere. `to_fp16_fused` is fastai's `to_fp16` with PyTorch's fused `AdamW`, so that you can tell the gain of a
fused optimizer from that of this package. They take turns, round by round, in one process. The defaults are for a large GPU. For a T4, use
`--bs 8 32`. On a CPU, `--toy --size 32 --bs 2 4 --steps 2 --rounds 2` shows only that everything runs."""
import copy,gc,logging,time,warnings
from importlib.metadata import version
from importlib.util import find_spec
from unittest.mock import patch
import matplotlib.pyplot as plt
import numpy as np
import torch,torchvision
from torchvision.models import ConvNeXt,RegNet,ResNet,VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import Bottleneck
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.callback.all import GradientClip
    from fastai.basics import Adam,DataLoaders,F,Learner,default_device,nn,to_device
    import fastai_amp16
    from fastai_amp16.all import AdamW16,DynamicMixedPrecision,GradientNormClip
from benchmarks.memory.memory import large_predictions
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fastais,fused_adamw
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import quartiles

# %% models and data
class TextLSTM(nn.Module):
    "A language model: returns the logits of each next token"
    def __init__(self, vocab, emb, hidden):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(vocab, emb),nn.LSTM(emb, hidden, 2, batch_first=True),nn.Linear(hidden, vocab)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])

def _toy_resnet(size): # stem and first stage
    return nn.Sequential(*[*ResNet(Bottleneck, [1,1,1,1]).children()][:5], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))

# name: (the model, a toy version); the slowest come first, so that the others can make up for the time they take
models = dict(
    regnet_y_32gf=(lambda size: torchvision.models.regnet_y_32gf(), lambda size: RegNet(BlockParams([1], [8], [8], [1.], [2], 0.25))),
    convnext_tiny=(lambda size: torchvision.models.convnext_tiny(), lambda size: ConvNeXt([CNBlockConfig(8, None, 2)])),
    resnet50=(lambda size: torchvision.models.resnet50(), _toy_resnet),
    vit_small=(lambda size: VisionTransformer(size, 16, 12, 6, 384, 1536), lambda size: VisionTransformer(size, 16, 1, 2, 16, 32)),
    text_lstm=(lambda size: TextLSTM(10_000, 400, 1152), lambda size: TextLSTM(1000, 8, 8)),
    large_predictions=(lambda size: large_predictions(10_000), lambda size: large_predictions(1000, 8)))

only_predictions = 'large_predictions' # computes little else, so that a comparison with fp32 takes many times as long as a step

def make_batch(model, bs, a):
    "Random images and their classes, or random tokens and the next ones"
    vocab = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not vocab: return torch.randn(bs, 3, a.size, a.size),torch.randint(1000, (bs,))
    text = torch.randint(vocab[0], (bs,a.seq+1))
    return text[:,:-1].contiguous(),text[:,1:].contiguous()

def loss_func(pred, y): return F.cross_entropy(pred.flatten(0, -2), y.flatten())

def is_cuda(): return default_device().type=='cuda'

class Batches:
    """`skip` batches to allocate memory and find a loss scale, `steps` that are measured, and one more; `TimeoutError` after `deadline`

    Reads the clock when a batch is requested, so that loops that prefetch count like loops that do not."""
    def __init__(self, batches, steps, skip, deadline, count=False):
        self.batches,self.steps,self.skip,self.deadline,self.count,self.times = batches,steps,skip,deadline,count,[]

    def __len__(self): return self.skip+self.steps+1

    def __iter__(self):
        for i in range(len(self)):
            self.check()
            if i in (self.skip, self.skip+self.steps): self._note()
            yield self.batches[i%len(self.batches)]

    def check(self):
        if time.perf_counter()>self.deadline: raise TimeoutError('no time left')

    def _note(self):
        if is_cuda():
            torch.cuda.synchronize()
            if self.count: torch.cuda.set_sync_debug_mode('default' if self.times else 'warn')
        self.times.append(time.perf_counter())

    def seconds(self):
        "Seconds per step"
        if len(self.times)<2: raise RuntimeError('it stopped before the last batch')
        return (self.times[1]-self.times[0])/self.steps

# %% contenders: each trains a model on `Batches` and returns its last loss, the precision it really used, and the steps it skipped
def _fastai(model, batches, *to, opt_func=Adam, clip=GradientClip):
    learn = Learner(DataLoaders(batches, []), model, loss_func, opt_func, cbs=clip(1.))
    for o in to: getattr(learn, o)()
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(1, 1e-3)
    mp = getattr(learn, 'mixed_precision', None)
    counts = dict(skipped=mp.n_skipped) if isinstance(mp, DynamicMixedPrecision) else {}
    return dict(loss=learn.recorder.losses[-1], precision=mp.amp_mode.value if mp else 'fp32', **counts)

def _ours(model, batches, *to): return _fastai(model, batches, *to, opt_func=AdamW16, clip=GradientNormClip)

def _torchs(model, batches, **kwargs):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)
    return opt,torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=len(batches))

def _lightning(model, batches):
    import lightning
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
        def training_step(self, batch, i):
            loss = loss_func(self.model(batch[0]), batch[1])
            self.last = loss.detach()
            return loss
        def configure_optimizers(self): # not fused: in fp16, Lightning does not clip gradients of a fused optimizer
            opt,sched = _torchs(model, batches)
            return [opt],[dict(scheduler=sched, interval='step')]
    module,quiet = Module(),('logger','enable_checkpointing','enable_progress_bar','enable_model_summary')
    trainer = lightning.Trainer(accelerator=default_device().type, devices=1, precision='16-mixed', max_epochs=1, gradient_clip_val=1.,
                                **dict.fromkeys(quiet, False))
    trainer.fit(module, batches)
    return dict(loss=module.last, precision='bf16' if 'bf16' in trainer.precision else 'fp16') # on a CPU, it uses bf16 in place of fp16

def _accelerate(model, batches):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    with patch.dict(AcceleratorState._shared_state, clear=True): # shared within a process, where it allows only one precision
        precision = 'fp16' if is_cuda() else 'bf16' # on a CPU its fp16 is fp32
        accelerator = Accelerator(mixed_precision=precision, cpu=not is_cuda())
        model,opt,sched = accelerator.prepare(model, *_torchs(model, batches, fused=True))
        model.train()
        for x,y in batches:
            opt.zero_grad()
            loss = loss_func(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.)
            opt.step()
            sched.step()
        return dict(loss=loss.detach(), precision=accelerator.mixed_precision if accelerator.native_amp else 'fp32')

contenders = dict(
    fp32=_fastai,
    to_fp16=lambda *args: _fastai(*args, 'to_fp16'),
    to_fp16_fused=lambda *args: _fastai(*args, 'to_fp16', opt_func=fused_adamw),
    to_bf16=lambda *args: _fastai(*args, 'to_bf16'),
    to_fp16_dynamic=lambda *args: _ours(*args, 'to_fp16_dynamic'),
    to_bf16_dynamic=lambda *args: _ours(*args, 'to_bf16_dynamic'),
    to_fp16_dynamic_channelslast=lambda *args: _ours(*args, 'to_fp16_dynamic', 'to_channelslast'),
    lightning=_lightning,
    accelerate=_accelerate)

# %% the race
def turn(name, model, batches):
    "Trains a copy of `model` with the contender `name`, and returns its results or its error"
    start,peak,syncs = time.perf_counter(),None,None
    try:
        batches.check()
        gc.collect() # a learner, its callbacks and its model refer to each other, and hold memory
        if is_cuda():
            torch._C._cuda_clearCublasWorkspaces() # up to 64 MiB, left by earlier contenders
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with fastais(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always' if batches.count else 'ignore')
            torch.manual_seed(0)
            res = contenders[name](copy.deepcopy(model).to(default_device()), batches)
        seconds,finite = batches.seconds(),bool(res.pop('loss').isfinite())
        if is_cuda():
            peak = torch.cuda.max_memory_allocated()/2**20
            if batches.count: syncs = sum('synchronizing CUDA' in str(o.message) for o in seen)/batches.steps
    except Exception as e: return dict(error=f'{type(e).__name__}: {e}'.splitlines()[0])
    finally:
        if is_cuda(): torch.cuda.set_sync_debug_mode('default')
    overhead = time.perf_counter()-start-batches.steps*seconds
    return dict(res, seconds=seconds, overhead=overhead, finite=finite, peak_mib=peak, syncs_per_step=syncs)

def race(model, bs, a, end, deadline):
    "`{contender: [warm-up, round 1, …]}`, with as many rounds and steps as fit before `end`, and at least one round, if `deadline` allows"
    data = [to_device(make_batch(model, bs, a), default_device()) for _ in range(2)]
    gc.collect()
    gc.freeze() # what exists now stays; scanning it in each turn would take as long as many steps
    turns = {c: [turn(c, model, Batches(data, 2, a.skip, deadline, count=True))] for c in a.contenders}
    for i in range(a.rounds):
        last = {c: o[-1] for c,o in turns.items() if 'error' not in o[-1]}
        if not last: break
        step,overhead,left = sum(o['seconds'] for o in last.values()),sum(o['overhead'] for o in last.values()),end-time.perf_counter()
        steps = int(np.clip((left/(a.rounds-i)-overhead)/step, min(5, a.steps), a.steps))
        if i and overhead+steps*step>left: break
        for c in [*last][::(-1)**i]: turns[c].append(turn(c, model, Batches(data, steps, a.skip, deadline)))
    return turns

def make_rows(model, bs, turns):
    "A row for each contender: medians over rounds, and ratios to `to_fp16` in the same round"
    rounds = {c: {i: t for i,t in enumerate(o) if i and 'error' not in t} for c,o in turns.items()}
    rows,base = [],rounds.get('to_fp16', {})
    def over(c, k, power):
        ratios = [(t[k]/base[i][k])**power for i,t in rounds[c].items() if i in base and t[k]]
        return float(np.median(ratios)) if ratios else None
    for c,o in rounds.items():
        row,ts = dict(model=model, bs=bs, contender=c),[*o.values()]
        rows.append(row)
        if not ts: row['error'] = turns[c][-1]['error']; continue
        q1,med,q3 = quartiles([bs/t['seconds'] for t in ts])
        row.update(precision=ts[0]['precision'], samples_per_second=med, quartiles=[q1,q3], over_to_fp16=over(c, 'seconds', -1),
                   peak_mib=max(t['peak_mib'] or 0 for t in ts) or None, peak_over_to_fp16=over(c, 'peak_mib', 1),
                   syncs_per_step=turns[c][0]['syncs_per_step'], finite=all(t['finite'] for t in ts), skipped=ts[-1].get('skipped'),
                   rounds=len(ts))
    return rows

# %% what it prints and draws
columns = ['model','batch size','contender','precision','samples/s (quartiles)','relative to `to_fp16`','peak MiB','syncs per step',
           'loss is finite','skipped steps']

def head():
    "The first two lines of the table"
    return '| '+' | '.join(columns)+' |\n|'+' --- |'*len(columns)

def _per_second(r, spec):
    first,third = r['quartiles']
    return markdown.with_quartiles((first, r['samples_per_second'], third), spec)

def line(r):
    "A row of the table"
    def show(k, spec=''): return '–' if r[k] is None else format(r[k], spec)
    cells = [r['model'], r['bs'], r['contender']]
    if 'error' in r: cells += ['–', r['error'].replace('|', '/'), *['–']*5]
    else: cells += [r['precision'], _per_second(r, '.1f'), show('over_to_fp16', '.2f'),
                    show('peak_mib', '.0f'), show('syncs_per_step', '.1f'), 'yes' if r['finite'] else 'no', show('skipped')]
    return '| '+' | '.join(map(str, cells))+' |'

def ratios(res, contender, base, key='samples_per_second'):
    "Medians of `contender` relative to those of `base`: `{(model, batch size): ratio}`"
    of = {(r['contender'],r['model'],r['bs']): r.get(key) for r in res['rows']}
    return {(m,bs): v/of[base,m,bs] for (c,m,bs),v in of.items() if c==contender and v and of.get((base,m,bs))}

def chart(res, fname):
    "Draw throughput relative to fastai's `to_fp16`: a panel for each batch size, a group of bars for each model"
    sizes,ms,names = (res['arguments'][k] for k in ('bs','models','contenders'))
    names = [c for c in names if c!='to_fp16']
    over = {c: ratios(res, c, 'to_fp16') for c in names}
    h,ys = 1/(len(names)+1),range(len(ms))
    _,axs = plt.subplots(1, len(sizes), figsize=(6*len(sizes)+2, 1+0.18*len(ms)/h), sharey=True, squeeze=False, layout='constrained')
    for ax,bs in zip(axs[0], sizes):
        for j,c in enumerate(names):
            at = [over[c].get((m,bs), 0) for m in ms]
            bars = ax.barh([y+(j-len(names)/2+.5)*h for y in ys], at, .9*h, label=c)
            on_line = dict(fc='w', ec='none', pad=.8) # so that a label can be read where the line is
            ax.bar_label(bars, [f'{o:.2f}' if o else '–' for o in at], padding=2, fontsize=7, bbox=on_line)
        ax.axvline(1, color='k', lw=1)
        ax.set(title=f'batch size {bs}', xlabel="samples per second, relative to fastai's to_fp16", yticks=ys, yticklabels=ms)
        ax.margins(x=.08)
        ax.spines[['top','right']].set_visible(False)
    axs[0,0].invert_yaxis()
    axs[0,-1].legend(fontsize=8, loc='upper left', bbox_to_anchor=(1, 1), frameon=False)
    plt.savefig(fname, dpi=150)
    plt.close()

# %% what the page says
bases = dict(fp32='fastai in fp32 with `Adam`', to_fp16="fastai's `to_fp16` with `Adam`", to_fp16_fused='`to_fp16` with a fused AdamW')

def _throughput(res):
    "Speed and memory of `to_fp16_dynamic` beside each of `bases`, without the model that is only predictions"
    def over(base, key='samples_per_second'):
        return [o for (model,_),o in ratios(res, 'to_fp16_dynamic', base, key).items() if model!=only_predictions]
    found = {name: markdown.span(o) for base,name in bases.items() if (o := over(base))}
    if not found: return 'No training could be compared.'
    (name,first),*rest = found.items()
    many = markdown.listed([f'{first} times as many samples per second as {name}', *(f'{o} times as many as {k}' for k,o in rest)])
    peak = f" Its peak memory is {markdown.span(over('fp32', 'peak_mib'))} times that of fp32." if over('fp32', 'peak_mib') else ''
    but = f' (`{only_predictions}` left out, see below)' if only_predictions in res['arguments']['models'] else ''
    return f"`to_fp16_dynamic` trains {many}{but}.{peak}"

def _batch_norms(res):
    "What they cost in bf16"
    bs = max(res['arguments']['bs'])
    of = {r['contender']: r for r in res['rows'] if (r['model'],r['bs'])==('resnet50',bs) and 'error' not in r}
    if not {'to_fp16_dynamic','to_bf16_dynamic'}<=of.keys(): return
    fp16,bf16 = (of[o]['samples_per_second'] for o in ('to_fp16_dynamic','to_bf16_dynamic'))
    if bf16<fp16: yield f"""**Batch norms can be slower in bf16 than in fp16**, since PyTorch does not give those with bf16 inputs to cuDNN:
with batches of {bs}, `resnet50` trains {fp16:,.0f} samples per second in fp16, and {bf16:,.0f} in bf16."""

def _optimizer(res):
    "Where the gain over `to_fp16` comes from"
    if ratios(res, 'to_fp16_dynamic', 'to_fp16_fused'):
        yield """**A fused optimizer** makes most of the difference from fastai's `to_fp16`: `AdamW16` is one, and `Adam` is not.
`to_fp16_fused` is `to_fp16` with a fused AdamW."""

def compared(arguments):
    "How many of the timed steps of a fit are compared with fp32, which happens in these"
    first,steps = (arguments[k] for k in ('skip','steps'))
    return sum(first<i<=first+steps for i in (1,8,40,104,*range(232, first+steps+1, 256)))

def _compared(res):
    "Why a short fit takes long where some of its steps are compared with fp32, in a model of little else but predictions"
    model = only_predictions
    if model not in res['arguments']['models']: return
    n,now = ({1: 'one', 2: 'two'}.get(o, o) for o in (res.get('compared', 1),compared(res['arguments'])))
    also = '' if 'compared' in res else f' (this version compares {now}, and has not been timed)'
    yield f"""**Large predictions cost speed in a short fit.** `{model}` computes little else than 10,000 logits for each token, and of its
{res['arguments']['steps']} timed steps, {n} {'was' if n=='one' else 'were'} compared with fp32{also}. A longer fit compares fewer of its
steps, in the end one in 256."""

_in_words = dict( # contenders that are no method of a learner
    to_fp16_dynamic_channelslast='`to_fp16_dynamic` with `to_channelslast`', lightning='Lightning', accelerate='Accelerate')

def _caveats(res):
    "What a reader must know of these results"
    def names(os): return markdown.listed(f'`{o}`' for o in os)
    few = [o for o in res['arguments']['models'] if any(r.get('rounds')==1 for r in res['rows'] if r['model']==o)]
    left_out = [o for k,there in (('models',models),('contenders',contenders)) for o in there if o not in res['arguments'][k]]
    if few: yield f"{names(few)} had one round of {res['arguments']['steps']} steps or fewer, so their numbers are rough."
    also = markdown.listed(_in_words.get(o, f'`{o}`') for o in left_out)
    if left_out: yield f"The script can also measure {also}; these results are missing here."

def _items(*os): return '\n'.join('- '+' '.join(o.split()) for os in os for o in os)

def _by_training(res):
    "The models and batch sizes, and what gives the row of a contender"
    of = {(r['model'],r['bs'],r['contender']): r for r in res['rows']}
    return dict.fromkeys(o[:2] for o in of),lambda *at: of.get(at)

def table(res):
    "A Markdown table of the ratios, with a row for each model and batch size"
    there = [o for o in bases if o in res['arguments']['contenders']]
    over = {o: ratios(res, 'to_fp16_dynamic', o) for o in there}
    peaks = ratios(res, 'to_fp16_dynamic', 'fp32', 'peak_mib')
    def show(ratio): return f'{ratio:.2f}' if ratio else '–'
    lines = ((*at, *(show(over[o].get(at)) for o in there), show(peaks.get(at))) for at in _by_training(res)[0])
    return markdown.table(['model','batch size',*(f'× `{o}`' for o in there),'memory, × `fp32`'], lines)

def cell(r):
    "Samples per second and peak memory"
    if r is None or 'error' in r: return r['error'].replace('|', '/') if r else '–'
    return _per_second(r, '.0f')+(f"; {r['peak_mib']:.0f}" if r['peak_mib'] else '')

def table_of_all(res):
    "A Markdown table of the medians of all contenders, with quartiles if there were several rounds"
    names,(trainings,row) = res['arguments']['contenders'],_by_training(res)
    lines = ((*at, *(cell(row(*at, o)) for o in names)) for at in trainings)
    return markdown.table(['model','batch size',*(f'`{o}`' for o in names)], lines)

def _in_all(res):
    "What no table shows: reads of the GPU, losses that are not finite, and skipped steps"
    rows = [r for r in res['rows'] if 'error' not in r]
    syncs = {}
    for r in rows:
        if r['syncs_per_step'] is not None: syncs.setdefault(r['contender'], set()).add(f"{r['syncs_per_step']:.0f}")
    if syncs: yield f"GPU syncs per step: {', '.join(f'{max(o)} with `{c}`' for c,o in syncs.items())}."
    bad = [f"`{r['contender']}` of `{r['model']}` with batches of {r['bs']}" for r in rows if not r['finite'] or r['skipped']]
    yield f"The loss is not finite, or steps were skipped: {', '.join(bad)}." if bad else 'All losses are finite, and no step was skipped.'

def earlier(res):
    "What to say of results that are of an earlier version of this package, which did not write how many steps are compared"
    return '' if 'compared' in res else ', with an earlier version of this package'

def section(res):
    return f"""### Whole trainings on a GPU

{_throughput(res)}

{table(res)}

{_items(_optimizer(res), _batch_norms(res), _compared(res), _caveats(res))}

Setup: {res['machine']}{earlier(res)}. Ratios are those of medians over rounds, in table
and picture. fp32 is PyTorch's default: convolutions use TF32, matrix products do not.

All contenders train the same models from the same weights with `fit_one_cycle`. To measure your own GPU, run the script, which takes nine
minutes on a large one. On a small one, try smaller batches (`--bs 8 32`).

{markdown.folded('All contenders: samples per second (quartiles, if there were several rounds); peak memory in MiB', details(res))}"""

def details(res):
    "What few readers look for"
    return f"""![Samples per second relative to fastai's to_fp16, by model and batch size](speed/gpu.png)

{table_of_all(res)}

{_items(_in_all(res))}"""

# %% run
def parse_args(args=None):
    p = parser(__file__, __doc__.splitlines()[0], 'file for the results; the chart goes next to it', models=(models,'which models'),
               contenders=(contenders,'which contenders'), bs=([16,128],'batch sizes'), size=(224,'height and width of images'),
               seq=(72,'tokens per text'), minutes=(9.,'time for everything'), rounds=(5,'most fits of each contender'),
               steps=(100,'most steps measured per fit'), skip=(5,'steps before these'))
    p.add_argument('--toy', action='store_true', help='train a few layers of each model')
    return p.parse_args(args)

def main(args=None):
    a,start,rows = parse_args(args),time.perf_counter(),[]
    deadline,todo = start+0.97*60*a.minutes,len(a.models)*len(a.bs) # the rest is for an unfinished step, and for the chart
    versions = {o: version(o) if find_spec(o) else None for o in ('torch','torchvision','fastai','lightning','accelerate')}
    versions['fastai_amp16'] = fastai_amp16.__version__ # which may run from a folder
    print(head())
    for name in a.models:
        torch.manual_seed(0)
        model = models[name][a.toy](a.size)
        for bs in a.bs:
            now = time.perf_counter()
            new = make_rows(name, bs, race(model, bs, a, now+(deadline-now)/todo, deadline))
            print(*map(line, new), sep='\n', flush=True)
            rows,todo = rows+new,todo-1
            keys,ours = ('model','bs','over_to_fp16','peak_over_to_fp16'),[r for r in rows if r['contender']=='to_fp16_dynamic']
            res = dict(machine=machine(), versions=versions, arguments={**vars(a), 'out':a.out.name}, rows=rows, compared=compared(vars(a)),
                       minutes=(time.perf_counter()-start)/60, ours_over_to_fp16=[{k: r.get(k) for k in keys} for r in ours])
            store(res, a.out) # after each model, so that no result is lost
    gc.unfreeze()
    chart(res, a.out.with_suffix('.png'))
    return res

if __name__=='__main__': main()
