"The time of a step whose cost is launching operators, not arithmetic: milliseconds, operators and host reads with many small tensors"
import argparse,json,time,warnings
from copy import deepcopy
from functools import partial
from unittest.mock import patch
from pathlib import Path
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import fastai
    from fastai.basics import Adam,DataLoaders,Learner,Optimizer,default_device,set_seed
    from fastai.callback.all import GradientClip
    from fastai.collab import EmbeddingDotBias
    from fastai.losses import CrossEntropyLossFlat,MSELossFlat
    from fastai.tabular.model import TabularModel
    from fastai_amp16.all import AdamW16,GradientNormClip
    from fastai_amp16.precision.plan import is_norm
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fused_adamw
from benchmarks.shared.machine import machine
from benchmarks.shared.timing import Batches,by_fastai,by_hand,interleaved,quartiles,ratio

# %% models of many small tensors
class Add(nn.Module):
    "A residual block whose branch is 0 at first, so that no gradient overflows at the initial loss scale"
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        nn.init.zeros_(layers[-1].weight)
    def forward(self, x): return x+self.layers(x)

class ViT(nn.Module):
    "Four patches of a 1x16x16 image and a class token, through encoder layers of PyTorch"
    def __init__(self, d, depth):
        super().__init__()
        self.patches,self.token,self.pos = nn.Linear(64, d),nn.Parameter(torch.zeros(1, 1, d)),nn.Parameter(torch.randn(1, 5, d)*0.02)
        blocks = [nn.TransformerEncoderLayer(d, 4, 2*d, 0., 'gelu', batch_first=True, norm_first=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, 10)
    def forward(self, x):
        x = self.patches(x.view(-1, 2, 8, 2, 8).transpose(2, 3).reshape(-1, 4, 64))
        return self.head(self.norm(self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1)+self.pos))[:,0])

def xresnet50_like(d):
    "53 layers without bias, each with a batch norm, and a head, as in an xresnet50; linear, since fp16 convolutions are slow on CPUs"
    def layer(ni): return nn.Linear(ni, d, bias=False),nn.ReLU(),nn.BatchNorm1d(d)
    return nn.Sequential(*layer(256), *[Add(*layer(d)) for _ in range(52)], nn.Linear(d, 10))

def mlp(d):
    blocks = [Add(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(26)]
    return nn.Sequential(nn.Linear(256, d), *blocks, nn.Linear(d, 10))

def vit(d): return ViT(d, 6)

models = {'as an xresnet50': xresnet50_like, '26-block MLP': mlp, 'ViT of 6 layers': vit}

# %% contenders
lr = 1e-3

def data(n, bs, device):
    set_seed(0)
    return Batches([(torch.randn(bs, 256, device=device), torch.randint(10, (bs,), device=device)) for _ in range(n)])

def fit(make, model, batches):
    "A contender: an epoch of the learner that `make` builds"
    return by_fastai(make(DataLoaders(batches, [], device=batches.items[0][0].device), model), batches)

def _learner(dls, model, opt_func, **kwargs): return Learner(dls, model, nn.CrossEntropyLoss(), opt_func, lr=lr, **kwargs)
def to_fp16(dls, model): return _learner(dls, model, Adam, cbs=GradientClip(1.)).to_fp16()
def to_non_native_fp16(dls, model):
    "Starts at 2^16, since each fit that starts at 2^24 skips its first steps. `GradientClip` has no effect here, but `clip` has"
    return _learner(dls, model, Adam).to_non_native_fp16(clip=1., max_loss_scale=2.**16)
def wrapper(dls, model):
    return _learner(dls, model, fused_adamw, cbs=GradientClip(1.)).to_fp16()
def ours(dls, model): return _learner(dls, model, AdamW16, cbs=GradientNormClip(1.)).to_fp16_dynamic()

class Fp32Norm(nn.Module):
    "A norm that computes in fp32 within autocast, as it does with `to_fp16_dynamic`"
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False): return self.norm(x.float()).to(x.dtype)

def with_fp32_norms(model):
    "The model itself, in which all norms compute in fp32"
    for m in [*model.modules()]: m._modules.update({k: Fp32Norm(c) for k,c in m._modules.items() if is_norm(c)})
    return model

def by_careful_hand(model, batches):
    "`by_hand`, with norms in fp32"
    return by_hand(with_fp32_norms(model), batches)

class Nothing(nn.Module):
    "Returns a ready-made loss, and has a parameter that gets no gradient"
    def __init__(self):
        super().__init__()
        self.param,self.loss = nn.Parameter(torch.zeros(())),torch.zeros((), requires_grad=True)
    def forward(self, x): return self.loss

def empty(dls, model):
    "fastai's loop and callbacks, with nothing to compute"
    return Learner(dls, Nothing(), lambda p,t: p, partial(Optimizer, cbs=[]), lr=lr)

stacks = {
    'fastai `to_fp16`, `Adam`, `GradientClip`': partial(fit, to_fp16),
    'fastai `to_non_native_fp16`, `Adam`': partial(fit, to_non_native_fp16),
    'fastai `to_fp16`, `OptimWrapper(AdamW, fused=True)`, `GradientClip`': partial(fit, wrapper),
    'PyTorch by hand': by_hand,
    'PyTorch by hand, norms in fp32': by_careful_hand,
    'ours': partial(fit, ours),
    "fastai's loop around nothing": partial(fit, empty)}
first,hand,careful,own,loop = [list(stacks)[i] for i in (0,3,4,5,6)]

def shown(name):
    "The name of a model or contender, as tables show it"
    names = {'as an xresnet50': 'xresnet50-like', 'ViT of 6 layers': '6-layer ViT', hand: 'PyTorch loop',
             careful: 'PyTorch loop, norms in fp32', own: '**`to_fp16_dynamic`**, `AdamW16`, `GradientNormClip`', loop: 'empty fastai loop'}
    return names.get(name, name.replace('fastai `', '`'))

# %% small models, against fastai's own `to_fp16` with the same optimizer
def blocks():
    "8 blocks of 32 units, whose arithmetic takes less time than the loop around it"
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())], nn.Linear(32, 10))
    return model,CrossEntropyLossFlat(),lambda bs: (torch.randn(bs, 32), torch.randint(10, (bs,)))

def tabular():
    "A model for as many columns as fastai's tutorial on Adult has"
    sizes = [(10,6), (17,8), (8,5), (16,8), (7,5), (6,4), (3,3)]
    def batch(bs): return torch.stack([torch.randint(n, (bs,)) for n,_ in sizes], 1),torch.randn(bs, 3),torch.randint(2, (bs,))
    return TabularModel(sizes, 3, 2, [200,100]),CrossEntropyLossFlat(),batch

def collab():
    "A model for as many users and films as MovieLens 100k has"
    def batch(bs): return torch.stack([torch.randint(n, (bs,)) for n in (944,1665)], 1),1+4*torch.rand(bs)
    return EmbeddingDotBias(50, 944, 1665, (0,5.5)),MSELossFlat(),batch

small = {'8 blocks of Linear, LayerNorm and ReLU': blocks, 'tabular model': tabular, 'collaborative filtering': collab}

def careful_fp16(learn):
    "fastai's `to_fp16`, whose autocast leaves norms in half precision on a CPU, with norms in fp32"
    with_fp32_norms(learn.model)
    return learn.to_fp16()

small_stacks = {'fp32': Learner.to_fp32, 'fastai `to_fp16`': Learner.to_fp16, 'fastai `to_fp16`, norms in fp32': careful_fp16,
                '**`to_fp16_dynamic`**': Learner.to_fp16_dynamic}
_,small_first,small_careful,small_own = small_stacks

def measure_small(name, steps, rounds, bs=64):
    "A row for each way to train the model with `AdamW16`, without clipping; on a CPU, other programs do not count"
    set_seed(0)
    model,loss,batch = small[name]()
    device = default_device()
    clock = time.process_time if device.type=='cpu' else time.perf_counter
    items = [tuple(t.to(device) for t in batch(bs)) for _ in range(steps)]
    def run(to):
        batches = Batches(items, clock)
        return by_fastai(to(Learner(DataLoaders(batches, [], device=device), deepcopy(model), loss, AdamW16, lr=lr)), batches)
    times = interleaved({k: run(to) for k,to in small_stacks.items()}, rounds)
    return [dict(model=name, batch_size=bs, contender=k, ms=[1e3*o for o in quartiles(t)], over_to_fp16=ratio(t, times[small_first]))
            for k,t in times.items()]

def table_small(rows):
    "A Markdown table"
    of = {(r['model'],r['contender']): r for r in rows}
    def cell(model, k): return f"{of[model,k]['ms'][1]:.2f} ({of[model,k]['over_to_fp16'][1]:.2f})"
    lines = ((model, *(cell(model, k) for k in small_stacks)) for model in dict.fromkeys(r['model'] for r in rows))
    return markdown.table(['ms per step (relative to `to_fp16`)', *map(shown, small_stacks)], lines)

# %% operators and reads
class Operators(TorchDispatchMode):
    "Counts dispatched operators and reads by the host; `marks` has both counts where batches and passes begin or end"
    def __init__(self):
        super().__init__()
        self.n,self.reads,self.marks = 0,0,[]
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        self.n += not func.is_view # which launches nothing
        devices = [o.device.type for o in args if isinstance(o, torch.Tensor)]
        moved = isinstance(res, torch.Tensor) and res.device.type=='cpu' and any(o!='cpu' for o in devices)
        self.reads += moved or func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)
        return res
    def mark(self, what): self.marks.append((what,self.n,self.reads))

def count(stack, model, batches):
    "Counts of the second to last step: operators in the forward (with casts of weights) and backward pass, other operators, and reads"
    run,backward,tolist,prepared = stack(model, batches),torch.Tensor.backward,torch.Tensor.tolist,Learner._do_one_batch
    run() # the first fit makes the state
    with Operators() as ops:
        def marked(self, *args, **kwargs):
            backward(self, *args, **kwargs)
            ops.mark('backward')
        def begins(learn): # fastai has called `before_batch`
            ops.mark('forward')
            prepared(learn)
        def read(self):
            ops.reads += self.device.type=='cpu' # where no operator shows it
            return tolist(self)
        batches.at_batch = partial(ops.mark, 'batch')
        tensor,learner = patch.multiple(torch.Tensor, backward=marked, tolist=read),patch.object(Learner, '_do_one_batch', begins)
        with tensor, learner: run()
    begin,end = [i for i,(what,*_) in enumerate(ops.marks) if what=='batch'][-3:-1]
    _,began,reads = ops.marks[begin]
    _,ended,reads_after = ops.marks[end]
    at = {what: n for what,n,_ in ops.marks[begin:end]}
    inside = at['backward']-at.get('forward', began)
    return dict(operators_forward_backward=inside, operators_step=ended-began-inside, reads=reads_after-reads)

# %% the table
def measure(name, bs, d, steps, rounds):
    "A row for each contender"
    set_seed(0)
    model,device = models[name](d),default_device()
    tensors = len(list(model.parameters()))
    runs = {k: s(deepcopy(model), data(steps, bs, device)) for k,s in stacks.items()}
    times = interleaved(runs, rounds)
    def floor(by): return [a+b for a,b in zip(times[by], times[loop])]
    def row(k, t):
        ratios = dict(over_to_fp16=ratio(t, times[first]), over_floor=ratio(t, floor(hand)), over_careful_floor=ratio(t, floor(careful)))
        return dict(ms=[1e3*o for o in quartiles(t)], **ratios, **count(stacks[k], deepcopy(model), data(4, bs, device)))
    return [dict(model=name, tensors=tensors, batch_size=bs, contender=k, **row(k, t)) for k,t in times.items()]

def table(rows):
    "A Markdown table of times"
    return _by_contender(rows, 'ms per step', lambda r: f"{r['ms'][1]:.2f}", lambda r: f"{shown(r['model'])}, {r['batch_size']}")

def table_of_counts(res):
    "A Markdown table of operators and reads, which no batch size changes"
    def counts(r): return f"{r['operators_forward_backward']} + {r['operators_step']}, {r['reads']}"
    rows = [r for r in res['rows'] if r['batch_size']==res['rows'][0]['batch_size']]
    return _by_contender(rows, 'operators: forward and backward + others, reads', counts, lambda r: shown(r['model']))

def _by_contender(rows, corner, cell, column):
    "A Markdown table with a row for each contender and a column for each model"
    lines = {}
    for r in rows: lines.setdefault(r['contender'], [shown(r['contender'])]).append(cell(r))
    return markdown.table([corner, *dict.fromkeys(map(column, rows))], lines.values())

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,default,what in (('width',16,'width of the layers'), ('steps',20,'steps per round'), ('rounds',31,'rounds')):
        p.add_argument('--'+name, type=int, default=default, help=what)
    p.add_argument('--bs', type=int, nargs='+', default=[8,32], help='batch sizes')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    torch.set_num_threads(1) # there is nothing to share
    rows = [r for bs in a.bs for name in models for r in measure(name, bs, a.width, a.steps, a.rounds)]
    few = [r for name in small for r in measure_small(name, a.steps, a.rounds)]
    res = dict(machine=machine(), fastai=fastai.__version__, steps=a.steps, rounds=a.rounds, rows=rows, small=few)
    print(table(rows), table_of_counts(res), table_small(few), sep='\n\n')
    a.out.write_text(json.dumps(res, indent=1)+'\n')

def _of_small(res):
    ours = [r for r in res.get('small', []) if r['contender']==small_own]
    if not ours: return ''
    careful = [r['ms'][1] for r in res['small'] if r['contender']==small_careful]
    over = markdown.span(r['ms'][1]/ms for r,ms in zip(ours, careful))
    fp32 = {r['model']: r['ms'][1] for r in res['small'] if r['contender']=='fp32'}
    over_fp32 = [r['ms'][1]/fp32[r['model']] for r in ours]
    return f"""

#### Small models

Where arithmetic takes less time than the loop around it, a step takes {markdown.span(r['over_to_fp16'][1] for r in ours)} times as long as
with fastai's `to_fp16` and the same optimizer, `AdamW16`, without clipping. If `to_fp16` computes norm layers in fp32 as well, as on a GPU,
it is {over} times (a ratio of medians). On a CPU, fp16 does not make small models faster: a step takes {markdown.span(over_fp32)} times as
long as in fp32.

{markdown.folded(f"Each model, with batches of {res['small'][0]['batch_size']}", table_small(res['small']))}"""

def section(res):
    tensors = markdown.listed(r['tensors'] for r in res['rows'][:3*len(stacks):len(stacks)])
    ours = [r for r in res['rows'] if r['contender']==own]
    over = {k: markdown.span(r[k][1] for r in ours) for k in ('over_to_fp16','over_floor','over_careful_floor')}
    theirs = [r for r in res['rows'] if r['contender']==first]
    def of(rows, k): return markdown.span((r[k] for r in rows), ',')
    return f"""### Time per step

In models of many small layers, where launching operators takes most of the time, a step with `to_fp16_dynamic` takes
{over['over_to_fp16']} of the time of fastai's `to_fp16` with `Adam` and `GradientClip`. Compared
with the time of a PyTorch loop written by hand plus that of fastai's empty loop, a step takes
{over['over_floor']} times as long; if the loop written by hand computes norm layers in fp32, too, {over['over_careful_floor']} times.

Besides the forward and backward pass, a step runs {of(ours, 'operators_step')} operators and waits for {of(ours, 'reads')} number from the
device (on a GPU, fastai's recorder waits for the loss as well); with fastai's `to_fp16`, `Adam` and `GradientClip`, it is
{of(theirs, 'operators_step')} operators and {of(theirs, 'reads')} numbers.

The loop written by hand has autocast, `GradScaler`, fused AdamW and clipping. On a CPU, it computes norm layers in half precision, where
they lose digits. Medians do not show the few steps that `to_fp16_dynamic` [compares with fp32](#comparisons-with-fp32-and-reports).

The models have {tensors} tensors, most of them with 16 × 16 elements.
{markdown.ran(res, f"{res['rounds']} rounds of {res['steps']} steps")}

{markdown.folded('Each model and batch size', table([r for r in res['rows'] if 'non_native' not in r['contender']]))}{_of_small(res)}"""

if __name__=='__main__': main()
