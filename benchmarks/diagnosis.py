"What diagnosis costs: a healthy fit with and without it, and a report in training steps; all in one interleaved run"
import argparse,platform,statistics,time,warnings
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoader,DataLoaders,Learner,default_device,nn,set_seed
    from fastai_amp16.all import AdamW16,DynamicMixedPrecision

class Bare(DynamicMixedPrecision):
    "Without the look at predictions in the 16th step, the 160th, ..., which is all that diagnosis does where nothing overflows"
    def _check_silent(self, scale): pass

def learner(cb, depth, width, steps, bs):
    set_seed(0)
    x = torch.randn(steps*bs, width)
    dls = DataLoaders(DataLoader(list(zip(x, x[:,:1])), bs=bs), DataLoader([], bs=bs), device=default_device())
    model = nn.Sequential(*[m for _ in range(depth//2) for m in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 1))
    return Learner(dls, model, nn.MSELoss(), AdamW16, lr=1e-4, cbs=cb())

def fit(learn):
    start = time.perf_counter()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return time.perf_counter()-start

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,default in dict(depth=50, width=64, steps=100, bs=32, rounds=15).items(): p.add_argument('--'+name, type=int, default=default)
    a = p.parse_args()
    args = (a.depth, a.width, a.steps, a.bs)
    fit(learner(Bare, *args)) # warm up
    ratios,costs = [],[]
    for i in range(a.rounds):
        seconds = {cb: fit(learner(cb, *args)) for cb in ((Bare,DynamicMixedPrecision) if i%2 else (DynamicMixedPrecision,Bare))}
        ratios.append(seconds[DynamicMixedPrecision]/seconds[Bare])
        learn = learner(DynamicMixedPrecision, *args)
        start = time.perf_counter()
        learn.diagnose_fp16()
        costs.append((time.perf_counter()-start)/(seconds[Bare]/a.steps))
    print(f"{torch.cuda.get_device_name() if default_device().type=='cuda' else platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name,v in (('a fit with / without diagnosis', ratios), ('a report, in training steps', costs)):
        q = statistics.quantiles(v, n=4)
        print(f'{name}: {q[1]:.3f} (quartiles {q[0]:.3f} to {q[2]:.3f})')

if __name__=='__main__': main()
