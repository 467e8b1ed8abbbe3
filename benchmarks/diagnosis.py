"What diagnosis costs: a healthy fit with and without it, and a report in training steps; all in one interleaved run"
import argparse,json,statistics,time,warnings
from pathlib import Path
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,DataLoader,DataLoaders,Learner,default_device,nn,set_seed
    import fastai_amp16.callback as callback
    from fastai_amp16.all import AdamW16,DynamicMixedPrecision
    from machine import machine

class StepTimer(Callback):
    order = 200
    def before_fit(self): self.times = [time.perf_counter()]
    def after_batch(self): self.times.append(time.perf_counter())

def learner(depth, width, steps, bs):
    set_seed(0)
    x = torch.randn(steps*bs, width)
    dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=bs), DataLoader([], bs=bs), device=default_device())
    model = nn.Sequential(*[m for _ in range(depth//2) for m in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 1))
    return Learner(dls, model, nn.MSELoss(), AdamW16, lr=1e-4, cbs=[DynamicMixedPrecision(),StepTimer()])

def fit(learn):
    "Seconds of each step"
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return [b-a for a,b in zip(learn.step_timer.times, learn.step_timer.times[1:])]

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,default in dict(depth=50, width=64, steps=150, bs=32, rounds=31).items(): p.add_argument('--'+name, type=int, default=default)
    a = p.parse_args()
    args = (a.depth, a.width, a.steps, a.bs)
    fit(learner(*args)) # warm up
    # all that diagnosis does where nothing overflows: it finds out what modules carry from batch to batch, and looks at predictions in the 16th step, the 272nd, ...
    note,asked,fits,costs = callback._Carried.note,callback._is_asked,{True: [], False: []},[]
    for i in range(a.rounds):
        for looks in (i%2==0, i%2==1):
            callback._is_asked = asked if looks else lambda n: False
            callback._Carried.note = note if looks else lambda self: {}
            fits[looks].append(fit(learner(*args)))
        learn = learner(*args)
        start = time.perf_counter()
        learn.diagnose_fp16()
        costs.append((time.perf_counter()-start)/statistics.median(fits[False][-1]))
    # measured in steps of the same fit, since the machine's speed changes between fits
    with_,without = (statistics.median(sum(o)/statistics.median(o) for o in fits[looks]) for looks in (True,False))
    step = statistics.median(map(statistics.median, fits[False]))
    res = dict(machine=machine(), **vars(a), ms_per_step=1e3*step, fit_with_over_without=with_/without, report_in_steps=statistics.quantiles(costs, n=4))
    print(json.dumps(res, indent=1))
    (Path(__file__).parent/'diagnosis.json').write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
