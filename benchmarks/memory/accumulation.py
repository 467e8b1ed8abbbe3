"How much memory it takes to keep accumulated batches so that they can run again, by batch size, up to the limit"
import json,warnings
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,DataLoaders,Learner,nn
    from fastai.callback.training import GradientAccumulation
    from fastai_amp16.all import AdamW16
from benchmarks.memory.memory import peak
from benchmarks.shared import markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import in_new_process,parser,store

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
        return r['batch_size'],*mib,'runs again' if r['taken'] else 'is skipped'
    head = ['batch size', 'kept, MiB', 'increase in peak memory, MiB', 'a step that overflows']
    return markdown.table(head, map(line, res['rows']), 'rrrl')

def section(res):
    n,size = res['accumulation'],res['size']
    most = max((r for r in res['rows'] if r['kept']), key=lambda r: r['kept'])
    mib = {k: f'{most[k]/2**20:.0f} MiB' for k in ('kept','peak')}
    return f"""### Memory of accumulated batches

If a step accumulates the gradients of {n} batches of {most['batch_size']} images, {mib['kept']} of inputs and targets are kept so that they
can run again, and peak memory grows by {mib['peak']}, compared with `to_fp16_dynamic(rerun=False)`.

Up to 1 GiB is kept. Beyond that, the batches are freed (so the peak has grown by then), and a step that overflows is skipped. The
images have 3 × {size} × {size} numbers in fp32. {markdown.ran(res)}

{table(res)}"""

def main(args=None):
    p = parser(__file__, __doc__, accumulation=(64,'batches per step'), size=(224,'height and width of the images'),
               bs=([4,8,16,32],'batch sizes'))
    p.add_argument('--one', action='store_true', help='measure only the first batch size, and print its row')
    a = p.parse_args(args)
    if a.one: return print(json.dumps(dict(batch_size=a.bs[0], **measure(a.accumulation, a.bs[0], a.size))))
    def row(bs): # in a new process: memory freed earlier would hide what is taken
        return json.loads(in_new_process(__file__, '--one', '--accumulation', a.accumulation, '--size', a.size, '--bs', bs))
    res = dict(machine=machine(), accumulation=a.accumulation, size=a.size, rows=[row(bs) for bs in a.bs])
    print(table(res))
    store(res, a.out)

if __name__=='__main__': main()
