"What being able to run a batch again costs a healthy fit, what a look at its predictions costs, and a report; all in training steps"
import argparse,json,statistics,time,warnings
from pathlib import Path
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,DataLoader,DataLoaders,Learner,default_device,nn,set_seed
    from fastai_amp16.all import AdamW16
from machine import machine
from timing import quartiles

look = 15 # the step, from 0, in which predictions are compared with those of fp32; then every 256th

class StepTimer(Callback):
    order = 200
    def before_fit(self): self.times = [time.perf_counter()]
    def after_batch(self): self.times.append(time.perf_counter())

def learner(depth, width, steps, bs, **kwargs):
    set_seed(0)
    x = torch.randn(steps*bs, width)
    dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=bs), DataLoader([], bs=bs), device=default_device())
    model = nn.Sequential(*[m for _ in range(depth//2) for m in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 1))
    return Learner(dls, model, nn.MSELoss(), AdamW16, lr=1e-4, cbs=StepTimer()).to_fp16_dynamic(**kwargs)

def fit(learn):
    "Seconds of each step"
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    mp,times = learn.mixed_precision,learn.step_timer.times
    if mp.n_rerun: raise RuntimeError(f'{mp.n_rerun} runs of batches again: this fit is not healthy')
    return [b-a for a,b in zip(times, times[1:])]

def report(learn):
    "Seconds of a report"
    start = time.perf_counter()
    learn.diagnose_fp16()
    return time.perf_counter()-start

def measure(args, rounds):
    "By turns: fits that may run batches again, fits that may not, reports. In steps of the same fit, since the machine's speed changes"
    able,unable,looks,reports,steps = [],[],[],[],[]
    for i in range(rounds+1):
        fits = {rerun: fit(learner(*args, rerun=rerun)) for rerun in ((True,False),(False,True))[i%2]}
        if not i: continue # it warms up
        step = {k: statistics.median(v) for k,v in fits.items()}
        able.append(sum(fits[True])/step[False])
        unable.append(sum(fits[False])/step[False])
        looks.append(fits[True][look]/step[True]-1)
        reports.append(report(learner(*args))/step[True])
        steps.append(step[True])
    return dict(ms_per_step=1e3*statistics.median(steps), fit_with_over_without=statistics.median(able)/statistics.median(unable),
                look_in_steps=quartiles(looks), report_in_steps=quartiles(reports))

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,default in dict(depth=50, width=64, steps=150, bs=32, rounds=31).items(): p.add_argument('--'+name, type=int, default=default)
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'))
    a = p.parse_args(args)
    torch.set_num_threads(1)
    sizes = {k: v for k,v in vars(a).items() if k!='out'}
    res = dict(machine=machine(), **sizes, **measure((a.depth, a.width, a.steps, a.bs), a.rounds))
    print(json.dumps(res, indent=1))
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
