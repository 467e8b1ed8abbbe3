"Peak memory of a training on a CPU, in multiples of the size of the parameters. Each runs in its own process. For a GPU, see gpu.py"
import argparse,json,subprocess,sys,warnings
from pathlib import Path
import torch
from torch import nn
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Adam,DataLoaders,Learner
    from fastai.callback.all import GradientClip
    from fastai_amp16.all import AdamW16,GradientNormClip
from fastais import fastais
from machine import machine
from timing import Batches

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

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for k,default in dict(width=3072, depth=6).items(): p.add_argument('--'+k, type=int, default=default, help=f'{k} of the MLP')
    p.add_argument('--bs', type=int, nargs='+', default=[4,2048], help='batch sizes')
    p.add_argument('--contender', choices=contenders, help='train only this one, and print its result')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    if a.contender: return print(train(a.contender, a.width, a.depth, a.bs[0]))
    def run(to, bs):
        args = f'--contender {to} --width {a.width} --depth {a.depth} --bs {bs}'.split()
        return float(subprocess.run([sys.executable, '-W', 'ignore', __file__, *args], check=True, capture_output=True, text=True).stdout)
    rows = [dict(batch_size=bs, **{to: run(to, bs) for to in contenders}) for bs in a.bs]
    res = dict(machine=machine(), parameters=a.depth*a.width*(a.width+1), rows=rows)
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

def table(res):
    "A Markdown table"
    def line(cells): return '| '+' | '.join(cells)+' |'
    rows = [line([str(r['batch_size']), *(f'{r[o]:.2f}' for o in contenders)]) for r in res['rows']]
    return '\n'.join([line(['batch size', *(f'`{o}`' for o in contenders)]), '| --: |'+' --: |'*len(contenders), *rows])

if __name__=='__main__': main()
