"""Speed of bf16 on a CPU: `to_bf16_dynamic` and plain autocast, each compared with fp32, for a transformer and an MLP

Set `ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI` to simulate a CPU without instructions for bf16."""
import json,os,warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
import torch
from torch import nn
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoaders,Learner,set_seed
    from fastai_amp16.all import AdamW16,GradientNormClip
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import Batches,by_fastai,by_hand,interleaved,milliseconds,ratio

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
    ms,n = {k: milliseconds(v) for k,v in times.items()},sum(p.numel() for p in model.parameters())
    return dict(model=name, parameters=n, batch=[bs,*shape], ms=ms, ours=ratio(fp32, ours), by_hand=ratio(plain_fp32, plain))

def table(*results):
    "A Markdown table of one or more measurements"
    def line(res, r):
        fp32,ours,*_ = (f"{r['ms'][k][1]:.0f}" for k in contenders)
        speed = [f"{r[k][1]:.2f}" for k in ('ours','by_hand')]
        return r['model'],'not used' if res['limited_to'] else 'used',fp32,ours,*speed
    head = ['model','bf16 instructions','fp32, ms','`to_bf16_dynamic`, ms','speed, × fp32','speed of a PyTorch loop with autocast, × fp32']
    return markdown.table(head, (line(res, r) for res in results for r in res['rows']), 'llr')

def section(res):
    "With the results of a CPU without instructions for bf16, which have a file of their own"
    without = json.loads(Path(__file__).with_name('bf16_cpu_without.json').read_text())
    def speed(res, k='ours'): return markdown.span(r[k][1] for r in res['rows'])
    def size(r):
        return f"The {r['model']} has {r['parameters']/1e6:.0f}M parameters and batches of {'×'.join(map(str, r['batch']))}"
    return f"""### bf16 on a CPU

On a CPU with instructions for bf16, training with `to_bf16_dynamic` is {speed(res)} times as fast as in fp32, and {speed(res, 'by_hand')}
times with plain autocast. On one without them, it is {speed(without)} times as fast, and `fp16_doctor` warns you.

For the second case, the same CPU ran without these instructions (`ONEDNN_MAX_CPU_ISA={without['limited_to']}`).
{'. '.join(map(size, res['rows']))}. {markdown.ran(res)}

{table(res, without)}"""

def main(args=None):
    size = dict(width=(512,'width of the transformer'), depth=(6,'its depth'), seq=(64,'its tokens'), bs=(16,'its batch size'),
                mlp_width=(2048,'width of the MLP'), mlp_depth=(6,'its depth'), mlp_bs=(256,'its batch size'))
    p = parser(__file__, __doc__, **size, steps=(4,'steps per round'), rounds=(11,'rounds'))
    a = p.parse_args(args)
    rows = [measure('transformer', *transformer(a.width, a.depth, a.seq), a.bs, a.steps, a.rounds),
            measure('MLP', *mlp(a.mlp_width, a.mlp_depth), a.mlp_bs, a.steps, a.rounds)]
    res = dict(machine=machine(), limited_to=os.environ.get('ONEDNN_MAX_CPU_ISA'), rows=rows)
    print(table(res))
    store(res, a.out)

if __name__=='__main__': main()
