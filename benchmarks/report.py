"benchmarks/README.md, from the JSON files that the scripts wrote: every number in it is one of theirs"
import json
from pathlib import Path
import bf16_cpu,convergence,gpu,memory,scale_policy,step_cost

here = Path(__file__).parent
def read(name): return json.loads((here/f'{name}.json').read_text())

scripts = {'step_cost': "what a step costs where launches do: milliseconds, operators, host reads", 'gpu': 'samples per second and peak memory of whole trainings, on a GPU',
    'bf16_cpu': 'bf16 next to fp32, on a CPU', 'memory': 'peak memory, on a CPU', 'scale_policy': 'policies of loss scaling, replayed (`--record`: recorded anew)',
    'convergence': 'where trainings end, next to fp32', 'scaling': 'how the cost grows with the number of tensors and with their size',
    'diagnosis': 'what reports and keeping watch cost', 'survival': 'what trainings and events are survived: the table of the [README](../README.md#what-survives)'}

def step(res):
    "What the table says of the goals"
    def of(k): return [r for r in res['rows'] if r['contender']==k]
    ours = of(step_cost.own)
    floors = [h['over_to_fp16'][1]+l['over_to_fp16'][1] for h,l in zip(of(step_cost.hand), of(step_cost.loop))]
    def name(r): return f"{r['model']} at batch size {r['batch_size']}"
    beyond = [f"{name(r)} ({r['over_to_fp16'][1]:.2f}; the floor is at {f:.2f})" for r,f in zip(ours, floors) if r['over_to_fp16'][1]>0.6]
    above = [f"{name(r)} ({r['over_floor'][1]:.2f})" for r in ours if r['over_floor'][1]>1.1]
    def span(key): return f"{min(r[key][1] for r in ours):.2f} to {max(r[key][1] for r in ours):.2f}"
    return (f"Ours takes {span('over_to_fp16')} of the time of fastai's `to_fp16`, and {span('over_floor')} of the floor. The goals were 0.60 and 1.10. "
            +(f"The first is missed by {', '.join(beyond)}. " if beyond else '')+(f"The second is missed by {', '.join(above)}. " if above else '')
            +"What is left is forward and backward pass, in which all compute the same, but for norms: on a CPU ours alone casts to fp32 around them, since CPUs lose digits in half-precision norms.")

def real_work():
    if not (here/'gpu.json').exists(): return "There is no result yet: no GPU was at hand. What the script does is tested with toys on a CPU."
    res = read('gpu')
    return '\n'.join([f"{res['machine']}.\n", gpu.head(), *map(gpu.line, res['rows']), '\n![throughput](gpu.png)'])

def growth(res):
    few,many,large = (res[k][i] for k,i in (('by_number',0),('by_number',-1),('by_size',-1)))
    return (f"With {few['tensors']} small tensors it is {few['ours'][1]:.2g} ms (by hand {few['by_hand'][1]:.2g} ms), nearly all of it Python and fastai's events, with {many['tensors']:,} tensors "
            f"{many['ours'][1]:.0f} ms ({many['by_hand'][1]:.0f} ms). With {large['elements']:,} elements it is {large['ours'][1]:.0f} ms ({large['by_hand'][1]:.0f} ms), and one copy of as many bytes "
            f"takes {large['copy'][1]:.0f} ms.")

def make():
    steps,bf16,without,peaks,policies,ends,grows = map(read, ('step_cost','bf16_cpu','bf16_cpu_without','memory','scale_policy','convergence','scaling'))
    worst,ours = min(r['ours'][1] for r in bf16['rows']),{r['data']: r for r in policies['rows'] if r['policy']=='ours'}
    return f"""<!-- made by benchmarks/report.py -->
# Benchmarks

Each script writes a JSON file, and a picture where there is one, next to it; `python benchmarks/report.py` makes this page of them. Where times are compared,
contenders take turns in one process, so that what the machine does meanwhile happens to all of them; times are medians with quartiles, ratios are medians of ratios within
a round. No test asserts a time.

| `uv run python benchmarks/…` | shows |
| --- | --- |
{chr(10).join(f'| `{k}.py` | {v} |' for k,v in scripts.items())}

fastai's own classes have `'cuda'` built in; on a CPU they run with `'cpu'` in its place ([fastais.py](fastais.py)).

## What a step costs

{steps['machine']}, {steps['rounds']} rounds of {steps['steps']} steps. {', '.join(str(r['tensors']) for r in steps['rows'][:13:6])} tensors, most of them of 16 × 16 elements: what is measured is mostly the launching of operators.
The floor is the loop written by hand (autocast, `GradScaler`, fused AdamW, clipping) plus fastai's loop and callbacks around nothing.

{step_cost.table(steps)}

{step(steps)} Rest of the step means all that is dispatched outside forward and backward pass: unscaling, clipping, the check for overflow, the optimizer, noting norm statistics, and fastai's own
bookkeeping. Reads are those of numbers; on a GPU fastai's `Recorder` copies the loss besides, once a batch, in all rows of fastai's loop. `to_non_native_fp16` runs with `clip=1` and
`max_loss_scale=2**16`, since it would skip the first steps of each fit at its 2^24. In its 16th step and every 256th from there on ours runs the batch once more; medians do not see
that, [diagnosis.json](diagnosis.json) does.

## Real work, on a GPU

Whole trainings with `fit_one_cycle` by fastai, by this package, by Lightning and by Accelerate, the same models from the same weights, at two batch sizes:
`uv run python benchmarks/gpu.py` (nine minutes on a large GPU; `--bs 8 32` for a T4).

{real_work()}

## bf16 on a CPU

{bf16['machine']}, which has instructions for bf16. The goal was 1.8 times where plain torch reaches 2; the least here is {worst:.2f}.

{bf16_cpu.table(bf16)}

The same CPU, told not to use these instructions (`ONEDNN_MAX_CPU_ISA={without['limited_to']}`), as one that lacks them; of such a one `fp16_doctor` says so.

{bf16_cpu.table(without)}

## Memory

{peaks['machine']}. What three training steps of an MLP of {peaks['parameters']/1e6:.0f}M parameters add to the peak of the process, in multiples of the parameters' bytes in fp32; `Adam` and `GradientClip` with
fastai's, `AdamW16` and `GradientNormClip` with ours. Half-precision gradients turn into fp32 in parts of 25 MiB, as soon as they are there, and are kept no longer than until the step.

{memory.table(peaks)}

## How the loss scale should move

Of {len([r for r in ours.values() if r['kind']=='training'])} trainings ([trainings.py](trainings.py), computed in bf16, which overflows nowhere), [gradient_maxima.json](gradient_maxima.json) has the largest scale that no
gradient of each step would have overflowed at. Heavy tails are drawn around one maximum. "Bits below the best" counts up to 2^24, and only steps that are taken (a training whose steps are all
skipped, as one is at 512, counts for the first column only); "become 0" are gradients other than 0 that the scale leaves below fp16. Means over the trainings, and over the tails.

{scale_policy.table(policies)}

Growing sooner than torch regains bits for few skipped steps; the default is explained in [00_scaler](../nbs/00_scaler.ipynb). To grow only into room that maxima have shown would save some of these
steps, and would have to look at the maxima in all others: not worth its cost.

## Where trainings end

{ends['machine']}. {len(ends['rows'][0]['figures'])} seeds; the same seed gives the same data, weights and order of batches to all. Mean ± standard deviation, and in parentheses the mean of the paired differences to fp32 ± its
standard error, bold where a t-test at 5 % tells it from 0 (by chance, one in twenty would be).

![differences to fp32](convergence.png)

{convergence.table(ends)}

## How the cost grows

{grows['machine']}. What mixed precision adds to a step, in fastai's loop and in one by hand: casts of weights and gradients, unscaling, norm and check, and for ours fastai's events. The optimizer does nothing
here, there is no arithmetic, and the time of the same loop without mixed precision is subtracted.

![cost by number of tensors and by size](scaling.png)

{growth(grows)}
"""

if __name__=='__main__': (here/'README.md').write_text(make())
