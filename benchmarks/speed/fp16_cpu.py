"How slow fp16 convolutions are on a CPU, for which PyTorch has no fast kernels: steps of two networks, compared with fp32"
from copy import deepcopy
from functools import partial
import torch
from torch import nn
from benchmarks.speed.bf16_cpu import learner # first: it hides a warning of fastai's import
from fastai.basics import set_seed
from torchvision.models import resnet18
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import Batches,interleaved,milliseconds,ratio

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
    ms = {k: milliseconds(v) for k,v in times.items()}
    return dict(network=name, size=size, bs=bs, ms=ms, slower={k: ratio(t, fp32) for k,t in zip(modes[1:], half)})

def table(res):
    "A Markdown table"
    def line(r):
        slower = '1',*(f'{q[1]:.2g}' for q in r['slower'].values())
        return r['network'],f"{r['bs']}×3×{r['size']}×{r['size']}",*(f"{o} ({r['ms'][k][1]:.0f})" for k,o in zip(modes, slower))
    return markdown.table(['time / fp32 (ms)','batch', *(f'`{k}`' for k in modes)], map(line, res['rows']), 'llr')

def section(res):
    slower = markdown.span((r['slower']['to_fp16_dynamic'][1] for r in res['rows']), '.2g')
    return f"""### fp16 convolutions on a CPU

On a CPU, a step of a convolutional network in fp16 takes {slower} times as long as in fp32. PyTorch has no fast kernels for it there, and
the first fit warns you. {markdown.ran(res, f"{'with' if res['bf16'] else 'without'} instructions for bf16")}

{table(res)}"""

def main(args=None):
    p = parser(__file__, __doc__, sizes=([8,16,32],'heights and widths of the images'), resnet=([64],'the same for the ResNet-18'),
               width=(32,'channels'), bs=(8,'batch size'), steps=(3,'steps per round'), rounds=(5,'rounds'))
    a = p.parse_args(args)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    res = dict(machine=machine(), bf16=bf16, rows=[measure(*o, a.bs, a.steps, a.rounds) for o in networks(a)])
    print(table(res))
    store(res, a.out)

if __name__=='__main__': main()
