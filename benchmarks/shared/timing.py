"Times contenders that take turns in one process, so that changes in the speed of the machine affect all of them"
import gc,statistics,time
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from fastai.callback.core import Callback
from benchmarks.shared.fastais import fastais

class StepTimer(Callback):
    "Notes the time when a fit begins and after each batch"
    order = 200
    def before_fit(self): self.times = [time.perf_counter()]
    def after_batch(self): self.times.append(time.perf_counter())
    def steps(self):
        "Seconds of each step"
        return [b-a for a,b in zip(self.times, self.times[1:])]

class Batches:
    "A list of batches that are on the device already, in place of a data loader; `times` has what `clock` shows before each and at the end"
    def __init__(self, items, clock=time.perf_counter): self.items,self.clock,self.times,self.at_batch = items,clock,[],None
    def __len__(self): return len(self.items)
    def __iter__(self):
        self.times = []
        for o in [*self.items, None]:
            if self.at_batch: self.at_batch()
            self.times.append(self.clock())
            if o is not None: yield o
    def steps(self):
        "Seconds of each step, except the first one, which allocates memory"
        return [b-a for a,b in zip(self.times[1:], self.times[2:])]

def by_fastai(learn, batches):
    "A contender: an epoch of `learn`, whose data is `batches`"
    def run():
        with fastais(), learn.no_bar(), learn.no_logging(): learn.fit(1)
        return batches.steps()
    return run

def by_hand(model, batches, dtype=torch.float16, lr=1e-3):
    "A contender: the loop in PyTorch's documentation, with fused AdamW and clipping; `GradScaler` in fp16, and no autocast in fp32"
    dev = batches.items[0][0].device.type
    model.to(dev)
    opt,loss_func = torch.optim.AdamW(model.parameters(), lr, fused=True),nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(dev, enabled=dtype==torch.float16)
    half = dict(dtype=dtype) if dtype!=torch.float32 else dict(enabled=False)
    def run():
        model.train()
        for x,y in batches:
            with torch.autocast(dev, **half): loss = loss_func(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            clip_grad_norm_(model.parameters(), 1.)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return batches.steps()
    return run

def interleaved(
    contenders, # Dict from names to functions that run some steps and return the seconds of each
    rounds # How many times each contender runs
):
    "Returns a dict from names to the median seconds of a step in each round"
    res = {k: [] for k in contenders}
    names = list(contenders)
    gc.collect()
    gc.freeze() # no need to scan existing objects again
    gc.disable() # a collection would slow down only one of them
    try:
        for i in range(rounds+1):
            for k in names[i%len(names):]+names[:i%len(names)]: # no contender always follows the same one
                t = statistics.median(contenders[k]())
                if i: res[k].append(t) # the first round warms up
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return res

def quartiles(xs):
    "First quartile, median, third quartile"
    return statistics.quantiles(xs, n=4, method='inclusive') if len(xs)>1 else list(xs)*3

def milliseconds(seconds): return [1e3*o for o in quartiles(seconds)]

def ratio(a, b):
    "Quartiles of the ratios of `a` to `b`, round by round"
    return quartiles([x/y for x,y in zip(a, b)])
