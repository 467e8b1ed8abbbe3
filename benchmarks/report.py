"Makes benchmarks/README.md from the JSON files of the benchmarks: every number of a result comes from them"
import json,re,statistics,textwrap
from pathlib import Path
import accumulation,bf16_cpu,compatibility,compiled,convergence,cuda_dispatch,diagnosis,doctor,epsilon,fp16_cpu,gpu,libraries,memory
import published,scale_policy,short_fits,silent,step_cost,survival

here = Path(__file__).parent
gpu_results = here/'gpu.json'
def read(name): return json.loads((here/f'{name}.json').read_text())

# group: script: (the question that it answers, titles of its sections)
contents = {
    'Accuracy': {
        'short_fits': ('Do short fits end where fp32 ends?', ['Short fits']),
        'convergence': ('Do whole trainings end where fp32 ends?', ['Whole trainings']),
        'epsilon': ("Which eps of Adam's trains best?", ["Adam's eps"]),
        'published': ('What happens to published failures in fp16? (needs transformers and timm)', ['Published failures']),
        'silent': ('Is half precision noticed where it is finite but wrong?', ['Finite but wrong']),
        'survival': ('Which difficult trainings and events does a fit survive?', ['What survives']),
        'scale_policy': ('Which policy moves the loss scale best? (`--record` records new gradients)', ['Policies for the loss scale'])},
    'Speed': {
        'step_cost': ('How long does a step take?', ['Time per step']),
        'compiled': ('How long does a step of a compiled model take?', ['Time per compiled step']),
        'cuda_dispatch': ('How many kernels does a forward pass launch on a GPU? (needs no GPU)', ['Kernels of a forward pass on a GPU']),
        'scaling': ('How does the cost grow with the number of tensors and their size?', ['Cost by number and size of tensors']),
        'gpu': ('How fast are whole trainings on a GPU, and how much memory do they take?', ['Whole trainings on a GPU']),
        'bf16_cpu': ('How fast is bf16 on a CPU?', ['bf16 on a CPU']),
        'fp16_cpu': ('How slow are fp16 convolutions on a CPU?', ['fp16 convolutions on a CPU'])},
    'Memory': {
        'memory': ('How much memory does a training take on a CPU?', ['Peak memory on a CPU']),
        'accumulation': ('How much memory does gradient accumulation take?', ['Memory of accumulated batches'])},
    'Diagnosis and healing': {
        'diagnosis': ('What do reports and healing cost?', ['Comparisons with fp32 and reports', 'Healing', 'Memory of a diagnosis']),
        'doctor': ('Does `fp16_doctor` warn about the right models?', ['The doctor'])},
    'Compatibility': {
        'compatibility': ("Do fastai's own notebooks pass in half precision?", ["fastai's own notebooks"]),
        'libraries': ('Do programs that use other libraries run?', ['Programs of other libraries'])}}

def _anchor(title): return '#'+re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-')

def _result(title): return f'[{title}]({_anchor(title)})'

def _intro():
    rows = []
    for group,scripts in contents.items():
        rows.append(f'| **[{group}]({_anchor(group)})** | | |')
        rows += [f"| `{k}.py` | {question} | {', '.join(map(_result, titles))} |" for k,(question,titles) in scripts.items()]
    rows = '\n'.join(rows)
    return f"""<!-- made by benchmarks/report.py -->
# Benchmarks

How close does `to_fp16_dynamic` stay to fp32, and what does it cost? Each section begins with the result, and then says how it was
measured. Where a goal was missed, it says so. All times and memory were measured on a CPU, except for [Whole trainings on a
GPU](#whole-trainings-on-a-gpu).

| script | question | result |
| --- | --- | --- |
{rows}

To run a benchmark in a clone of this repository, and to update this page:

```bash
uv run python benchmarks/short_fits.py
uv run python benchmarks/report.py
```

Each script writes a JSON file with its name, and some also draw a chart. All results on this page come from these files.

How times are compared:

- All contenders take turns in one process, so that changes in the speed of the machine affect all of them.
- Times are medians, with quartiles in parentheses. A ratio is the median of the ratios within each round.
- On a CPU, fastai's own classes run with `'cpu'` in place of their hard-coded `'cuda'` ([fastais.py](fastais.py))."""

def _and(xs):
    *xs,last = map(str, xs)
    return f"{', '.join(xs)} and {last}" if xs else last

def _group(name): return lambda: f'## {name}'

def _span(xs, spec='.2f'):
    xs = [*xs]
    return f'{min(xs):{spec}} to {max(xs):{spec}}'

# %% accuracy
def _short():
    res = read('short_fits')
    return f"""### Short fits

{short_fits.claim(res['rows'])}. {short_fits.claim(res['rows'], max)}.

![Distance from the loss of fp32 after 15, 50 and 150 steps: fits that run batches again end nearer](short_fits.png)

The baseline is a fit in fp32 with the same data, weights, batches and dropout. The distance is that between the validation losses, computed
in fp32. The table shows the mean over {res['seeds']} seeds and, in parentheses, the largest distance. {res['machine']}.

"Skipping" is `to_fp16_dynamic(rerun=False)`, which starts from the same loss scale and skips steps like PyTorch's `GradScaler`.

{short_fits.table(res)}"""

def _ends():
    res = read('convergence')
    seeds = len(res['rows'][0]['figures'])
    return f"""### Whole trainings

{convergence.claim(res)}.

![Differences between the final metrics and those of fp32, a dot per seed](convergence.png)

Each training runs with {seeds} seeds, and with a given seed, all precisions get the same data, weights and batches. {res['machine']}.

The table shows the mean of the final metric ± its standard deviation. In parentheses is the mean difference from fp32 ± its standard error.
A difference is bold if it is significant in a paired t-test at the 5% level; by chance, about 1 in 20 would be. With {seeds} seeds, only
differences of about three standard errors or more are significant. Where a training raises an error, the table says for how many seeds:
fastai's `to_fp16` fails with an LSTM, since PyTorch has none in fp16 for CPUs.

{convergence.table(res)}"""

def _epsilon():
    res = read('epsilon')
    n = len(epsilon.groups(res))//len(epsilon.precisions)
    def ends(o): return f"{o['better']} end better with {epsilon.written(o['eps'])}, and {o['worse']} worse"
    def with_eps(to): return '; '.join(ends(o) for o in res['counts'] if o['precision']==to)
    return f"""### Adam's eps

Of {n} whole trainings with `AdamW16`, compared with its eps of 1e-4, in fp16: {with_eps('to_fp16_dynamic')}.
In fp32: {with_eps('to_fp32')}. All other differences may be chance.

The trainings are those of [Whole trainings](#whole-trainings), {len(res['rows'][0]['figures'])} seeds each. A cell is the mean ± the
standard deviation, or the mean of the paired differences ± its standard error; differences that are significant at 5% are bold (by chance,
1 in 20 is). {res['machine']}, fastai {res['fastai']}.

{epsilon.table(res)}"""

def _published():
    res = read('published')
    versions = ', '.join(f'{k} {v}' for k,v in res['libraries'].items())
    return f"""### Published failures

{published.claim(res['rows'])}. {published.explained(res['rows'])}

These are failures in fp16 that people have reported, rebuilt with the code of transformers and timm, in tiny models with random weights.
Before step {published.at+1} of {res['steps']}, the weights change so that the numbers of the report occur in the module that it names. The
masks of LongT5 and DeBERTa overflow from the first step. {res['machine']}, {versions}.

How to read the columns:

- **With autocast and `GradScaler`** is PyTorch's usual training loop.
- A fit **ends where fp32 ends** if it skips no step, and its validation loss is within {100*res['near']:g}% of that of the same fit in
  fp32.
- **Distance by rounding alone** is that of an fp32 fit that rounds the outputs of those layers that compute in half precision after
  healing.
- **The fault is named** if a report names the published module, and the operation if it is in the module's own code.
- **Layers in half precision after healing** counts linear layers and convolutions.
- **Every fp32 module is needed** if the batch fails again as soon as any of the modules that stay in fp32 is put back into half precision.
- **Pause** is the time of the slowest step with a diagnosis, in ordinary steps of the same fit (median of three fits).

Where the rebuilt failure differs from the report:

- The reports on LongT5's loss and on mDeBERTa name no module. Here, the published module is the one whose code overflows.
- transformers has no VAE of Stable Diffusion. The decoder of Janus, which has the same blocks, takes its place.
- Two reports are not about timm's models: the one on `F.normalize`, which XCiT calls, and the one on MAGE's ViT-L.
- Since the report, timm computes EfficientViT's attention in fp32. This is undone here.
- Gemma 3's norms are in fp32 from the start, so its fault does not occur, and there is nothing to name.
- For XCiT, the diagnosis names the layer that gets the large gradient of `F.normalize`, not the function.

[published.py](published.py) has the details of each.

{published.table(res)}"""

def _silent():
    res = read('silent')
    rows = res['rows']
    return f"""### Finite but wrong

{silent.claim(rows)}.

{silent.table(rows)}

The programs are small and drawn at random from {silent.n_families(rows, 'wrong')} families of wrong ones and
{silent.n_families(rows, 'healthy')} of healthy ones ([families.py](families.py)): level, frequency, scale, width, depth,
activation, norm, batch size, optimizer, learning rate, loss and the moment when a fault begins. They are trained with `fit_one_cycle`,
most of them for 30 to 100 steps. One counts as wrong if plain half precision ends with more than {silent.is_wrong} times
the loss of fp32, and within {silent.is_mended} with the part at fault in fp32. It is as it should be if
it ends within {silent.is_right}, what is kept is named, and
{silent.left_in_half:.0%} of its layers are in half precision (or all but one). One counts as healthy if plain half precision ends within
{silent.is_healthy}, with no loss scale below 1; then nothing should be said or kept. The families that have programs which are not as
they should be, in all columns:

{silent.by_family(rows)}

{res['machine']}, fastai {res['fastai']}."""

def _survival():
    res = read('survival')
    kinds = [[r for r in res['rows'] if r['kind']==kind] for kind in ('training','event')]
    def kept(rows, to): return sum(r[to] for r in rows)
    (hard,events),ours = kinds,'to_fp16_dynamic'
    return f"""### What survives

Of {len(hard)} trainings that are hard for fp16, {kept(hard, ours)} survive with `to_fp16_dynamic`, and {kept(hard, 'to_fp16')}
with `to_fp16`. Of {len(events)} events in a fit, {kept(events, ours)} and {kept(events, 'to_fp16')}.

A training survives (✓) if it ends within 0.05 of fp32's accuracy or R² (one seed). In everyday training, `to_fp16` usually works.
`to_non_native_fp16` is fastai's older one, with a second copy of the model in fp16. fastai's two are patched to run on a CPU, and autocast
follows CUDA's rules here, as it does for their users: it computes sums, `exp` and norms in fp32, and refuses `BCELoss`.
{res['machine']}, fastai {res['fastai']}.

{survival.table('training', hard)}

The events happen in fits of small models. ✓: the row is true. Plain fp32 fails rows 2 to 4 and the last.

{survival.table('event', events)}"""

def _policies():
    res = read('scale_policy')
    n = len({r['data'] for r in res['rows'] if r['kind']=='training'})
    return f"""### Policies for the loss scale

{scale_policy.claim(res['rows'])}.

A higher loss scale keeps more small gradients from rounding to 0, but overflows more often. To compare policies, {n} trainings
([trainings.py](trainings.py)) ran in bf16, which never overflows. [gradient_maxima.json](gradient_maxima.json) has the largest scale that
each of their steps could have used in fp16. Each policy is replayed on these steps, and on artificial steps whose largest gradients vary a
lot.

- **Steps skipped**: `to_fp16_dynamic` runs such batches again instead, which **reruns per 100 steps** counts.
- **Bits below the best scale** is how far the scale is below the largest possible one, up to 2^24.
- **Gradients that become 0** are nonzero gradients that are too small for fp16 at this scale.

The last two count only steps that are taken. All numbers are means over the trainings, or over the artificial distributions.

{scale_policy.table(res)}

`to_fp16_dynamic` lets the scale grow sooner than PyTorch does: this regains bits, at the cost of a few reruns. [The scaler's
page](../nbs/train/00_scaler.ipynb) explains the default. A scaler that grows only if the last gradients leave room would save some
reruns, but it would have to measure the largest gradient in every step."""

# %% speed
def _met(rows, key, goal):
    "A goal, and in how many of `rows` it is met"
    return f"the goal was {goal:.2f}; met in {sum(r[key][1]<=goal for r in rows)} of {len(rows)} rows"

def _small_steps(res):
    ours = [r for r in res.get('small', []) if r['contender']==step_cost.small_own]
    if not ours: return ''
    careful = [r['ms'][1] for r in res['small'] if r['contender']==step_cost.small_careful]
    over = _span(r['ms'][1]/ms for r,ms in zip(ours, careful))
    return f"""

#### Small models

A step of a small model, whose arithmetic takes less time than the loop around it, takes {_span(r['over_to_fp16'][1] for r in ours)} of the
time of fastai's `to_fp16` with the same optimizer, `AdamW16`, and without clipping ({_met(ours, 'over_to_fp16', 1.10)}).
On a CPU, autocast leaves norms in half precision. With norms in fp32, as in `to_fp16_dynamic` and on a GPU, the ratio is {over}.

{step_cost.table_small(res['small'])}"""

def _steps():
    res = read('step_cost')
    tensors = _and(r['tensors'] for r in res['rows'][:3*len(step_cost.stacks):len(step_cost.stacks)])
    ours = [r for r in res['rows'] if r['contender']==step_cost.own]
    over = {k: _span(r[k][1] for r in ours) for k in ('over_to_fp16','over_floor','over_careful_floor')}
    return f"""### Time per step

With `to_fp16_dynamic`, a step takes {over['over_to_fp16']} of the time of fastai's `to_fp16` with `Adam` and `GradientClip`, and
{over['over_floor']} of the time of a hand-written PyTorch loop inside fastai's.

- Relative to `to_fp16`: {over['over_to_fp16']} ({_met(ours, 'over_to_fp16', 0.60)}).
- Relative to the baseline: {over['over_floor']} ({_met(ours, 'over_floor', 1.05)}).
- Relative to the baseline with norms in fp32: {over['over_careful_floor']} ({_met(ours, 'over_careful_floor', 1.05)}).

The **baseline** is the time of the hand-written loop (autocast, `GradScaler`, fused AdamW, clipping) plus that of fastai's loop and
callbacks with nothing to compute. The **baseline with norms in fp32** computes norms as `to_fp16_dynamic` does on a CPU, where norms in
half precision lose digits. (On a GPU, batch norms need no cast, and autocast itself casts around layer norms.) The remaining difference is
the time to record the state at the start of each step, so that it can run again, and to put temporary stand-ins in place, such as the one
for the loss function.

The models have {tensors} tensors, most of them with 16 × 16 elements, so that launching operators takes most of the time.
{res['machine']}, {res['rounds']} rounds of {res['steps']} steps.

{step_cost.table(res)}

- **Other operators** are those outside the forward and backward pass: unscaling, clipping, the check for overflow, the optimizer, recording
  what the batch may change, and fastai's own bookkeeping.
- **Reads** counts how often the host waits for a number from the device. On a GPU, fastai's `Recorder` also copies the loss once per batch,
  in all rows with fastai's loop.
- `to_non_native_fp16` runs with `clip=1` and `max_loss_scale=2**16`, since at its default of 2^24, each fit would skip its first steps.
- In the first step, the 16th, the 48th and so on, `to_fp16_dynamic` also runs the batch in fp32, which medians do not show.
  [Comparisons with fp32](#comparisons-with-fp32-and-reports) have their own section.{_small_steps(res)}"""

def _compiled():
    res = read('compiled')
    ours = [r for r in res['rows'] if r['compiled'] and r['contender']==compiled.own]
    widths = _and(r['width'] for r in res['rows'][::2*len(compiled.stacks)])
    return f"""### Time per compiled step

With `torch.compile`, a step with `to_fp16_dynamic` takes {_span((r['over_hand'][1] for r in ours), '.3f')} of the time of a hand-written
PyTorch loop ({_met(ours, 'over_hand', 1.05)}).

The models and the hand-written loop are those of [Time per step](#time-per-step), with widths of {widths}, before and after `torch.compile`
({res['backend']}). {res['machine']}, {res['rounds']} rounds of {res['steps']} steps at batch size {res['batch_size']}.

{compiled.table(res)}"""

def _dispatch():
    res = read('cuda_dispatch')
    return f"""### Kernels of a forward pass on a GPU

{cuda_dispatch.claim(res['rows'])}.

No GPU is needed to count kernels: PyTorch {res['torch']} runs the models on fake CUDA tensors, which have a device, dtype and layout but no
data, and autocast treats them as on a GPU. The models are in training mode. Attention counts as one kernel. So does a multi-tensor
operation, for up to 64 tensors or 320 blocks of 65,536 elements.

The table shows the number of kernels and, in parentheses, how many of them are casts between fp32 and half precision.

{cuda_dispatch.table(res)}

Most of the casts are those of weights, which `to_fp16_dynamic` leaves to autocast: one kernel for each. The other casts are:

- those of the inputs;
- those around norms whose kernels need fp32 weights or keep their statistics in the dtype of the input: layer norms with weights, group
  norms and RMS norms. Batch norms and instance norms need no cast, since they read half precision and compute in fp32;
- those before and after a softmax, which are autocast's."""

def _growth():
    res = read('scaling')
    few,many,large = (res[k][i] for k,i in (('by_number',0),('by_number',-1),('by_size',-1)))
    return f"""### Cost by number and size of tensors

With {few['tensors']} small tensors, mixed precision adds {few['ours'][1]:.2g} ms to a step ({few['by_hand'][1]:.2g} ms in a hand-written
loop); with {many['tensors']:,} tensors, it adds {many['ours'][1]:.0f} ms ({many['by_hand'][1]:.0f} ms).

![Time that mixed precision adds to a step, by number of tensors and by number of elements](scaling.png)

This time covers casts of weights and gradients, unscaling, the norm and the check for overflow, and in fastai's loop also its events. There
is no arithmetic, the optimizer does nothing, and the time of the same loop without mixed precision is subtracted. {res['machine']}.

For few small tensors, nearly all of it is Python and fastai's events. With {large['elements']:,} elements, it is {large['ours'][1]:.0f} ms
({large['by_hand'][1]:.0f} ms in a hand-written loop), and a single copy of as many bytes already takes {large['copy'][1]:.0f} ms."""

def _throughput(res):
    over = [o for r in res['ours_over_to_fp16'] if r['model']!=gpu.only_predictions and (o := r.get('over_to_fp16'))]
    if not over: return 'No training could be compared with `to_fp16`.'
    fused = [o for (model,_),o in gpu.ratios(res, 'to_fp16_dynamic', 'to_fp16_fused').items() if model!=gpu.only_predictions]
    same = f"It is {_span(fused)} times if `to_fp16` has a fused AdamW, too, so the gain is that of the optimizer." if fused else ''
    return f"`to_fp16_dynamic` trains {_span(over)} times as many samples per second as fastai's `to_fp16` with `Adam`. {same}"

def _batch_norms(res):
    "What they cost in bf16"
    bs = max(res['arguments']['bs'])
    of = {r['contender']: r.get('samples_per_second') for r in res['rows'] if (r['model'],r['bs'])==('resnet50',bs)}
    fp16,bf16 = of.get('to_fp16_dynamic'),of.get('to_bf16_dynamic')
    if fp16 and bf16 and bf16<fp16: yield f"""**Batch norms are slower in bf16 than in fp16**, since PyTorch gives them to cuDNN in fp16,
but not in bf16: `resnet50` with batches of {bs} trains {bf16:,.0f} samples per second with `to_bf16_dynamic`, and {fp16:,.0f} with
`to_fp16_dynamic`."""

def _gpu_memory(res):
    "What `to_fp16_dynamic` takes"
    adam,fused = [gpu.ratios(res, 'to_fp16_dynamic', base, 'peak_mib').values() for base in ('to_fp16','to_fp16_fused')]
    same = f', {_span(fused)} times with its fused AdamW' if fused else ''
    if adam: yield f"**Peak memory** is {_span(adam)} times that of `to_fp16`{same}."

def _compared(res):
    "How much longer steps take on average where one of them is compared with fp32, in a model of little else but predictions"
    model,bs = gpu.only_predictions,max(res['arguments']['bs'])
    of = {r['contender']: r for r in res['rows'] if (r['model'],r['bs'])==(model,bs)}
    if not {'to_fp16_dynamic','to_fp16_fused'}<=of.keys(): return
    ours,fused = [bs/of[o]['samples_per_second'] for o in ('to_fp16_dynamic','to_fp16_fused')]
    yield f"""**Large predictions**: `{model}` computes little else than 10,000 logits for each token. With batches of {bs}, a step took
{1e3*ours:.1f} ms, and {1e3*fused:.1f} ms with `to_fp16` and a fused AdamW: one of these {res['arguments']['steps']} steps is compared with
fp32. A longer fit compares fewer of its steps, in the end one of 256."""

def _caveats(res):
    "What a reader must know of these results"
    def names(os): return _and(f'`{o}`' for o in os)
    few = [o for o in res['arguments']['models'] if any(r.get('rounds')==1 for r in res['rows'] if r['model']==o)]
    left_out = [o for k,there in (('models',gpu.models),('contenders',gpu.contenders)) for o in there if o not in res['arguments'][k]]
    if few: yield f"{names(few)} had one round of few steps, so their numbers are rough."
    if left_out: yield f"Not measured: {names(left_out)}."

def _items(*os): return '\n'.join('- '+' '.join(o.split()) for os in os for o in os)

def _gpu():
    res = json.loads(gpu_results.read_text())
    return f"""### Whole trainings on a GPU

{_throughput(res)}

{_items(_batch_norms(res), _gpu_memory(res), _compared(res))}

![Throughput relative to fastai's to_fp16, by model and batch size](gpu.png)

`uv run python benchmarks/gpu.py` trains whole models with fastai's `fit_one_cycle`, with this package, with Lightning and with Accelerate,
from the same weights and at two batch sizes. It takes nine minutes on a large GPU. On a T4, use `--bs 8 32`. Ratios to a fused AdamW are
those of the medians. {res['machine']}.

{_items(_caveats(res))}

{gpu.head()}
{chr(10).join(map(gpu.line, res['rows']))}"""

def _bf16():
    res,without = read('bf16_cpu'),read('bf16_cpu_without')
    def speed(res, k='ours'): return _span(r[k][1] for r in res['rows'])
    return f"""### bf16 on a CPU

On a CPU with instructions for bf16, training with `to_bf16_dynamic` is {speed(res)} times as fast as fp32, and {speed(res, 'by_hand')}
times with plain autocast (the goal was at least 1.8 where autocast reaches 2). {res['machine']}.

{bf16_cpu.table(res)}

Without these instructions, bf16 reaches {speed(without)} times the speed of fp32. For this measurement, the same CPU does not use them
(`ONEDNN_MAX_CPU_ISA={without['limited_to']}`). On such a CPU, `fp16_doctor` warns you.

{bf16_cpu.table(without)}"""

def _fp16():
    res = read('fp16_cpu')
    slower = _span((r['slower']['to_fp16_dynamic'][1] for r in res['rows']), '.2g')
    return f"""### fp16 convolutions on a CPU

On a CPU, a step of a convolutional network in fp16 takes {slower} times as long as in fp32. PyTorch has no fast kernels for it there, and
the first fit warns you.

{res['machine']}, {'with' if res['bf16'] else 'without'} instructions for bf16.

{fp16_cpu.table(res)}"""

# %% memory
def _of_large(res):
    bs,seq,words = res['predictions']
    def span(part): return _span(r['over_fp32'][o] for r in res['large'] if r['part']==part for o in memory.comparing)
    never = [o for o in memory.large_contenders if o not in (memory.base,*memory.comparing)]
    without = _span(r['over_fp32'][o] for r in res['large'] for o in never)
    return f"""With many predictions, which the first step of a fit and a validation compare with those of fp32, the former reaches
{span('step 1')} times the peak of fp32, and the latter {span('validation')} times. Without comparisons (`rerun=False`), it is
{without} times.

The model is an embedding and a linear layer. It predicts {bs} × {seq} × {words:,} numbers. The table shows what the step or the validation
adds to the peak of the process, divided by what it adds in fp32. {res['machine']}."""

def _memory():
    res = read('memory')
    def span(k): return _span(r[k] for r in res['rows'])
    large = res.get('large', [])
    of_large = f"""

#### Large predictions

{_of_large(res)}

{memory.table_large(res)}""" if large else ''
    return f"""### Peak memory on a CPU

With `to_bf16_dynamic`, three training steps add {span('to_bf16_dynamic')} times the size of the parameters to peak memory; in fp32, they
add
{span('to_fp32')} times, and with fastai's `to_bf16` {span('to_bf16')} times.

The model is an MLP with {res['parameters']/1e6:.0f}M parameters. The table shows what the steps add to the peak of the process, divided by
the size of the parameters in fp32. fastai's own classes run with `Adam` and `GradientClip`, this package with `AdamW16` and
`GradientNormClip`.
{res['machine']}.

{memory.table(res)}

`to_bf16_dynamic` takes less than `to_bf16` because `AdamW16` is fused, and makes no temporary copies.{of_large}"""

def _accumulated():
    res = read('accumulation')
    n,size = res['accumulation'],res['size']
    most = max((r for r in res['rows'] if r['kept']), key=lambda r: r['kept'])
    mib = {k: f'{most[k]/2**20:.0f} MiB' for k in ('kept','peak')}
    return f"""### Memory of accumulated batches

Before a step that accumulates the gradients of {n} batches of {most['batch_size']} images, {mib['kept']} of inputs and targets are kept so
that they can run again, and peak memory grows by {mib['peak']}.

All batches since the last step are kept, up to 1 GiB. Beyond that, they are freed, and a step that overflows is skipped. The images have
3 × {size} × {size} numbers in fp32. The increase is relative to `to_fp16_dynamic(rerun=False)`. {res['machine']}.

{accumulation.table(res)}"""

# %% diagnosis and healing
def _looks():
    res = read('diagnosis')
    look,report = [f'{q[1]:.2g} ({q[0]:.2g} to {q[2]:.2g})' for q in (res['look_in_steps'],res['report_in_steps'])]
    return f"""### Comparisons with fp32 and reports

A fit that can run batches again takes {res['fit_with_over_without']:.3f} times as long as one with `rerun=False`, if no batch has to run
again.

In the 1st, 16th, 48th, 112th step and so on, with gaps that double up to 256, and in the first batch of a validation, the model also runs
in fp32, to see whether it predicts the same. Such a comparison adds {look} steps, which are part of the time above. A full report, with a
row for each module (`learn.diagnose_fp16()`), takes {report} steps.

The model has {res['depth']} linear layers of width {res['width']}. A fit has {res['steps']} steps of {res['ms_per_step']:.1f} ms at batch
size {res['bs']}. {res['machine']}, {res['rounds']} rounds."""

def _healing():
    res = read('diagnosis')
    after,over,rows = res['afterwards'],res['afterwards']['over'],res['by_depth']
    def times(k): return f'{over[k][1]:.2f} ({over[k][0]:.2f} to {over[k][2]:.2f})'
    def weight(k): return (after['added']['healed'][1]-after['added']['healed'][0])/(after['added'][k][1]-after['added'][k][0])
    shares = {k: half/layers for k,(half,layers) in res['hostile'].items()}
    least,average = min(shares, key=shares.get),statistics.mean(shares.values())
    passes,pause = [sum(r[k]<=diagnosis.goals(r['blocks'])[i] for r in rows) for i,k in enumerate(('passes','pause'))]
    return f"""### Healing

Healing pauses a fit for as long as {_span((r['pause'] for r in rows), '.0f')} ordinary steps take, and afterwards,
{_span((r['in_half']/r['layers'] for r in rows), '.0%')} of the layers still compute in half precision.

- **Forward passes**: the goal was at most 12+6·log2(blocks), and is met in {passes} of {len(rows)} rows.
- **Pause**: the goal was at most 60 steps, or 80 with 96 blocks, and is met in {pause} of {len(rows)} rows.

The models are transformers of small blocks, each with six linear layers. In the first batch, numbers beyond 65504 occur in the middle
block, or in all blocks. The table counts the forward passes of the step that heals, except for the one that every step has, and its time in
ordinary steps of the same fit. Missed goals are bold. All numbers are medians of {res['fits']} fits, except for those with 96 blocks, which
ran once.
{res['machine']}.

{diagnosis.depth_table(rows)}

**What stays in half precision.** After the {len(shares)} trainings of [hostile.py](hostile.py), {100*average:.0f}% of the linear layers and
convolutions compute in half precision on average: all of them in {list(shares.values()).count(1)} trainings, and
{100*shares[least]:.0f}% in `{least}`.

**Afterwards.** If attention scores overflow in all of {after['blocks']} blocks, {after['in_half']} of {after['layers']} linear layers still
compute in half precision after healing. A step then takes {times('fp16')} of the time of a step in fp16 without the fault. It takes
{times('fp32')} times as long as one in fp32, because PyTorch has no fast kernels for fp16 on a CPU. A new fit with the same layers in fp32
adds {weight('fp32'):.2f} times as much to peak memory as one in fp32, and {weight('fp16'):.2f} times as much as one in fp16 without the
fault."""

def _diagnosis_memory():
    res = read('diagnosis')
    peaks = {k: top for k,(_,top) in res['memory'].items()}
    ratio = {k: peaks[k]/peaks['fit'] for k in ('diagnosis','report')}
    return f"""### Memory of a diagnosis

A batch that is diagnosed and healed raises the peak memory of the process to {ratio['diagnosis']:.2f} times that of a fit in fp16, and a
report to {ratio['report']:.2f} times (the goal was 1.5; met in {sum(o<=1.5 for o in ratio.values())} of {len(ratio)} rows).

Diagnosis and report also run the batch in fp32, whose activations take twice as much. The model has four blocks (a linear layer, a ReLU,
and squares in the block's own code), whose activations have {res['samples']*64*4/2**20:.0f} MiB each in fp32. Each fit has four steps, and
its own process with the default allocator. In "diagnosis", a batch overflows in the first block; "report" is `learn.diagnose_fp16()` after
a fit. "Added" excludes what the process took before the fit (PyTorch, fastai and the data). {res['machine']}.

{diagnosis.memory_table(res['memory'])}"""

def _doctor():
    res = read('doctor')
    versions = ', '.join(f'{k} {v}' for k,v in res['libraries'].items())
    return f"""### The doctor

{doctor.claim(res)}.

`fp16_doctor` runs one batch of noise through models with fresh weights. The table counts each model by its worst finding, apart from
findings about the optimizer and the device. Hostile models are:

- the trainings of [hostile.py](hostile.py);
- hazards of a few lines;
- architectures that fail in fp16: DeBERTa's mask raises an error, LongT5's mask adds -1e10, and torchvision's Swin v2 divides by the norm
  of padding if its windows do not fit.

{res['machine']}; {versions}.

{doctor.table(res)}

{doctor.alarms(res)} `to_fp16_dynamic` keeps the norm in `rms` in fp32 because of its name, and `tiny_loss` needs nothing but a loss scale.
The doctor runs one batch, and the others fit in it. What only a later batch meets, the fit finds then, without losing it.

The time the doctor takes, in training steps of the same model in fp16, and after a first call:

{doctor.times(res)}"""

# %% compatibility
def _notebooks():
    res = read('compatibility')
    def passed(mode): return sum(r['passed'][mode] for r in res['rows'])
    return f"""### fastai's own notebooks

Of {passed('plain')} test cells in fastai's notebooks that pass unchanged, {passed('to_fp16_dynamic')} pass with `to_fp16_dynamic`,
{passed('to_bf16_dynamic')} with `to_bf16_dynamic`, and {passed('to_fp16')} with fastai's `to_fp16`.

The cells that pass unchanged but not with this package are:

{compatibility.differing(res)}

These are all notebooks that build learners. Each runs in its own process, once unchanged, and once per precision with every new learner in
half precision. Cells that need a download, a GPU or a missing package are counted separately. {res['machine']}, fastai {res['fastai']},
notebooks of version {res['checkout']}.

{compatibility.table(res)}"""

def _libraries():
    res = read('libraries')
    versions = ', '.join(f'{k} {v}' for k,v in res['libraries'].items() if k!='torch')
    hard = [r for r in res['rows'] if r['library']==libraries.hard]
    return f"""### Programs of other libraries

{libraries.claim([r for r in res['rows'] if r not in hard])}. {libraries.healed(hard)}

The programs are small trainings: with optimizers, by fastai's `OptimWrapper`; with models, losses
and callbacks; learning rate searches and exports. Each runs unchanged in fp32, and with every learner in half precision. The differences
are the largest ones between any smoothed loss of a program and the same loss in fp32. Where fp16 fails, `masked_fill` raises an error,
activations overflow, or gradients overflow. fastxtend was made for fastai 2.7: some of its modules import names that fastcore and PyTorch
have removed since. They run with these names restored. {res['machine']}, fastai {res['fastai']}, {versions}.

{libraries.table(res)}

{libraries.skipped(res)}

{libraries.failing(res)}""".rstrip()

sections = (_intro, _group('Accuracy'), _short, _ends, _epsilon, _published, _silent, _survival, _policies,
            _group('Speed'), _steps, _compiled, _dispatch, _growth, _gpu, _bf16, _fp16,
            _group('Memory'), _memory, _accumulated,
            _group('Diagnosis and healing'), _looks, _healing, _diagnosis_memory, _doctor,
            _group('Compatibility'), _notebooks, _libraries)

def _wrapped(block):
    "Wraps the lines of a paragraph or a list; leaves tables, code, headings and pictures as they are"
    if re.match(r'[|`!<#]', block) and not re.match(r'`[^`]', block): return block
    parts = re.split(r'\n(?=- )', block)
    width = dict(width=140, break_long_words=False, break_on_hyphens=False)
    return '\n'.join(textwrap.fill(re.sub(r'\s+', ' ', o), subsequent_indent='  '*o.startswith('- '), **width) for o in parts)

def make():
    "The text of benchmarks/README.md"
    return '\n\n'.join(map(_wrapped, re.split(r'\n{2,}', '\n\n'.join(o() for o in sections))))+'\n'

if __name__=='__main__': (here/'README.md').write_text(make())
