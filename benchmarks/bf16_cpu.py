"""bf16 on a CPU: `to_bf16_dynamic` and plain autocast, each next to its fp32, for a transformer and an MLP of useful size

`ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` shows what a CPU without the instructions would do."""
import argparse,json,os,warnings
from copy import deepcopy
from pathlib import Path
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoaders,Learner,set_seed
    from fastai_amp16.all import AdamW16,GradientNormClip
from machine import machine
from timing import Batches,interleaved,quartiles,ratio

class Mean(nn.Module):
    def forward(self, x): return x.mean(1)

def transformer(d, depth, seq):
    layers = [nn.TransformerEncoderLayer(d, 8, 4*d, 0., 'gelu', batch_first=True, norm_first=True) for _ in range(depth)]
    return nn.Sequential(*layers, nn.LayerNorm(d), Mean(), nn.Linear(d, 10)),(seq,d)

def mlp(d, depth, _): return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(d, d), nn.LayerNorm(d), nn.GELU())], nn.Linear(d, 10)),(d,)

def fastai(to):
    def make(model, batches):
        learn = getattr(Learner(DataLoaders(batches, [], device=torch.device('cpu')), model, nn.CrossEntropyLoss(), AdamW16, lr=1e-4, cbs=GradientNormClip(1.)), to)()
        def run():
            with learn.no_bar(), learn.no_logging(): learn.fit(1)
            return batches.steps()
        return run
    return make

def by_hand(bf16):
    def make(model, batches):
        opt,loss_func = torch.optim.AdamW(model.parameters(), 1e-4, fused=True),nn.CrossEntropyLoss()
        def run():
            model.train()
            for x,y in batches:
                with torch.autocast('cpu', torch.bfloat16, enabled=bf16): loss = loss_func(model(x), y)
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.)
                opt.step()
                opt.zero_grad()
            return batches.steps()
        return run
    return make

contenders = {'fastai, fp32': fastai('to_fp32'), 'to_bf16_dynamic': fastai('to_bf16_dynamic'), 'PyTorch by hand, fp32': by_hand(False), 'PyTorch by hand, autocast': by_hand(True)}

def measure(name, model, shape, bs, steps, rounds):
    set_seed(0)
    def batches(): return Batches([(torch.randn(bs, *shape), torch.randint(10, (bs,))) for _ in range(steps)])
    times = interleaved({k: make(deepcopy(model), batches()) for k,make in contenders.items()}, rounds)
    fp32,ours,plain_fp32,plain = times.values()
    return dict(model=name, parameters=sum(p.numel() for p in model.parameters()), batch=[bs,*shape], ms={k: [1e3*o for o in quartiles(v)] for k,v in times.items()},
                ours=ratio(fp32, ours), by_hand=ratio(plain_fp32, plain))

def table(res):
    "Markdown"
    lines = ['| model | batch | '+' | '.join(f'{k}, ms' for k in contenders)+' | bf16 is faster than fp32, ours | by hand |', '| --- | --- |'+' --: |'*(2+len(contenders))]
    return '\n'.join(lines+[f"| {r['model']}, {r['parameters']/1e6:.0f}M parameters | {'×'.join(map(str, r['batch']))} | "+
        ' | '.join('{1:.0f} ({0:.0f} to {2:.0f})'.format(*r['ms'][k]) for k in contenders)+f" | {r['ours'][1]:.2f} times | {r['by_hand'][1]:.2f} times |" for r in res['rows']])

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for k,default in dict(width=512, depth=6, seq=64, mlp_width=2048, mlp_depth=6, bs=16, mlp_bs=256, steps=4, rounds=11).items(): p.add_argument('--'+k, type=int, default=default)
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'))
    a = p.parse_args(args)
    rows = [measure('transformer', *transformer(a.width, a.depth, a.seq), a.bs, a.steps, a.rounds), measure('MLP', *mlp(a.mlp_width, a.mlp_depth, None), a.mlp_bs, a.steps, a.rounds)]
    res = dict(machine=machine(), limited_to=os.environ.get('ONEDNN_MAX_CPU_ISA'), rows=rows)
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
