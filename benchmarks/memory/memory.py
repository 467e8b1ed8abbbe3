"""Peak memory of a training on a CPU. Each contender runs in its own process. For a GPU, see gpu.py

That of an MLP is in multiples of the size of its parameters. That of a model with large predictions, for a step and for a validation, is in
multiples of fp32's."""
import argparse,json,warnings
from functools import partial
from pathlib import Path
import torch
from torch import nn
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Adam,CrossEntropyLossFlat,DataLoaders,Learner
    from fastai.callback.all import GradientClip
    from fastai_amp16.all import AdamW16,GradientNormClip
from benchmarks.shared import markdown
from benchmarks.shared.fastais import fastais
from benchmarks.shared.machine import machine
from benchmarks.shared.script import in_new_process
from benchmarks.shared.timing import Batches

contenders = ('to_fp32','to_bf16','to_bf16_dynamic')

def peak():
    "The peak memory of this process so far, in bytes (on Linux)"
    line = next(o for o in Path('/proc/self/status').read_text().splitlines() if o.startswith('VmHWM'))
    return 1024*int(line.split()[1])

def train(to, width, depth, bs):
    "What three steps of an MLP add to peak memory (gradients, moments, activations, copies), divided by the size of its parameters"
    ours = to=='to_bf16_dynamic'
    model = nn.Sequential(*[o for _ in range(depth) for o in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 10))
    batches = Batches([(torch.randn(bs, width), torch.randint(10, (bs,))) for _ in range(3)])
    dls,(opt_func,clip) = DataLoaders(batches, [], device=torch.device('cpu')),(AdamW16,GradientNormClip) if ours else (Adam,GradientClip)
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func, lr=1e-5, cbs=clip(1.))
    before = peak()
    with fastais(), learn.no_bar(), learn.no_logging(): getattr(learn, to)().fit(1)
    return (peak()-before)/sum(p.nbytes for p in model.parameters())

# %% a model that predicts many numbers
def large_predictions(words, width=64):
    "A language model with few weights, and as many predictions for each token as there are words"
    return nn.Sequential(nn.Embedding(words, width), nn.Linear(width, words))

base,comparing = 'to_fp32',dict(to_fp16_dynamic=Learner.to_fp16_dynamic, to_bf16_dynamic=Learner.to_bf16_dynamic)
large_contenders = {base: Learner.to_fp32, **comparing, **{f'{k}(rerun=False)': partial(to, rerun=False) for k,to in comparing.items()}}
parts = ('step 1','validation')

def predict(to, part, bs, seq, words):
    "What the first step of a fit, or a validation, adds to peak memory, in bytes"
    def run(bs, seq, words):
        text = torch.randint(words, (bs,seq+1))
        batch = [(text[:,:-1].contiguous(),text[:,1:].contiguous())]
        dls = DataLoaders(*map(Batches, (batch,[]) if part=='step 1' else ([],batch)), device=torch.device('cpu'))
        learn = large_contenders[to](Learner(dls, large_predictions(words), CrossEntropyLossFlat(), AdamW16, lr=1e-5))
        with learn.no_bar(), learn.no_logging(): learn.fit(1) if part=='step 1' else learn.validate()
    run(1, 2, 10) # loads libraries
    before = peak()
    run(bs, seq, words)
    return peak()-before

# %% results
def main(args=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for k,default in dict(width=3072, depth=6).items(): p.add_argument('--'+k, type=int, default=default, help=f'{k} of the MLP')
    p.add_argument('--bs', type=int, nargs='+', default=[4,2048], help='batch sizes')
    p.add_argument('--predictions', type=int, nargs=3, default=[64,70,10_000], help='batch size, tokens per text, and words')
    p.add_argument('--contender', choices={*contenders, *large_contenders}, help='train only this one, and print its result')
    p.add_argument('--part', choices=parts, help='measure only this, with the model that has large predictions')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    if a.part: return print(predict(a.contender, a.part, *a.predictions))
    if a.contender: return print(train(a.contender, a.width, a.depth, a.bs[0]))
    def run(to, *args): return float(in_new_process(__file__, '--contender', to, *args))
    rows = [dict(batch_size=bs, **{to: run(to, '--width', a.width, '--depth', a.depth, '--bs', bs) for to in contenders}) for bs in a.bs]
    large = []
    for part in parts:
        mib = {to: run(to, '--part', part, '--predictions', *a.predictions)/2**20 for to in large_contenders}
        large.append(dict(part=part, mib=mib, over_fp32={to: o/mib[base] for to,o in mib.items()}))
    res = dict(machine=machine(), parameters=a.depth*a.width*(a.width+1), rows=rows, predictions=a.predictions, large=large)
    print(table(res), table_large(res), sep='\n\n')
    a.out.write_text(json.dumps(res, indent=1)+'\n')

def line(cells): return '| '+' | '.join(cells)+' |'

def table(res):
    "A Markdown table"
    rows = [line([str(r['batch_size']), *(f'{r[o]:.2f}' for o in contenders)]) for r in res['rows']]
    return '\n'.join([line(['batch size', *(f'`{o}`' for o in contenders)]), '| --: |'+' --: |'*len(contenders), *rows])

def table_large(res):
    "A Markdown table of peaks in multiples of fp32's, and in MiB"
    parts = [r['part'] for r in res['large']]
    lines = ((f'`{o}`', *(f"{r['over_fp32'][o]:.2f} ({r['mib'][o]:.0f})" for r in res['large'])) for o in large_contenders)
    return markdown.table(['peak / fp32 (MiB)', *parts], lines)

def _of_large(res):
    bs,seq,words = res['predictions']
    def span(part): return markdown.span(r['over_fp32'][o] for r in res['large'] if r['part']==part for o in comparing)
    never = [o for o in large_contenders if o not in (base,*comparing)]
    without,peaks = markdown.span(r['over_fp32'][o] for r in res['large'] for o in never),[r['mib'][base] for r in res['large']]
    return f"""The first step of a fit and each validation compare predictions with those of fp32. If there are many predictions, this takes
memory: the step reaches {span('step 1')} times the peak of fp32 ({peaks[0]:.0f} MiB), and the validation {span('validation')} times
({peaks[1]:.0f} MiB). Without comparisons (`rerun=False`), both are {without}
times fp32's.

The model is an embedding and a linear layer, and predicts {bs} × {seq} × {words:,} numbers, in fp16 and in bf16. {markdown.ran(res)}"""

def section(res):
    def span(k): return markdown.span(r[k] for r in res['rows'])
    large = res.get('large', [])
    of_large = f"""

#### Large predictions

{_of_large(res)}""" if large else ''
    return f"""### Peak memory on a CPU

With `to_bf16_dynamic`, three training steps add {span('to_bf16_dynamic')} times the size of the parameters to peak memory. In fp32, they
add {span('to_fp32')} times, and with fastai's `to_bf16` {span('to_bf16')} times: `Adam`, unlike the fused `AdamW16`, makes temporary
copies.

The model is an MLP with {res['parameters']/1e6:.0f}M parameters. fastai's own classes run with `Adam` and `GradientClip`, this package with
`AdamW16` and `GradientNormClip`. Here and below, memory that is free goes back to the system at once (`MALLOC_MMAP_THRESHOLD_`), so that
peaks are of what is in use. {markdown.ran(res)}

{table(res)}{of_large}"""

if __name__=='__main__': main()
