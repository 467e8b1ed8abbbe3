"How much memory it takes to keep accumulated batches so that they can run again, by batch size, up to the limit"
import argparse,json,subprocess,sys,warnings
from pathlib import Path
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,DataLoaders,Learner,nn
    from fastai.callback.training import GradientAccumulation
    from fastai_amp16.all import AdamW16
from machine import machine
from memory import peak

class Images:
    "Random images and classes, made on demand, as in a data loader"
    def __init__(self, n, bs, size): self.n,self.bs,self.size = n,bs,size
    def __len__(self): return self.n
    def __iter__(self):
        for _ in range(self.n): yield torch.randn(self.bs, 3, self.size, self.size),torch.randint(10, (self.bs,))

class Overflow(Callback):
    "Makes the gradients of the last batch overflow in fp16, and records how many bytes are kept by then"
    order,run_valid = 5,False
    def __init__(self, n): self.n = n
    def before_backward(self):
        if self.iter!=self.n-1: return
        batches = self.learn.mixed_precision.step.batches
        self.kept = sum(t.nbytes for o in batches.inputs[:-1] for ts in o for t in ts) # besides the current batch
        self.learn.loss_grad = self.loss_grad*1e4

def train(n, bs, size, rerun):
    "Trains one step of `n` batches of `bs` images: the bytes kept, peak memory after the step, and whether the step is taken"
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))
    dls,cbs = DataLoaders(Images(n, bs, size), []),[GradientAccumulation(n*bs),Overflow(n)]
    learn = Learner(dls, model, nn.CrossEntropyLoss(), AdamW16, cbs=cbs).to_fp16_dynamic(rerun=rerun)
    with warnings.catch_warnings(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('ignore')
        learn.fit(1, 1e-3)
    mp = learn.mixed_precision
    return dict(kept=learn.overflow.kept, peak=peak(), taken=len(mp.history)-mp.n_skipped)

def measure(*args):
    "How much peak memory grows if batches can run again"
    without,res = train(*args, rerun=False),train(*args, rerun=True)
    return {**res, 'peak': res['peak']-without['peak']}

def table(res):
    "A Markdown table"
    def line(r):
        mib = [f'{r[k]/2**20:.0f}' for k in ('kept','peak')]
        return [str(r['batch_size']), *mib, 'runs again' if r['taken'] else 'is skipped']
    head = ['batch size', 'kept, MiB', 'increase in peak memory, MiB', 'a step that overflows']
    return '\n'.join('| '+' | '.join(o)+' |' for o in (head, ['--:']*3+['---'], *map(line, res['rows'])))

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument('--accumulation', type=int, default=64, help='batches per step')
    p.add_argument('--size', type=int, default=224, help='height and width of the images')
    p.add_argument('--bs', type=int, nargs='+', default=[4,8,16,32], help='batch sizes')
    p.add_argument('--one', action='store_true', help='measure only the first batch size, and print its row')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    if a.one: return print(json.dumps(dict(batch_size=a.bs[0], **measure(a.accumulation, a.bs[0], a.size))))
    def row(bs): # in a new process: memory freed earlier would hide what is taken
        args = f'--one --accumulation {a.accumulation} --size {a.size} --bs {bs}'.split()
        res = subprocess.run([sys.executable, '-W', 'ignore', __file__, *args], check=True, capture_output=True, text=True)
        return json.loads(res.stdout)
    res = dict(machine=machine(), accumulation=a.accumulation, size=a.size, rows=[row(bs) for bs in a.bs])
    print(table(res))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
