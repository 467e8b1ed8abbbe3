"""Speed of bf16 on a CPU: `to_bf16_dynamic` and plain autocast, each compared with fp32, for a transformer and an MLP

Set `ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` to simulate a CPU without instructions for bf16."""
import argparse,json,os,warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
import torch
from torch import nn
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoaders,Learner,set_seed
    from fastai_amp16.all import AdamW16,GradientNormClip
from machine import machine
from timing import Batches,by_fastai,by_hand,interleaved,quartiles,ratio

class Mean(nn.Module):
    def forward(self, x): return x.mean(1)

def transformer(d, depth, seq):
    layers = [nn.TransformerEncoderLayer(d, 8, 4*d, 0., 'gelu', batch_first=True, norm_first=True) for _ in range(depth)]
    return nn.Sequential(*layers, nn.LayerNorm(d), Mean(), nn.Linear(d, 10)),(seq,d)

def mlp(d, depth):
    layers = [m for _ in range(depth) for m in (nn.Linear(d, d), nn.LayerNorm(d), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(d, 10)),(d,)

def learner(to, model, batches):
    dls = DataLoaders(batches, [], device=torch.device('cpu'))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), AdamW16, lr=1e-4, cbs=GradientNormClip(1.))
    return by_fastai(getattr(learn, to)(), batches)

contenders = {
    'fastai, fp32': partial(learner, 'to_fp32'),
    'to_bf16_dynamic': partial(learner, 'to_bf16_dynamic'),
    'PyTorch by hand, fp32': partial(by_hand, dtype=torch.float32, lr=1e-4),
    'PyTorch by hand, autocast': partial(by_hand, dtype=torch.bfloat16, lr=1e-4)}

def measure(name, model, shape, bs, steps, rounds):
    set_seed(0)
    def batches(): return Batches([(torch.randn(bs, *shape), torch.randint(10, (bs,))) for _ in range(steps)])
    times = interleaved({k: make(deepcopy(model), batches()) for k,make in contenders.items()}, rounds)
    fp32,ours,plain_fp32,plain = times.values()
    ms,n = {k: [1e3*o for o in quartiles(v)] for k,v in times.items()},sum(p.numel() for p in model.parameters())
    return dict(model=name, parameters=n, batch=[bs,*shape], ms=ms, ours=ratio(fp32, ours), by_hand=ratio(plain_fp32, plain))

def line(r):
    "A row of the table"
    times = ['{1:.0f} ({0:.0f} to {2:.0f})'.format(*r['ms'][k]) for k in contenders]
    cells = [f"{r['model']}, {r['parameters']/1e6:.0f}M parameters", '×'.join(map(str, r['batch'])), *times]
    return '| '+' | '.join([*cells, *(f'{r[k][1]:.2f}×' for k in ('ours','by_hand'))])+' |'

def table(res):
    "A Markdown table"
    shown = 'fastai in fp32','`to_bf16_dynamic`','PyTorch loop in fp32','PyTorch loop with autocast'
    head = ['model', 'batch', *(f'{k}, ms' for k in shown), 'speedup, `to_bf16_dynamic`', 'speedup, autocast']
    return '\n'.join(['| '+' | '.join(head)+' |', '| --- | --- |'+' --: |'*(2+len(contenders)), *map(line, res['rows'])])

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sizes = dict(width=512, depth=6, seq=64, mlp_width=2048, mlp_depth=6, bs=16, mlp_bs=256, steps=4, rounds=11)
    for k,default in sizes.items(): p.add_argument('--'+k, type=int, default=default)
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    rows = [measure('transformer', *transformer(a.width, a.depth, a.seq), a.bs, a.steps, a.rounds),
            measure('MLP', *mlp(a.mlp_width, a.mlp_depth), a.mlp_bs, a.steps, a.rounds)]
    res = dict(machine=machine(), limited_to=os.environ.get('ONEDNN_MAX_CPU_ISA'), rows=rows)
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
