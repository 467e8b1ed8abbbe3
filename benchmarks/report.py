"benchmarks/README.md, from the JSON files that the scripts wrote: every number in it is one of theirs"
import json,statistics
from pathlib import Path
import accumulation,bf16_cpu,compatibility,compiled,convergence,cuda_dispatch,diagnosis,doctor,fp16_cpu,gpu,libraries,memory
import published,scale_policy,short_fits,step_cost

here = Path(__file__).parent
gpu_results = here/'gpu.json'
def read(name): return json.loads((here/f'{name}.json').read_text())

scripts = {
    'short_fits': 'where short fits end, by running batches again and by skipping steps',
    'accumulation': 'what is kept for running accumulated batches again',
    'step_cost': 'what a step costs where launches do: milliseconds, operators, host reads',
    'compiled': 'what a step of a compiled model costs',
    'cuda_dispatch': 'kernels and casts of a forward pass on a GPU, counted without one',
    'gpu': 'samples per second and peak memory of whole trainings, on a GPU',
    'bf16_cpu': 'bf16 next to fp32, on a CPU',
    'fp16_cpu': 'what convolutions in half precision cost on a CPU',
    'memory': 'peak memory, on a CPU',
    'scale_policy': 'policies of loss scaling, replayed (`--record`: recorded anew)',
    'convergence': 'where trainings end, next to fp32',
    'scaling': 'how the cost grows with the number of tensors and with their size',
    'diagnosis': 'what reports, healing and being able to run batches again cost',
    'doctor': 'what `fp16_doctor` says of healthy and of hostile models, and how many steps it takes',
    'compatibility': "which cells of fastai's own notebooks pass, as they are and with each learner in half precision",
    'published': 'published failures in fp16, rebuilt with the code of transformers and timm (which it needs)',
    'libraries': 'flows of tsai and fastxtend, as they are and in half precision',
    'survival': 'what trainings and events are survived: the table of the [README](../README.md#what-survives)'}

def _intro():
    rows = '\n'.join(f'| `{k}.py` | {v} |' for k,v in scripts.items())
    return f"""<!-- made by benchmarks/report.py -->
# Benchmarks

Each script writes a JSON file, and a picture where there is one, next to it; `python benchmarks/report.py` makes this page of them.
Where times are compared, contenders take turns in one process, so that what the machine does meanwhile happens to all of them; times are
medians with quartiles, ratios are medians of ratios within a round. No test asserts a time.

| `uv run python benchmarks/…` | shows |
| --- | --- |
{rows}

fastai's own classes have `'cuda'` built in; on a CPU they run with `'cpu'` in its place ([fastais.py](fastais.py))."""

# %% running again
def _short():
    res = read('short_fits')
    return f"""## Where short fits end

{short_fits.claim(res['rows'])}.

![distance to fp32 after 15, 50 and 150 steps](short_fits.png)

{res['machine']}. {res['seeds']} seeds; the same seed gives the same data, weights, batches and dropout to all. The distance is that of the
validation loss, computed in fp32, to the one of a fit in fp32; means over seeds, and the furthest in parentheses. "Skipping" is
`to_fp16_dynamic(rerun=False)`, from the same first scale, which skips a step as torch's `GradScaler` does.

{short_fits.table(res)}"""

def _accumulated():
    res = read('accumulation')
    n,size = res['accumulation'],res['size']
    return f"""## What is kept of accumulated batches

{res['machine']}. Before a step that accumulates the gradients of {n} batches, the inputs and targets of all of them are kept, up to 1 GiB;
beyond that a step that overflows is skipped. Images of 3 × {size} × {size} numbers in fp32, and by how much the peak of the process is
above that of `to_fp16_dynamic(rerun=False)`.

{accumulation.table(res)}"""

# %% time
def _met(rows, key, goal):
    "In how many of `rows` a goal is met"
    return f"the goal of {goal:.2f} is met in {sum(r[key][1]<=goal for r in rows)} of {len(rows)} rows"

def _overheads(rows):
    "Of ours, over what it is measured against, in sentences"
    ours = [r for r in rows if r['contender']==step_cost.own]
    def span(key): return f"{min(r[key][1] for r in ours):.2f} to {max(r[key][1] for r in ours):.2f}"
    plain,careful = [f"{span(k)} ({_met(ours, k, 1.05)})" for k in ('over_floor','over_careful_floor')]
    return f"""Ours takes {span('over_to_fp16')} of the time of fastai's `to_fp16` (the goal was 0.60), and of the floor
{plain}; of the floor with norms in fp32, {careful}"""

def _steps():
    res = read('step_cost')
    tensors = ', '.join(str(r['tensors']) for r in res['rows'][:3*len(step_cost.stacks):len(step_cost.stacks)])
    return f"""## What a step costs

{res['machine']}, {res['rounds']} rounds of {res['steps']} steps. {tensors} tensors, most of them of 16 × 16 elements: what is measured is
mostly the launching of operators. The floor is the loop written by hand (autocast, `GradScaler`, fused AdamW, clipping) plus fastai's
loop and callbacks around nothing. CPUs lose digits in half-precision norms, and on a CPU ours alone casts to fp32 around them: the second
loop written by hand does so, too. (On a GPU batch norms need no cast, and autocast casts around layer norms by itself.)

{step_cost.table(res)}

{_overheads(res['rows'])}. What is left is noting the start of each step, so that it can run again, and stand-ins that come and go.
Rest of the step means all that is dispatched outside forward and backward pass: unscaling, clipping, the check for overflow,
the optimizer, noting what the batch may change, and fastai's own bookkeeping. Reads are those of numbers;
on a GPU fastai's `Recorder` copies the loss besides, once a batch, in all rows of fastai's loop.
`to_non_native_fp16` runs with `clip=1` and `max_loss_scale=2**16`, since it would skip the first steps of each fit at its 2^24. In its
16th step and every 256th from there on ours runs the batch once more; medians do not see that, [diagnosis.json](diagnosis.json) does."""

def _compiled():
    res = read('compiled')
    ours = [r['over_hand'][1] for r in res['rows'] if r['compiled'] and r['contender']==compiled.own]
    widths = ', '.join(str(r['width']) for r in res['rows'][::2*len(compiled.stacks)])
    return f"""## What a compiled step costs

{res['machine']}, {res['rounds']} rounds of {res['steps']} steps at batch size {res['batch_size']}: the three models of above,
{widths} wide, before and after `torch.compile` ({res['backend']}). The loop written by hand is the one of above. A step of ours takes
{min(ours):.3f} to {max(ours):.3f} of its time; the goal was 1.05.

{compiled.table(res)}"""

def _dispatch():
    res = read('cuda_dispatch')
    return f"""## Kernels of a forward pass on a GPU

Counted with torch {res['torch']} on fake CUDA tensors, which have device, dtype and layout but no data; autocast treats them as it
does on a GPU. In parentheses: casts between fp32 and half precision. Models are in training mode. Attention counts as one kernel,
and so do up to 64 tensors, or 320 blocks of 65,536 elements, of a multi-tensor operation.

{cuda_dispatch.table(res)}

autocast casts each weight by itself, ours all of them by multi-tensor operations of up to 25 MiB, which is most of the difference.
Besides these, ours casts what comes in, and around norms whose kernels need fp32 weights or keep their statistics in the dtype of their
input: layer norms with weights, group norms, RMS norms. Batch norms and instance norms read half precision and compute in
fp32. The casts before a softmax and after it are autocast's."""

def _diagnosis():
    res = read('diagnosis')
    look,report = [f'{q[1]:.2g} ({q[0]:.2g} to {q[2]:.2g})' for q in (res['look_in_steps'],res['report_in_steps'])]
    after,over,rows = res['afterwards'],res['afterwards']['over'],res['by_depth']
    def times(k): return f'{over[k][1]:.2f} ({over[k][0]:.2f} to {over[k][2]:.2f})'
    def weight(k): return (after['added']['healed'][1]-after['added']['healed'][0])/(after['added'][k][1]-after['added'][k][0])
    shares = {k: half/layers for k,(half,layers) in res['hostile'].items()}
    least,average = min(shares, key=shares.get),statistics.mean(shares.values())
    met = [sum(r[k]<=diagnosis.goals(r['blocks'])[i] for r in rows) for i,k in enumerate(('passes','pause'))]
    return f"""## What a look and a report cost

{res['machine']}, {res['rounds']} rounds. {res['depth']} linear layers of {res['width']} numbers, {res['steps']} steps of
{res['ms_per_step']:.1f} ms at batch size {res['bs']}. A fit that could run batches again, and does not have to, takes
{res['fit_with_over_without']:.3f} times as long as one under `rerun=False`, the looks at its
predictions included. Such a look (does fp32 predict the same?) takes
{look} steps, a whole report with a row for each module {report}.

## What healing costs

Transformers of small blocks, each with six linear layers, whose first batch gives numbers beyond 65504 in the middle block or in all.
Passes are forward passes of the step that heals, less the one that any step has; its pause is its time in ordinary steps of the
same fit. Medians of {res['fits']} fits, and one fit of 96 blocks. The goals are 12+6·log2(blocks) passes, and 60 steps, 80 at 96
blocks; in bold what misses them. {met[0]} of {len(rows)} meet the first, {met[1]} the second.

{diagnosis.depth_table(rows)}

After the {len(shares)} trainings of [hostile.py](hostile.py), {100*average:.0f} % of linear layers and convolutions compute in half
precision on average: {100*shares[least]:.0f} % in `{least}`, all in {list(shares.values()).count(1)} of them.

After healing, with attention scores beyond 65504 in all of {after['blocks']} blocks, {after['in_half']} of {after['layers']} linear layers
compute in half precision. A step takes {times('fp32')} of the time of one in fp32, and {times('fp16')} of that
without the fault in fp16: PyTorch has no fast kernels for fp16 on a CPU. A fit that starts with the same in fp32 adds
{weight('fp32'):.2f} times as much to the peak of its process as one in fp32 does, and {weight('fp16'):.2f} times as much as one without
the fault in fp16.

Memory, each in a process of its own, with the ordinary allocator: four steps of four blocks (a linear layer, a ReLU, and squares in own
code) whose activations have {res['samples']*64*4/2**20:.0f} MiB each in fp32, half of that in fp16. The diagnosis is of a batch that
overflows in the first block, and heals it; the report is `learn.diagnose_fp16()` after a fit. Peaks are those of the whole process, for
which the goal is 1.5 times that of a fit in fp16; "added" is without what the process had before the fit (torch, fastai and the data).
Diagnosis and report run the batch in fp32 as well, whose activations take twice as much.

{diagnosis.memory_table(res['memory'])}"""

def _doctor():
    res = read('doctor')
    versions = ', '.join(f'{k} {v}' for k,v in res['libraries'].items())
    return f"""## What the doctor says before training

{res['machine']}; {versions}. `fp16_doctor` on one batch of noise, of architectures with fresh weights, by the worst that it finds in the
model; what it says of optimizer and device does not count. Hostile are the trainings of [hostile.py](hostile.py), some hazards in a few
lines, and architectures that fp16 cannot do: DeBERTa's mask raises, LongT5's adds -1e10, and torchvision's Swin v2 divides by the norm of
padding where its windows do not fit.

{doctor.table(res)}

{doctor.alarms(res)} (`rms` is kept in fp32 by its name, and `tiny_loss` needs a loss scale, which it has.)

Its time in steps of a fit in fp16, after a first call: {doctor.times(res)}."""

def _gpu():
    found = "There is no result yet: no GPU was at hand. What the script does is tested with toys on a CPU."
    if gpu_results.exists():
        res = json.loads(gpu_results.read_text())
        found = '\n'.join([f"{res['machine']}.\n", gpu.head(), *map(gpu.line, res['rows']), '\n![throughput](gpu.png)'])
    return f"""## Real work, on a GPU

Whole trainings with `fit_one_cycle` by fastai, by this package, by Lightning and by Accelerate, the same models from the same weights,
at two batch sizes: `uv run python benchmarks/gpu.py` (nine minutes on a large GPU; `--bs 8 32` for a T4).

{found}"""

def _bf16():
    res,without = read('bf16_cpu'),read('bf16_cpu_without')
    worst = min(r['ours'][1] for r in res['rows'])
    return f"""## bf16 on a CPU

{res['machine']}, which has instructions for bf16. The goal was 1.8 times where plain torch reaches 2; the least here is {worst:.2f}.

{bf16_cpu.table(res)}

The same CPU, told not to use these instructions (`ONEDNN_MAX_CPU_ISA={without['limited_to']}`), as one that lacks them; of such a one
`fp16_doctor` says so.

{bf16_cpu.table(without)}"""

def _fp16():
    res = read('fp16_cpu')
    return f"""## fp16 convolutions on a CPU

{res['machine']}, {'with' if res['bf16'] else 'without'} instructions for bf16. PyTorch has no
fast kernels for fp16 there, which the first fit warns of.

{fp16_cpu.table(res)}"""

def _growth():
    res = read('scaling')
    few,many,large = (res[k][i] for k,i in (('by_number',0),('by_number',-1),('by_size',-1)))
    return f"""## How the cost grows

{res['machine']}. What mixed precision adds to a step, in fastai's loop and in one by hand: casts of weights and gradients, unscaling, norm
and check, and for ours fastai's events. The optimizer does nothing here, there is no arithmetic, and the time of the same loop without
mixed precision is subtracted.

![cost by number of tensors and by size](scaling.png)

With {few['tensors']} small tensors it is {few['ours'][1]:.2g} ms (by hand {few['by_hand'][1]:.2g} ms), nearly all of it Python and fastai's
events, with {many['tensors']:,} tensors {many['ours'][1]:.0f} ms ({many['by_hand'][1]:.0f} ms). With {large['elements']:,} elements it is
{large['ours'][1]:.0f} ms ({large['by_hand'][1]:.0f} ms), and one copy of as many bytes takes {large['copy'][1]:.0f} ms."""

# %% the rest
def _memory():
    res = read('memory')
    return f"""## Memory

{res['machine']}. What three training steps of an MLP of {res['parameters']/1e6:.0f}M parameters add to the peak of the process, in
multiples of the parameters' bytes in fp32; `Adam` and `GradientClip` with fastai's, `AdamW16` and `GradientNormClip` with ours.
Half-precision gradients turn into fp32 in parts of 25 MiB, as soon as they are there, and are kept no longer than until the step.

{memory.table(res)}"""

def _policies():
    res = read('scale_policy')
    n = len({r['data'] for r in res['rows'] if r['kind']=='training'})
    return f"""## How the loss scale should move

Of {n} trainings ([trainings.py](trainings.py), computed in bf16, which overflows nowhere), [gradient_maxima.json](gradient_maxima.json) has
the largest scale that no gradient of each step would have overflowed at. Heavy tails are drawn around one maximum. Ours skips none of
these steps, and runs their batches again; "runs again" counts runs besides the first, per hundred steps. "Bits below the best" counts up
to 2^24, and only steps that are taken (a training whose steps are all skipped, as one is at 512, counts for the first column only);
"become 0" are gradients other than 0 that the scale leaves below fp16. Means over the trainings, and over the tails.

{scale_policy.table(res)}

Growing sooner than torch regains bits for few batches that run again; the default is explained in [00_scaler](../nbs/00_scaler.ipynb).
To grow only into room that maxima have shown would save some of these runs, and would have to look at the maxima in all other steps:
not worth its cost."""

def _ends():
    res = read('convergence')
    seeds = len(res['rows'][0]['figures'])
    return f"""## Where trainings end

{res['machine']}. {seeds} seeds; the same seed gives the same data, weights and order of batches to all. Mean ± standard deviation, and in
parentheses the mean of the paired differences to fp32 ± its standard error, bold where a t-test at 5 % tells it from 0 (by chance, one in
twenty would be).

![differences to fp32](convergence.png)

{convergence.table(res)}"""

def _published():
    res = read('published')
    versions = ', '.join(f'{k} {v}' for k,v in res['libraries'].items())
    return f"""## Published failures

{published.claim(res['rows'])}.

{res['machine']}, {versions}. Failures in fp16 that people have reported, rebuilt with the libraries' own code in
tiny models with random weights. Before step {published.at+1} of {res['steps']}, weights become such that the numbers of the report occur
in the module that it names; the masks of LongT5 and DeBERTa are too much for fp16 from the first step. The reports on LongT5's loss and
on mDeBERTa name no module: their place is where the code overflows. transformers has no VAE of Stable Diffusion: the decoder of Janus,
which has the same blocks, stands for it. Two reports are not on timm's models: that on `F.normalize`, which XCiT calls, and that on
MAGE's ViT-L. timm computes EfficientViT's attention in fp32 since that report, which is undone here.

"Autocast and `GradScaler`" is a loop by PyTorch's recipe. To end where fp32 ends is to skip no step, and to have a validation loss within
{100*res['near']:g} % of that of the same fit in fp32. "By rounding alone" is the distance of a fit in fp32 that
rounds the outputs of the layers which ours computes in half precision. A fault is named if a report has the module that was
published, and the operation where that is in the module's own code; [published.py](published.py) has what counts as
such. XCiT's report names the layer that gets the large gradient of `F.normalize`, not the function. Layers are linear layers and
convolutions; "could" counts those that would compute in half precision if of a module only its own code stayed in fp32. "None to
spare": with any module less in fp32 the batch fails again. A pause is the time of the step that found it all out, in ordinary steps of
the same fit, as the median of three fits.

{published.table(res)}"""

# %% programs
def _programs():
    res,theirs = read('compatibility'),read('libraries')
    versions = ', '.join(f'{k} {v}' for k,v in theirs['libraries'].items())
    return f"""## fastai's own notebooks

{res['machine']}, fastai {res['fastai']}, notebooks of a checkout at {res['checkout']}: those that build learners, each in
a process of its own. Their test cells run as they are, and with every learner in half precision from the moment it is made. Cells that
need what the machine did not have are counted apart.

{compatibility.table(res)}

Of the cells that pass as they are, these do not with ours:

{compatibility.differing(res)}

## tsai and fastxtend

{theirs['machine']}, fastai {theirs['fastai']}, {versions}: trainings, searches for a learning rate, exports,
callbacks, optimizers and architectures of these libraries, each as it is and with ours. Distances are the largest of all losses of a
flow to those of the same flow in fp32. fastxtend was made for fastai 2.7: some of its modules import names that fastcore and torch have
moved since, and run with these put back.

{libraries.table(theirs)}

{libraries.failing(theirs)}""".rstrip()

sections = (_intro,_short,_ends,_published,_programs,_steps,_compiled,_dispatch,_diagnosis,_doctor,_gpu,_bf16,_fp16,_memory,
            _accumulated,_policies,_growth)
def make(): return '\n\n'.join(o() for o in sections)+'\n'

if __name__=='__main__': (here/'README.md').write_text(make())
