"How slow fp16 convolutions are on a CPU, for which PyTorch has no fast kernels: steps of two networks, compared with fp32"
import argparse,json
from copy import deepcopy
from functools import partial
from pathlib import Path
import torch
from torch import nn
from bf16_cpu import learner
from fastai.basics import set_seed
from machine import machine
from timing import Batches,interleaved,quartiles,ratio
from torchvision.models import resnet18

modes = ('to_fp32','to_fp16_dynamic','to_bf16_dynamic')

def convs(width):
    "A network of four convolutions, of which one halves the image"
    def conv(i, o, stride=1): return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    body = conv(3, width),conv(width, width),conv(width, 2*width, 2),conv(2*width, 2*width)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2*width, 10))

def networks(a):
    "A name, a function that makes it, and the size of images, for each one"
    small = [(f'4 convolutions of {a.width} and {2*a.width} channels',partial(convs, a.width),size) for size in a.sizes]
    return [*small,*(('ResNet-18',partial(resnet18, num_classes=10),size) for size in a.resnet)]

def measure(name, make, size, bs, steps, rounds):
    set_seed(0)
    def batches(): return Batches([(torch.randn(bs, 3, size, size), torch.randint(10, (bs,))) for _ in range(steps)])
    model = make()
    times = interleaved({k: learner(k, deepcopy(model), batches()) for k in modes}, rounds)
    fp32,*half = times.values()
    ms = {k: [1e3*o for o in quartiles(v)] for k,v in times.items()}
    return dict(network=name, size=size, bs=bs, ms=ms, slower={k: ratio(t, fp32) for k,t in zip(modes[1:], half)})

def line(r):
    "A row of the table"
    times = ['{1:.0f} ({0:.0f} to {2:.0f})'.format(*r['ms'][k]) for k in modes]
    slower = ' | '.join(f'{q[1]:.2g}' for q in r['slower'].values())
    return f"| {r['network']} | {r['bs']}×3×{r['size']}×{r['size']} | {' | '.join(times)} | {slower} |"

def table(res):
    "A Markdown table"
    head = ['network','batch', *(f'`{k}`, ms' for k in modes), *(f'`{k}` / `to_fp32`' for k in modes[1:])]
    return '\n'.join([f"| {' | '.join(head)} |", '| --- | --- |'+' --: |'*(len(head)-2), *map(line, res['rows'])])

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--sizes', type=int, nargs='+', default=[8,16,32], help='heights and widths of the images')
    p.add_argument('--resnet', type=int, nargs='+', default=[64], help='the same for the ResNet-18')
    for k,default,what in (('width',32,'channels'), ('bs',8,'batch size'), ('steps',3,'steps per round'), ('rounds',5,'rounds')):
        p.add_argument('--'+k, type=int, default=default, help=what)
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    res = dict(machine=machine(), bf16=bf16, rows=[measure(*o, a.bs, a.steps, a.rounds) for o in networks(a)])
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
